"""The clean-up by time: expired sessions, results and checkpoints, and unused files."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.records import CheckpointRecord, Update
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_engine.store.open import OpenStore
from tuneserve_engine.telemetry.log_throttle import ThrottledLog
from tuneserve_server.cleanup.awake import AwakeTime
from tuneserve_server.cleanup.siblings import Siblings
from tuneserve_server.cleanup.unused_files import UNNAMED_S, UnusedFiles

logger = logging.getLogger(__name__)

_GRACE_S = 120.0
"""The time after a start, and after the store was away, in which the sweeps are patient.

Clients need it to send the heartbeats that they could not send, and workers to name the files that
they have written.
"""
_PAGE = 500


async def sweep_forever(  # noqa: PLR0913 - the last ones by name
    store: OpenStore,
    unused: UnusedFiles,
    policy: SweepPolicy,
    interval_s: float,
    awake: AwakeTime | None = None,
    *,
    siblings: Siblings | None = None,
    first: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Sweep every ``interval_s`` until cancelled. A failed sweep is logged and tried again.

    ``first`` is called once, after the first sweep of the store; ``siblings`` are the other API
    processes on the same store.
    """
    faults = ThrottledLog(logger)
    sweeper = _Sweeper(store, unused, policy, awake or AwakeTime(interval_s), siblings, first)
    while True:
        sweeper.rest()
        await asyncio.sleep(interval_s)
        try:
            if not await sweeper.sweep():
                faults.warn("damaged", "the clean-up is suspended: the store is damaged")
        except (StoreFailed, ConnectionError) as error:
            sweeper.falter()
            faults.warn("away", f"the clean-up is waiting for the store: {error}")
        except Exception:
            sweeper.falter()
            logger.exception("the clean-up failed; the next attempt is in %g s", interval_s)


class _Sweeper:
    """The state that is kept from one sweep to the next."""

    def __init__(  # noqa: PLR0913 - as above
        self,
        store: OpenStore,
        unused: UnusedFiles,
        policy: SweepPolicy,
        awake: AwakeTime,
        siblings: Siblings | None,
        first: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._store = store
        self._unused = unused
        self._policy = policy
        self._awake = awake
        self._siblings = siblings
        self._first = first
        self._back_s: float | None = 0.0  # how far the clock was set back; None: no records to date
        self._was_away = False  # since the last look at the siblings
        self._steady_s = awake.clock()  # the start, or the last failed sweep
        self._gap_s = awake.clock()  # the start, or the last absence or clock jump

    def falter(self) -> None:
        self._steady_s = self._awake.clock()

    def rest(self) -> None:
        """Note the time of the sweep; call this before the pause between two sweeps."""
        self._note(self._awake.tick(worked=True))

    def _note(self, excess_s: float) -> None:
        if excess_s:
            _tell_gap(excess_s)
            self._gap_s = self._awake.clock()
        if excess_s < 0:
            self._back_s = (self._back_s or 0.0) - excess_s
        self._was_away = self._was_away or excess_s > 0

    async def sweep(self) -> bool:
        """Sweep once. Returns False, without sweeping, if the store is damaged."""
        store, awake = self._store, self._awake
        now_s = awake.wall()
        self._note(awake.tick())
        if store.soundness.state == "damaged":
            return False
        is_steady = awake.clock() - self._steady_s > _GRACE_S
        hears_all = await self._hears_all()
        of_time = in_time_awake(self._policy, awake)
        if not (is_steady and hears_all):
            of_time = patient(of_time)
        await store.sweep(awake.wall(), replace(of_time, set_back_s=self._back_s or 0.0))
        await self._date_back()
        if self._first is not None:
            await self._first()
            self._first = None
        is_quiet = is_steady and awake.clock() - self._gap_s > _GRACE_S
        if is_quiet and store.soundness.state != "checking":
            await self._unused.clean(awake.age_s(UNNAMED_S), now_s=now_s)
        else:
            await self._unused.prove()
        return True

    async def _date_back(self) -> None:
        if self._back_s is not None:
            await date_back(self._store, self._awake.wall(), self._back_s)
            self._back_s = None

    async def _hears_all(self) -> bool:
        """Return whether all API processes hear their clients."""
        if self._siblings is None:
            return True
        absence = await self._siblings.look(was_away=self._was_away)
        self._was_away = False
        if absence.over_s:
            self._awake.absent(absence.over_s)
        return not absence.lasts


def _tell_gap(excess_s: float) -> None:
    logger.warning(
        "the clock advanced %g s %s than this process was awake: the process was stopped, or the "
        "clock was set; no session or result expires because of it",
        abs(excess_s),
        "more" if excess_s > 0 else "less",
    )


def in_time_awake(policy: SweepPolicy, awake: AwakeTime) -> SweepPolicy:
    """Return the policy with the limits of silence and retention stretched by absences.

    These limits are for silence and for the retention of results and recordings. Only the time in
    which this process could hear its clients counts for them.
    """
    return replace(
        policy,
        session_ttl_s=awake.age_s(policy.session_ttl_s),
        sample_ttl_s=awake.age_s(policy.sample_ttl_s),
        gap_ttl_s=awake.age_s(policy.gap_ttl_s),
        park_s=awake.age_s(policy.park_s),
        result_ttl_s=awake.age_s(policy.result_ttl_s),
        recording_ttl_s=awake.age_s(policy.recording_ttl_s),
    )


async def date_back(store: Store, now_s: float, by_s: float) -> None:
    """Date checkpoints from the future back by ``by_s``, or to now, and their expiry by as much.

    Such checkpoints were made before the clock was set back. The store's sweep dates all other
    records back.
    """
    offset, total = 0, 1
    while offset < total:
        page = await store.page_of_records(CheckpointRecord, limit=_PAGE, offset=offset)
        await store.update_record(
            *(_dated(each, now_s, by_s) for each in page.items if each.created_s > now_s)
        )
        offset, total = offset + _PAGE, page.total


def _dated(checkpoint: CheckpointRecord, now_s: float, by_s: float) -> Update:
    created_s = min(checkpoint.created_s - by_s, now_s)
    changes: dict[str, float] = {"created_s": created_s}
    if checkpoint.expires_s is not None:
        changes["expires_s"] = checkpoint.expires_s - (checkpoint.created_s - created_s)
    return Update("checkpoint", checkpoint.key, changes)


def patient(policy: SweepPolicy) -> SweepPolicy:
    """Return the policy for a time in which a silence may be this server's own absence."""
    never_s = 1e12
    gap_ttl_s = policy.gap_ttl_s + _GRACE_S
    return replace(policy, session_ttl_s=never_s, sample_ttl_s=never_s, gap_ttl_s=gap_ttl_s)
