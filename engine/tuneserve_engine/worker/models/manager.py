"""The models on this worker: restored before their first job, saved as recovery points while they
train, released when asked.

Device memory is a cache of the log: the newest recovery point and a replay of the requests after it
restore a model's state, bit for bit.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import OutOfMemory
from tuneserve_engine.core.errors import EngineError, FileDamaged, ServerError
from tuneserve_engine.core.jobs import Job, JobKind, Outcome
from tuneserve_engine.core.records import ModelStatus, Update
from tuneserve_engine.process.failpoints import failpoint
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import LogEntry, RecoveryPoint
from tuneserve_engine.store.files import new_file_id
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.execution.preparation import Preparation, prepared
from tuneserve_engine.worker.lease import StoreSession
from tuneserve_engine.worker.pending import PendingJobs

logger = logging.getLogger(__name__)

_TICK_S = 0.25


@dataclass(frozen=True)
class PointPolicy:
    """The policy for recovery points.

    A changed model is saved after ``interval_s`` or ``steps`` optimizer steps, whichever comes
    first. Writing takes at most the share ``busy`` of the time; due models wait for that.
    """

    interval_s: float = 60.0
    steps: int = 50
    busy: float = 0.25


@dataclass
class _HostedModel:
    """The event loop's record of a model on this worker."""

    is_ready: bool  # its state is on the device
    held: list[Job] = field(default_factory=list)  # jobs that wait until it is ready, or gone
    is_leaving: bool = False
    changed_s: float | None = None  # the time since when it differs from its newest point
    steps: int = 0  # optimizer steps since then
    is_accumulating: bool = False
    has_bad_point: bool = False  # the store keeps a point of it that cannot be read
    updates: tuple[Update, ...] = ()  # record updates to send with its next outcome


class ModelHost(Protocol):
    """The worker, as the model manager sees it."""

    link: StoreSession
    backlog: PendingJobs

    def spawn(self, task: Coroutine[Any, Any, None]) -> None:
        """Run the task beside everything else; an exception that it raises ends the worker."""
        ...

    async def on_device(self, call: Callable[[], Any]) -> Any: ...

    async def on_disk(self, call: Callable[[], Any]) -> Any: ...

    def offer(self, outcomes: list[Outcome]) -> None: ...

    async def stored(self, model_id: str, position: int | None) -> None:
        """Wait until the results of the model's requests before ``position`` are durable."""
        ...

    async def without_takes(self, call: Callable[[], Awaitable[None]]) -> None: ...

    def clock(self) -> float: ...


