"""Which jobs run together next, and whose turn it is. Plain Python; the caller measures time.

Every tenant has a counter: the seconds of the device that it used, divided by its weight. The
lowest goes first, so that the counters of tenants with work stay together.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

from tuneserve_engine.costs import Costs, Estimates
from tuneserve_engine.jobs import MAX_JOBS, Job, JobKind

_SHARED = {JobKind.FORWARD_BACKWARD, JobKind.OPTIM_STEP, JobKind.SAMPLE}
"""Kinds of which many jobs can share a unit."""

MAX_BYTES = 1 << 20
"""Payload bytes after which a unit takes no further job; a larger job still runs, alone."""

UNIT_S = 0.03
"""Device time after which a unit takes no further job of a tenant that it has one of, unless that
costs no more time: everyone else waits for it."""


class Scheduler:
    """Shares the device among tenants by ``weights``, 1 for those not named.

    Of two tenants that both have work, neither gets ahead of the other by more than one request, or
    ``unit_s`` if that is more: in device time, each divided by its tenant's weight. A tenant that
    had no work gains nothing by it: it comes back at the lowest counter of those that had.
    """

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        unit_s: float = UNIT_S,
        costs: Costs | None = None,
    ) -> None:
        self._weights = dict(weights or {})
        self._unit_s = unit_s
        self._estimates = Estimates(costs or Costs())
        self._counters: dict[str, float] = {}
        self._floor = 0.0  # the lowest counter of a tenant with work; never falls
        self._largest_s = 0.0  # of any request that ran
        self._units = 0
        self._last_unit: dict[str, int] = {}

    def next_unit(self, pending: Sequence[Job]) -> list[Job]:
        """The jobs of the next pass, in ``release`` order; empty only if nothing is pending.

        ``pending`` is in release order. The tenant with the lowest counter goes first, with its
        oldest runnable job, and optimizer steps before gradients; runnable jobs of that kind join,
        again by the lowest counter, as room and fairness allow. A model's jobs run in order: behind
        its first pending job only more of the same ``forward_backward`` run can share the unit.
        """
        self._estimates.forget_all_but(pending)
        waiting: dict[str, list[Job]] = {}
        for job in _runnable(pending):
            waiting.setdefault(job.tenant, []).append(job)
        self._arrive(waiting)
        if not waiting:
            return []
        first = self._first(waiting)
        unit = self._filled(first, waiting) if _can_share(first) else [first]
        return sorted(unit, key=lambda job: job.release)

    def upcoming(self, pending: Sequence[Job], running: Sequence[Job], most: int) -> list[Job]:
        """Up to ``most`` pending jobs in about the order in which they will run after the unit that
        does now: each tenant's in release order, and the tenants in turn."""
        queues: dict[str, deque[Job]] = {}
        for job in pending:
            queues.setdefault(job.tenant, deque()).append(job)
        counters = self._charged(running, self._estimates.unit_s(running) or self._unit_s)
        turns = [(*self._turn(t, jobs[0], counters), t) for t, jobs in queues.items()]
        heapify(turns)
        upcoming: list[Job] = []
        while turns and len(upcoming) < most:
            counter, served, _, tenant = heappop(turns)
            job = queues[tenant].popleft()
            upcoming.append(job)
            if queues[tenant]:
                seconds = self._estimates.unit_s([job]) or self._unit_s
                counter += seconds / self._weight(tenant)
                heappush(turns, (counter, served, queues[tenant][0].release, tenant))
        return upcoming

    def charge(self, unit: Sequence[Job], seconds: float) -> None:
        """Accounts for a unit that took ``seconds`` of the device."""
        self._units += 1
        self._counters |= self._charged(unit, seconds)
        self._largest_s = max(self._largest_s, seconds * max(self._estimates.shares(unit)))
        self._last_unit |= {job.tenant: self._units for job in unit}
        self._estimates.learn(unit, seconds)

    def _arrive(self, waiting: Mapping[str, object]) -> None:
        """Lifts tenants that come back to the floor, and forgets absent ones below it."""
        busy = [self._counters[tenant] for tenant in waiting if tenant in self._counters]
        if not waiting:  # nobody missed what the others used
            busy = [max(self._counters.values(), default=self._floor)]
        self._floor = max(self._floor, min(busy, default=self._floor))
        for tenant in [name for name, at in self._counters.items() if at <= self._floor]:
            if tenant not in waiting:
                del self._counters[tenant]
                self._last_unit.pop(tenant, None)
        for tenant in waiting:
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor)

    def _turn(
        self, tenant: str, job: Job, charged: Mapping[str, float] | None = None
    ) -> tuple[float, int, int]:
        """The least goes first: lowest counter, then served longest ago, then released first.
        Tenants in ``charged`` are served right now."""
        served = self._last_unit.get(tenant, 0)
        if charged and tenant in charged:
            return charged[tenant], self._units + 1, job.release
        return self._at(tenant), served, job.release

    def _first(self, waiting: Mapping[str, Sequence[Job]]) -> Job:
        """The next job of whose turn it is. If that is a gradient, an optimizer step goes before it
        that takes its tenant no further ahead than the gradient would: it takes next to no time,
        and the gradient behind it can share a unit then."""
        first = waiting[min(waiting, key=lambda tenant: self._turn(tenant, waiting[tenant][0]))][0]
        steps = [job for jobs in waiting.values() for job in jobs if job.kind == JobKind.OPTIM_STEP]
        if first.kind != JobKind.FORWARD_BACKWARD or not steps:
            return first
        step = min(steps, key=lambda job: self._turn(job.tenant, job))
        room_s = max(self._unit_s, min(self._estimates.room_s(first), self._largest_s))
        lowest_first = sorted(waiting, key=self._at)
        return step if self._joined([], step, (room_s, room_s), lowest_first) else first

    def _filled(self, first: Job, waiting: Mapping[str, Sequence[Job]]) -> list[Job]:
        """The first job and those of its kind that may join it, in turn.

        A tenant whose next job may not join adds no other: none overtakes, of a model or a tenant.
        After as many refusals as a unit takes jobs, the rest is not looked at: the device waits.
        """
        unit = [first]
        room_s = max(self._unit_s, self._estimates.room_s(first))
        shared_s = max(room_s, self._estimates.shared_s(first))
        queues = {
            tenant: deque(job for job in jobs if job.kind == first.kind and job is not first)
            for tenant, jobs in waiting.items()
        }
        counters = self._charged(unit, self._estimates.unit_s(unit) or 0.0)
        others = [t for t, jobs in queues.items() if jobs and t not in counters]
        turns = sorted(((*self._turn(t, queues[t][0]), t) for t in others), reverse=True)
        lowest_first = sorted(waiting, key=self._at)
        refusals = 0
        while len(unit) < MAX_JOBS and refusals < MAX_JOBS:
            again = ((*self._turn(t, queues[t][0], counters), t) for t in counters if queues[t])
            *_, tenant = min([*again, *turns[-1:]], default=(None,))
            if tenant is None:
                break
            if tenant not in counters:
                turns.pop()
            job = queues[tenant].popleft()
            rooms = room_s, room_s if tenant in counters else shared_s
            joined = self._joined(unit, job, rooms, lowest_first)
            if joined is None:
                queues[tenant].clear()
                refusals += 1
            else:
                unit.append(job)
                counters = joined
        return unit[: self._estimates.best(unit)]

    def _joined(
        self,
        unit: Sequence[Job],
        job: Job,
        rooms: tuple[float, float],
        lowest_first: Sequence[str],
    ) -> dict[str, float] | None:
        """The counters of the unit's tenants with the job. None if there is no room for it, or it
        would take its tenant too far from whoever has the lowest counter of those with work: that
        one may have nothing to put into this unit. ``rooms`` are how far that is, in seconds, and
        how long the unit may take."""
        if not _can_share(job):
            return None
        if sum(len(each.payload) for each in unit) + len(job.payload) > MAX_BYTES:
            return None
        together = [*unit, job]
        seconds = self._estimates.unit_s(together)
        apart_s, unit_s = rooms
        if seconds is None or seconds > unit_s:
            return None
        charged = self._charged(together, seconds)
        others = (self._counters[tenant] for tenant in lowest_first if tenant not in charged)
        lowest = min([*charged.values(), *islice(others, 1)])
        near = (charged[job.tenant] - lowest) * self._weight(job.tenant) <= apart_s
        return charged if near else None

    def _charged(self, unit: Sequence[Job], seconds: float) -> dict[str, float]:
        """The counters of the unit's tenants after it."""
        shares: dict[str, float] = {}
        for job, share in zip(unit, self._estimates.shares(unit), strict=True):
            shares[job.tenant] = shares.get(job.tenant, 0.0) + share
        return {
            tenant: self._at(tenant) + seconds * share / self._weight(tenant)
            for tenant, share in shares.items()
        }

    def _at(self, tenant: str) -> float:
        """The tenant's counter, or where it would come back."""
        return self._counters.get(tenant, self._floor)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


def _can_share(job: Job) -> bool:
    """Whether the job may share a unit. Not one that may have killed a worker, nor one that needs
    halved micro-batches."""
    return job.kind in _SHARED and job.attempts == 0 and job.halvings == 0


def _runnable(pending: Sequence[Job]) -> list[Job]:
    """Jobs that nothing earlier of their model must precede, or only a run of gradients."""
    runnable = []
    blocked: set[str] = set()
    only_gradients: set[str] = set()
    for job in pending:
        model = job.model_id
        if model is None:
            runnable.append(job)
            continue
        gradient = job.kind == JobKind.FORWARD_BACKWARD
        if model in blocked or (model in only_gradients and not gradient):
            blocked.add(model)
            continue
        runnable.append(job)
        (only_gradients if gradient else blocked).add(model)
    return runnable
