"""The samples that may begin or continue: as many as the decode slots and fairness allow."""

from collections import deque
from collections.abc import Mapping, Sequence

from tuneserve_engine.core.jobs import Job, JobKind
from tuneserve_engine.worker.scheduling.cost_model import TimeEstimator
from tuneserve_engine.worker.scheduling.fair_share import FairShare
from tuneserve_engine.worker.scheduling.runnable import RunningSample, by_tenant

_SUSPECTED = 2
"""The number of worker deaths a sample may have caused from which on the sample runs alone."""


class SampleAdmission:
    """The admission of samples, by the tenants' ``shares`` of the device."""

    def __init__(self, shares: FairShare, estimates: TimeEstimator, batch_s: float) -> None:
        self._shares = shares
        self._estimates = estimates
        self._batch_s = batch_s

    def joining(
        self, waiting: Sequence[Job], running_samples: Sequence[RunningSample]
    ) -> list[Job]:
        """Return the samples that may begin beside those under way, by the lowest counter.

        Samples begin as long as there are places; a tenant without a running sample need not wait
        for one. A tenant that is more than one request ahead of any waiting tenant (training
        included) starts no sample: running samples are served in every tenant's turn.

        Samples that may have killed a worker run apart from unsuspected ones, so that three deaths
        find the culprit: the first has all samples running, the second only the suspected ones.
        """
        left = self._estimates.max_sequences - sum(each.sequences for each in running_samples)
        present = {each.job.tenant for each in running_samples}
        lowest = min((self._shares.counter(job.tenant) for job in waiting), default=0.0)
        queues = {
            tenant: deque(jobs)
            for tenant, jobs in by_tenant(
                job for job in waiting if job.kind == JobKind.SAMPLE
            ).items()
            if self._shares.is_near(tenant, lowest, self._batch_s)
        }
        first = [jobs[0] for jobs in queues.values()] + [each.job for each in running_samples]
        if running_samples and len({job.attempts for job in first}) > 1:
            return []  # the samples under way end first, then the others can begin
        charged: dict[str, float] = {}
        joining: list[Job] = []
        while queues:
            tenant = min(queues, key=lambda t: self._shares.turn_key(t, queues[t][0], charged))
            job = queues[tenant].popleft()
            is_apart = job.attempts >= _SUSPECTED or job.attempts != (joining or [job])[0].attempts
            if (present and is_apart) or (tenant in present and left <= 0):
                del queues[tenant]
                continue
            if not queues[tenant]:
                del queues[tenant]
            joining.append(job)
            present.add(tenant)
            left -= self._estimates.sequences(job)
            seconds = self._estimates.batch_s([job]) or self._batch_s
            at = charged.get(tenant, self._shares.counter(tenant))
            charged[tenant] = at + seconds / self._shares.weight(tenant)
        return joining

    def interrupting(
        self,
        used: Mapping[str, float],
        lowest: float,
        pending: Sequence[Job],
        running_samples: Sequence[RunningSample],
    ) -> list[Job]:
        """Return the samples to continue or begin before the running batches; empty if not next.

        ``used`` has the counters of the running batches' tenants.
        """
        begun = [each.job for each in running_samples]
        samples = [*begun, *self.joining(pending, running_samples)]
        if not samples:
            return []
        tenant = min(
            (job.tenant for job in samples), key=lambda t: used.get(t, self._shares.counter(t))
        )
        at = used.get(tenant, self._shares.counter(tenant))
        lead_s = self._shares.sampling_lead_s.get(tenant, 0.0)
        if at == lowest and tenant in used:  # the interrupted batch is of the same tenant
            lead_s -= (at - self._shares.counter(tenant)) * self._shares.weight(tenant)
        if at > lowest or (at == lowest and lead_s > 0):
            return []
        return sorted(samples, key=lambda job: job.release)