class ModelManager:
    """The manager of this worker's models. Call it on the event loop."""

    def __init__(self, operations: JobExecutor, policy: PointPolicy, host: ModelHost) -> None:
        self._operations = operations
        self._policy = policy
        self._host = host
        self._models: dict[str, _HostedModel] = {}
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self._writing_s = 0.0  # disk time of the last point, without the time spent waiting
        self._leaving = asyncio.Lock()
        self.points_unreadable = 0  # recovery points that could not be used

    # --- jobs in, outcomes out ------------------------------------------------------------------

    def admit(self, job: Job) -> None:
        """Pass a model's job on: at once, or when the model is here."""
        model_id = job.model_id
        assert model_id is not None
        model = self._models.get(model_id)
        if model is None and job.kind == JobKind.UNLOAD_MODEL:
            self._host.backlog.add([job])  # an unload needs no restore first
        elif model is None and job.position == 0:
            self._create(model_id, job)
        elif model is None:
            self._models[model_id] = model = _HostedModel(is_ready=False, held=[job])
            self._host.spawn(self._bring_back(model_id, model))
        elif model.is_ready and not model.is_leaving:
            self._host.backlog.add([job])
        else:
            model.held.append(job)

    def _create(self, model_id: str, job: Job) -> None:
        """Pass the model's first job on, once the state shared by adapters of its kind is made."""
        prepare = self._operations.preparation(job)
        self._models[model_id] = model = _HostedModel(is_ready=prepare is None)
        if prepare is None:
            self._host.backlog.add([job])
        else:
            model.held.append(job)
            self._host.spawn(self._prepare(model, prepare))

    async def _prepare(self, model: _HostedModel, prepare: Preparation) -> None:
        await prepared(prepare)
        model.is_ready = True
        held, model.held = model.held, []
        self._host.backlog.add(held)

    def waiting(self, again: Job) -> str:
        """Return the id of the request for which a logged job is replayed."""
        return self._models[again.model_id or ""].held[0].request_id

    def done(self, job: Job, outcome: Outcome) -> Outcome:
        """Note what a job did to its model, and return the outcome to store."""
        model = self._models.get(job.model_id or "")
        if model is None or job.model_id is None:
            return outcome
        is_again = self._host.backlog.is_again(job)
        never_created = outcome.rejection is not None and job.position == 0 and not is_again
        if job.kind == JobKind.UNLOAD_MODEL or never_created:
            del self._models[job.model_id]
            return outcome
        if outcome.changed and not outcome.rejection:
            if model.changed_s is None:
                model.changed_s = self._host.clock()
            model.is_accumulating = job.kind == JobKind.FORWARD_BACKWARD
            model.steps += job.kind == JobKind.OPTIM_STEP
            self._changed.set()
        if is_again:
            return outcome
        updates, model.updates = model.updates, ()
        return replace(outcome, updates=outcome.updates + updates)

    # --- bringing back --------------------------------------------------------------------------

    async def _bring_back(self, model_id: str, model: _HostedModel) -> None:
        started_s = self._host.clock()
        try:
            points = await self._host.link.ask(lambda queue, epoch: queue.points(epoch, model_id))
            start = await self._load_point(model_id, points)
            count = await self._replay(model_id, model, start)
            if points:  # the newest may cover requests that changed nothing and are in no log
                reached = partial(self._operations.reached, model_id, points[0].position)
                await self._host.on_device(reached)
        except EngineError as error:
            logger.error("%s cannot be restored: %s", model_id, error, extra=_about(model_id))
            await self._host.on_device(partial(self._operations.forget, model_id))
            self._give_up_for_good(model_id, model)
            return
        except OutOfMemory as error:
            logger.error(
                "%s cannot be brought back here: %s", model_id, error, extra=_about(model_id)
            )
            await self._host.on_device(partial(self._operations.forget, model_id))
            self._turn_away(model_id, model, str(error))
            return
        seconds = self._host.clock() - started_s
        logger.info(
            "%s is back: %d requests done again, %.3f s",
            model_id,
            count,
            seconds,
            extra=_about(model_id),
        )
        model.is_ready = True
        held, model.held = model.held, []
        self._host.backlog.add(held)

    async def _load_point(self, model_id: str, points: Sequence[RecoveryPoint]) -> int:
        """Load the newest readable point and return the position to continue from.

        Raises ``OutOfMemory`` if this worker has read a point and cannot load it: the model is
        sound, and another worker may be able to. Raises ``ServerError`` if no point can be read.
        """
        for point in points:
            if point.numerics_id != self._operations.numerics_id:
                logger.warning(
                    "%s was saved under %s, this is %s: its numbers may differ in the last bits",
                    model_id,
                    point.numerics_id,
                    self._operations.numerics_id,
                    extra=_about(model_id),
                )
            try:
                state = await self._host.on_disk(partial(self._operations.read, point.file_id))
            except EngineError as error:
                self._bad_point(point, error)
                continue
            try:
                await prepared(self._operations.preparation(state.config))
                restore = partial(self._operations.restore, model_id, state, point.position)
                await self._host.on_device(restore)
            except EngineError as error:
                raise OutOfMemory(str(error)) from error
            return point.position
        if len(points) > 1:  # with fewer points, the log still starts with the model's creation
            raise ServerError("none of its recovery points can be read")
        return 0

    def _bad_point(self, point: RecoveryPoint, error: EngineError) -> None:
        self.points_unreadable += 1
        model = self._models[point.model_id]
        model.has_bad_point, model.changed_s = True, self._host.clock()  # so a save is due soon
        why = error.reason if isinstance(error, FileDamaged) else error
        says = "the recovery point of %s at request %d (file %s) is damaged or missing: %s; an "
        says += "older one and the log take its place"
        told = point.model_id, point.position, point.file_id, why
        logger.error(says, *told, extra=_about(point.model_id))

    async def _replay(self, model_id: str, model: _HostedModel, start: int) -> int:
        """Replay the log from position ``start`` on; return the number of replayed requests.

        Raises ``OutOfMemory`` if a request lacks room here, and ``ServerError`` if one fails.
        """
        count = 0
        while entries := await self._page(model_id, start):
            if start == 0:
                await prepared(self._operations.preparation(entries[0].job))
            outcomes = await self._host.backlog.again(entries, model.held[0].attempts)
            for entry, outcome in zip(entries, outcomes, strict=True):
                if outcome.rejection is not None and outcome.rejection.no_room:
                    raise OutOfMemory(outcome.rejection.message)
                if outcome.rejection is not None:
                    raise ServerError(
                        f"request {entry.job.position} fails now: {outcome.rejection.message}"
                    )
                if refusals.digest(outcome.body) != entry.digest and not model.updates:
                    logger.error(
                        "%s diverged at request %s",
                        model_id,
                        entry.job.position,
                        extra=_about(model_id),
                    )
                    model.updates = (Update("model", model_id, {"diverged": True}),)
            assert entries[-1].job.position is not None
            start = entries[-1].job.position + 1
            count += len(entries)
        return count

    async def _page(self, model_id: str, start: int) -> list[LogEntry]:
        return await self._host.link.ask(
            lambda queue, epoch: queue.log(epoch, model_id, start=start)
        )

    def _give_up_for_good(self, model_id: str, model: _HostedModel) -> None:
        """Mark the model lost; the store ends its other requests."""
        self._models.pop(model_id, None)
        status = Update("model", model_id, {"status": ModelStatus.LOST.value})
        first = model.held[0].request_id
        self._host.offer([Outcome(first, rejection=refusals.lost(model_id), updates=(status,))])

    def _turn_away(self, model_id: str, model: _HostedModel, why: str) -> None:
        """Reject the jobs that wait for the model; only its unloads still run.

        The model's record in the store does not change: the next request tries the restore again.
        """
        self._models.pop(model_id, None)
        no_room = refusals.no_room(model_id)
        no_room = replace(no_room, message=f"{no_room.message} (it said: {why})")
        unloads = [job for job in model.held if job.kind == JobKind.UNLOAD_MODEL]
        others = [job for job in model.held if job.kind != JobKind.UNLOAD_MODEL]
        self._host.backlog.add(unloads)
        self._host.offer([Outcome(job.request_id, rejection=no_room) for job in others])

    # --- recovery points ------------------------------------------------------------------------

    async def keep_points(self) -> None:
        """Save changed models as the policy says. Never returns."""
        while True:
            self._changed.clear()
            if not any(model.changed_s is not None for model in self._models.values()):
                await self._changed.wait()
            await asyncio.sleep(_TICK_S)
            for model_id in [m for m, model in self._models.items() if self._is_due(model)]:
                self._writing_s = 0.0
                await self._save_or_retry(model_id)
                await asyncio.sleep(self._writing_s * (1 / self._policy.busy - 1))

    def _is_due(self, model: _HostedModel) -> bool:
        if model.changed_s is None or not model.is_ready:
            return False
        # A point right after a step has no gradient to write, so a model that accumulates waits,
        # but at most twice as long: not every training loop steps often.
        late = 2 if model.is_accumulating else 1
        waited_s = self._host.clock() - model.changed_s
        return (
            waited_s >= late * self._policy.interval_s or model.steps >= late * self._policy.steps
        )

    async def save_all(self) -> None:
        """Save every changed model now."""
        for model_id, model in list(self._models.items()):
            if model.is_ready:
                await self._save_or_retry(model_id)

    async def _save_or_retry(self, model_id: str) -> None:
        try:
            await self._save(model_id)
        except OSError as error:
            logger.error(
                "the recovery point of %s was not written: %s",
                model_id,
                error,
                extra=_about(model_id),
            )

    async def _save(self, model_id: str) -> None:
        """Save the model's present state as its newest recovery point.

        Raises ``OSError`` if the file cannot be written.
        """
        async with self._writing:
            model = self._models.get(model_id)
            if model is None or model.changed_s is None:
                return
            captured = await self._host.on_device(partial(self._operations.capture, model_id))
            if captured is None:
                return
            state, position = captured
            model.changed_s, model.steps = None, 0
            try:
                # The store keeps two points: two new ones leave none that is damaged.
                for _ in range(2 if model.has_bad_point else 1):
                    await self._write(model_id, state, position)
                model.has_bad_point = False
            except OSError:
                model.changed_s = model.changed_s or self._host.clock()
                raise

    async def _write(self, model_id: str, state: AdapterState, position: int) -> None:
        # A result that is not stored would be computed again, on a state that already includes it.
        await self._host.stored(model_id, position)
        failpoint("point-before-file")
        file_id = new_file_id()
        started_s = self._host.clock()
        await self._host.on_disk(partial(self._operations.write, file_id, state))
        self._writing_s = self._host.clock() - started_s
        failpoint("point-after-file")
        point = RecoveryPoint(model_id, position, file_id, self._operations.numerics_id)
        await self._host.link.ask(lambda queue, epoch: queue.save_point(epoch, point))
        failpoint("point-saved")

    # --- giving up ------------------------------------------------------------------------------

    def give_up(self, model_ids: list[str]) -> None:
        """Release these models, each after its running jobs have ended."""
        for model_id in model_ids:
            model = self._models.get(model_id)
            if model is None:
                self._host.spawn(self._release(model_id, None))
            elif model.is_ready and not model.is_leaving:
                model.is_leaving = True
                self._host.spawn(self._leave(model_id, model))

    async def _leave(self, model_id: str, model: _HostedModel) -> None:
        async with self._leaving:
            model.held = self._host.backlog.withdraw(model_id) + model.held
            await self._host.stored(model_id, None)
            try:
                await self._save(model_id)
            except OSError as error:
                logger.error(
                    "%s stays here: its state was not written: %s",
                    model_id,
                    error,
                    extra=_about(model_id),
                )
                model.is_leaving = False
                held, model.held = model.held, []
                self._host.backlog.add(held)
                return
            await self._host.on_device(partial(self._operations.forget, model_id))
            await self._release(model_id, model)
            logger.info("%s is saved and given up", model_id, extra=_about(model_id))

    async def _release(self, model_id: str, model: _HostedModel | None) -> None:
        async def release() -> None:
            if self._models.get(model_id) is not model:
                return  # a request came meanwhile
            await self._host.link.ask(lambda queue, epoch: queue.release(epoch, model_id))
            self._models.pop(model_id, None)  # the store delivers its held jobs again

        # A take in flight could deliver jobs from before the release after jobs from after it.
        await self._host.without_takes(release)


def _about(model_id: str) -> dict[str, str]:
    """Return the ``extra`` of a log line about a model."""
    return {"model_id": model_id}
