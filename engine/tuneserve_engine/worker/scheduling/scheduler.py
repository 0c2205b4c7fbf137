"""The scheduler: it chooses the next batch and the tenant whose turn it is.

Every tenant has a counter: the device seconds that the tenant used, divided by its weight. The
tenant with the lowest counter goes first, so that the counters of tenants with work stay together.
Plain Python; the caller measures time.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

from tuneserve_engine.core.jobs import MAX_JOBS, Job, JobKind
from tuneserve_engine.core.policies import SLICE_S
from tuneserve_engine.worker.scheduling.cost_model import CostModel, TimeEstimator
from tuneserve_engine.worker.scheduling.fair_share import FairShare
from tuneserve_engine.worker.scheduling.runnable import (
    Running,
    RunningSample,
    by_tenant,
    can_share,
    runnable_of,
)
from tuneserve_engine.worker.scheduling.sample_admission import SampleAdmission

MAX_BYTES = 1 << 20
"""Payload bytes after which a batch takes no further job; a larger job still runs, alone."""

_MODELS = 10_000
"""The models with a gradient and no step since that are remembered."""

_INTERRUPTION_SHARE = 0.25
"""The share of a long batch's time that tenants who are ahead, by at most one request, may use in
between. Without it, a tenant of small steps would stand still while a long request that had to wait
itself catches up."""

BATCH_S = 0.03
"""Device seconds after which a batch takes no further job, because all other tenants wait for it. A
job that costs no more time still joins, and so do small gradients of other tenants (see
``CostModel.shared_budget``)."""


class Scheduler:
    """A scheduler that shares the device among tenants by ``weights``, 1 for tenants not named.

    Of two tenants that both have work, neither gets further ahead of the other than one request (or
    ``batch_s`` if that is more), an optimizer step of at most ``batch_s``, and its running samples:
    in device time, divided by its weight. A tenant gains nothing from a time without work: it comes
    back at the lowest counter of the tenants that had work.
    """

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        batch_s: float = BATCH_S,
        slice_s: float = SLICE_S,
        costs: CostModel | None = None,
    ) -> None:
        self._shares = FairShare(weights or {})
        self._batch_s = batch_s
        self._slice_s = slice_s
        self._estimates = TimeEstimator(costs or CostModel())
        self._samples = SampleAdmission(self._shares, self._estimates, batch_s)
        self._with_gradient: dict[str, None] = {}  # models without a step since

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Override the weights given at construction with these, from the next batch on."""
        self._shares.set_weights(weights)

    def next_batch(
        self, pending: Sequence[Job], running_samples: Sequence[RunningSample] = ()
    ) -> list[Job]:
        """Return the jobs of the next pass, in ``release`` order; empty if there is nothing to do.

        ``pending`` is in release order. The tenant with the lowest counter goes first, with its
        oldest runnable job, and optimizer steps go before gradients. Runnable jobs of the same kind
        join, again by the lowest counter, as room and fairness allow. A model's jobs run in order:
        behind its first pending job, only more of the same run of ``forward_backward`` jobs can
        share the batch.

        Samples run in time slices. All samples ``running_samples`` are in every batch of samples;
        others begin as places become free. Of a tenant's samples and its other work, the kind that
        has had less device time goes first.
        """
        begun = [each.job for each in running_samples]
        self._estimates.forget_all_but([*begun, *pending])
        runnable = runnable_of(pending)
        self._shares.lift_arrivals({job.tenant for job in [*begun, *runnable]})

        others = [job for job in runnable if job.kind != JobKind.SAMPLE]
        samples: list[Job] = []
        if len(others) < len(runnable):
            samples = self._samples.joining(runnable, running_samples)
        waiting = by_tenant([*begun, *samples, *others])
        if not waiting:
            return []

        first = self._first_job(waiting, pending)
        if first.kind == JobKind.SAMPLE:
            return sorted([*begun, *samples], key=lambda job: job.release)
        if len(pending) == 1:
            return [first]  # there is no other job to join it
        return self._fill_batch(first, waiting, len(pending))

    def interrupting_batch(
        self,
        running: Sequence[Running],
        pending: Sequence[Job],
        running_samples: Sequence[RunningSample],
    ) -> list[Job]:
        """Return the batch to run before the last ``running`` one continues; empty if it is next.

        Each running batch was started between two micro-batches of the one before it. The new batch
        has samples, or other work of tenants without a running batch. It runs if one of its tenants
        has used less of the device than the tenants of the interrupted batch, or hardly more while
        others have had little since the interrupted batch began. Work longer than a slice runs only
        if it takes no longer than the rest of the interrupted batch.
        """
        used = self._counters_so_far(running)
        runnable = runnable_of(pending)
        others = [job for job in runnable if job.tenant not in used and job.kind != JobKind.SAMPLE]
        # Only lift: the floor itself stays where it was when the running batches began.
        self._shares.lift({job.tenant for job in others})
        lowest = min(used[job.tenant] for job in running[-1].batch)
        samples = self._samples.interrupting(used, lowest, pending, running_samples)
        waiting = self._fitting_jobs(running[-1], by_tenant(others), lowest)
        if not waiting:
            return samples
        others = [job for jobs in waiting.values() for job in jobs]
        first = self._first_job(waiting, others)
        if samples:
            mine = min(samples, key=lambda job: self._shares.turn_key(job.tenant, job, used))
            turn = self._shares.turn_key(mine.tenant, mine, used)
            if mine.tenant == first.tenant:  # the kind that has had less device time goes first
                if self._shares.sampling_lead_s.get(first.tenant, 0.0) <= 0:
                    return samples
            elif turn < self._shares.turn_key(first.tenant, first):
                if not self._is_short_step(first, min(lowest, turn[0])):
                    return samples
        return self._fill_batch(first, waiting, len(others))

    def _fitting_jobs(
        self, running: Running, waiting: Mapping[str, list[Job]], lowest: float
    ) -> dict[str, list[Job]]:
        """Return the waiting jobs, by tenant, that may run before ``running`` continues.

        A tenant's jobs fit if its first one takes at most a slice, or at most the time that is left
        of the running batch. If a fitting tenant has used less than ``lowest``, all that fit are
        returned. Otherwise only jobs of at most a slice are, of tenants that are ahead by at most
        one request, and only short optimizer steps once others have had the share
        ``_INTERRUPTION_SHARE`` of the running batch's time.
        """
        is_long = {
            tenant: self._estimates.is_long(jobs[0], self._slice_s)
            for tenant, jobs in waiting.items()
        }
        left_s = (self._estimates.batch_s(running.batch) or 0.0) - running.seconds
        fitting = {
            tenant: jobs
            for tenant, jobs in waiting.items()
            if not is_long[tenant] or (self._estimates.batch_s(jobs[:1]) or 0.0) <= left_s
        }
        if min((self._shares.counter(tenant) for tenant in fitting), default=lowest) < lowest:
            return fitting
        if running.interrupted_s >= _INTERRUPTION_SHARE * running.seconds:
            steps = {
                tenant: [job for job in jobs if self._is_short_step(job, lowest)]
                for tenant, jobs in fitting.items()
            }
            return {tenant: jobs for tenant, jobs in steps.items() if jobs}
        return {
            tenant: jobs
            for tenant, jobs in fitting.items()
            if not is_long[tenant] and self._shares.is_near(tenant, lowest, self._batch_s)
        }

    def _counters_so_far(self, running: Sequence[Running]) -> dict[str, float]:
        """Return the counters of the running batches' tenants, with their time so far added."""
        used: dict[str, float] = {}
        for batch, seconds, _ in running:
            for tenant, at in self._counters_after(batch, seconds).items():
                used[tenant] = (
                    used.get(tenant, self._shares.counter(tenant))
                    + at
                    - self._shares.counter(tenant)
                )
        return used

    def _fill_batch(
        self, first: Job, waiting: Mapping[str, Sequence[Job]], pending: int
    ) -> list[Job]:
        """Return the batch that this job starts.

        A job of several slices is alone: other jobs can run between its slices, but in its company
        they would wait for all of it.
        """
        if not can_share(first) or self._estimates.is_long(first, self._slice_s):
            return [first]
        batch = self._add_jobs(first, waiting)
        if len(batch) < pending:  # a job that is left out may soon share a chunk with others
            batch = self._drop_partial_chunk(batch, waiting)
        return sorted(batch, key=lambda job: job.release)

    def upcoming(self, pending: Sequence[Job], running: Sequence[Job], most: int) -> list[Job]:
        """Return up to ``most`` pending jobs in about the order in which they will run.

        Each tenant's jobs are in release order, and the tenants take turns; the jobs follow the
        batch that runs now.
        """
        if not pending:
            return []
        queues: dict[str, deque[Job]] = {}
        for job in pending:
            queues.setdefault(job.tenant, deque()).append(job)
        known_s = None if running[0].kind == JobKind.SAMPLE else self._estimates.batch_s(running)
        counters = self._counters_after(running, known_s or self._batch_s)
        turns = [(*self._shares.turn_key(t, jobs[0], counters), t) for t, jobs in queues.items()]
        heapify(turns)
        upcoming: list[Job] = []
        while turns and len(upcoming) < most:
            counter, served, _, tenant = heappop(turns)
            job = queues[tenant].popleft()
            upcoming.append(job)
            if queues[tenant]:
                seconds = self._estimates.batch_s([job]) or self._batch_s
                counter += seconds / self._shares.weight(tenant)
                heappush(turns, (counter, served, queues[tenant][0].release, tenant))
        return upcoming

    def charge(
        self, batch: Sequence[Job], seconds: float, work: Mapping[str, float] | None = None
    ) -> None:
        """Charge the tenants of a batch that took ``seconds`` of the device.

        ``work`` is the work done for each sample, by request id.
        """
        for job in batch:
            if job.kind == JobKind.FORWARD_BACKWARD:
                self._with_gradient[job.model_id or ""] = None
            elif job.kind == JobKind.OPTIM_STEP:
                self._with_gradient.pop(job.model_id or "", None)
        while len(self._with_gradient) > _MODELS:
            del self._with_gradient[next(iter(self._with_gradient))]
        self._shares.charge(batch, seconds, self._estimates.shares(batch, work))
        self._estimates.learn(batch, seconds, work)

    def _first_job(self, waiting: Mapping[str, Sequence[Job]], pending: Sequence[Job]) -> Job:
        """Return the next job of the tenant whose turn it is, or an optimizer step before it.

        The short step after a gradient goes first: it takes next to no time, and its gradient has
        had its turn. One of the same tenant goes before a gradient only if its model has a gradient
        waiting behind it: both can then share a batch.

        Of a tenant's samples and its other work, the kind that has had less device time goes first.
        """
        tenant = min(waiting, key=lambda tenant: self._shares.turn_key(tenant, waiting[tenant][0]))
        samples = [job for job in waiting[tenant] if job.kind == JobKind.SAMPLE]
        others = [job for job in waiting[tenant] if job.kind != JobKind.SAMPLE]
        first = waiting[tenant][0]
        if not samples or not others:
            self._shares.sampling_lead_s.pop(tenant, None)
        elif lead_s := self._shares.sampling_lead_s.get(tenant):
            first = others[0] if lead_s > 0 else samples[0]
        if first.kind == JobKind.OPTIM_STEP:
            return first
        lowest = self._shares.counter(tenant)
        is_gradient = first.kind == JobKind.FORWARD_BACKWARD
        gradients = {job.model_id for job in pending if job.kind == JobKind.FORWARD_BACKWARD}
        steps = [
            job
            for job in (job for jobs in waiting.values() for job in jobs)
            if self._is_short_step(job, lowest)
            and (job.tenant != tenant or (is_gradient and job.model_id in gradients))
        ]
        return min(steps, key=lambda job: self._shares.turn_key(job.tenant, job), default=first)

    def _is_short_step(self, job: Job, lowest: float) -> bool:
        """Return whether the job may go first: the first optimizer step after a gradient of its
        model, if it takes at most ``batch_s`` and its tenant is at most one request ahead of the
        counter ``lowest``.
        """
        if job.kind != JobKind.OPTIM_STEP or job.model_id not in self._with_gradient:
            return False
        if not can_share(job):
            return False
        seconds = self._estimates.batch_s([job])
        if seconds is None or seconds > self._batch_s:
            return False
        return self._shares.is_near(job.tenant, lowest, self._batch_s)

    def _add_jobs(self, first: Job, waiting: Mapping[str, Sequence[Job]]) -> list[Job]:
        """Return the first job and the jobs of its kind that may join it, in turn.

        A tenant whose next job may not join adds no other job: no job overtakes another of its
        model or tenant. After as many refusals as a batch takes jobs, the rest is not looked at,
        because the device waits.
        """
        batch = [first]
        seconds = self._estimates.batch_s(batch) or 0.0
        room_s = max(self._batch_s, seconds)
        shared_s = max(room_s, self._estimates.shared_s(first))
        queues = {
            tenant: deque(job for job in jobs if job.kind == first.kind and job is not first)
            for tenant, jobs in waiting.items()
        }
        most = MAX_JOBS
        if first.kind == JobKind.FORWARD_BACKWARD:
            most = min(MAX_JOBS, self._estimates.max_gradients)
        counters = self._counters_after(batch, seconds)
        others = [t for t, jobs in queues.items() if jobs and t not in counters]
        turns = sorted(((*self._shares.turn_key(t, queues[t][0]), t) for t in others), reverse=True)
        lowest_first = sorted(waiting, key=self._shares.counter)
        lowest = self._shares.counter(lowest_first[0])
        step_s = max(self._batch_s, self._shares.largest_s)  # steps may be so far ahead
        refusals = 0
        while len(batch) < most and refusals < MAX_JOBS:
            later = (
                (*self._shares.turn_key(t, queues[t][0], counters), t)
                for t in counters
                if queues[t]
            )
            *_, tenant = min([*later, *turns[-1:]], default=(None,))
            if tenant is None:
                break
            if tenant not in counters:
                turns.pop()
            job = queues[tenant].popleft()
            limit_s = room_s if tenant in counters else shared_s
            are_steps = all(self._is_short_step(each, lowest) for each in (first, job))
            rooms = (step_s if are_steps else room_s, max(limit_s, seconds))
            joined = self._counters_if_joined(batch, job, rooms, lowest_first)
            if joined is None:
                queues[tenant].clear()
                refusals += 1
            else:
                batch.append(job)
                counters, seconds = joined, self._estimates.batch_s(batch) or 0.0
        return batch

    def _drop_partial_chunk(self, batch: list[Job], waiting: Mapping[str, object]) -> list[Job]:
        """Return the batch without the jobs that would begin a chunk and not fill it.

        The whole batch is returned if a waiting tenant would otherwise fall too far behind.
        """
        kept = batch[: self._estimates.jobs_in_full_chunks(batch)]
        charged = self._counters_after(kept, self._estimates.batch_s(kept) or 0.0)
        lowest = min(charged.get(tenant, self._shares.counter(tenant)) for tenant in waiting)
        room_s = max(self._batch_s, self._estimates.batch_s(batch[:1]) or 0.0)
        is_fair = all((at - lowest) * self._shares.weight(t) <= room_s for t, at in charged.items())
        return kept if is_fair else batch

    def _counters_if_joined(
        self,
        batch: Sequence[Job],
        job: Job,
        rooms: tuple[float, float],
        lowest_first: Sequence[str],
    ) -> dict[str, float] | None:
        """Return the counters of the batch's tenants if the job joins; None if it may not.

        The job may not join a batch without room for it, or if a tenant of the batch would get too
        far ahead of the lowest counter of all tenants with work, also of tenants that have no job
        for this batch. ``rooms`` is that distance and the longest time of the batch, in seconds.
        """
        if not can_share(job):
            return None
        if sum(len(each.payload) for each in batch) + len(job.payload) > MAX_BYTES:
            return None
        together = [*batch, job]
        seconds = self._estimates.batch_s(together)
        apart_s, batch_s = rooms
        if seconds is None or seconds > batch_s:
            return None
        charged = self._counters_after(together, seconds)
        others = (self._shares.counter(tenant) for tenant in lowest_first if tenant not in charged)
        lowest = min([*charged.values(), *islice(others, 1)])
        # Check all tenants, not only the one that joins: all that share a further chunk pay for it.
        near = all((at - lowest) * self._shares.weight(t) <= apart_s for t, at in charged.items())
        return charged if near else None

    def _counters_after(self, batch: Sequence[Job], seconds: float) -> dict[str, float]:
        """Return the counters of the batch's tenants after the batch."""
        return self._shares.counters_after(batch, seconds, self._estimates.shares(batch))
