"""The costs of a worker's requests, kept until their outcomes take the costs to the store."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tuneserve_engine.core.jobs import Job, Outcome
from tuneserve_engine.core.usage import Usage
from tuneserve_engine.worker.execution.outcomes import BatchResult

_ARRIVALS = 65_536
"""The number of requests whose arrival is remembered: more than a store accepts. Beyond it, the
oldest are forgotten, which removes requests that went to other workers."""


@dataclass(frozen=True)
class _Arrival:
    """The arrival time of a request, and the number of requests begun by then: of its tenant, and
    of all."""

    at_s: float
    begun_own: int
    begun: int


@dataclass
class _Account:
    """The account of a request that has begun.

    ``device_from_s`` is when its first batch got the device, ``device_to_s`` when its last batch
    ended; both are 0 before.
    """

    began_s: float
    queued_s: float
    behind: int
    behind_own: int
    others: int
    device_s: float = 0.0
    device_from_s: float = 0.0
    device_to_s: float = 0.0


class UsageLedger:
    """A ledger that puts each device second into one request's account or into ``overhead_s``.

    The overhead is work for requests that ended long ago (replay), for samples that another worker
    will draw again, and for no request (passes that failed).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrived: dict[str, _Arrival] = {}
        self._begun: Counter[str] = Counter()  # by tenant, as long as something is queued
        self._accounts: dict[str, _Account] = {}
        self.overhead_s = 0.0
        self.flops = 0.0
        """The FLOPs of the requests that have ended."""

    def on_arrived(self, jobs: Sequence[Job]) -> None:
        """Note that the worker has received the jobs."""
        now_s, begun = self._clock(), self._begun.total()
        for job in jobs:
            self._arrived[job.request_id] = _Arrival(now_s, self._begun[job.tenant], begun)
        while len(self._arrived) > _ARRIVALS:
            del self._arrived[next(iter(self._arrived))]

    def on_started(self, jobs: Sequence[Job], others: int) -> None:
        """Open an account for each of these jobs, which start with ``others`` jobs beside each."""
        now_s, begun = self._clock(), self._begun.total()
        for job in jobs:
            begun_own = self._begun[job.tenant]
            came = self._arrived.pop(job.request_id, None) or _Arrival(now_s, begun_own, begun)
            self._accounts[job.request_id] = _Account(
                began_s=now_s,
                queued_s=now_s - came.at_s,
                behind=begun - came.begun,
                behind_own=begun_own - came.begun_own,
                others=others,
            )
        self._begun.update(job.tenant for job in jobs)
        if not self._arrived:
            self._begun.clear()

    def on_ran(self, result: BatchResult) -> None:
        """Charge each request its share of the batch's device seconds; the rest is overhead."""
        now_s = self._clock()
        for request_id in (*(job.request_id for job in result.jobs), *result.remaining):
            if account := self._accounts.get(request_id):
                account.device_from_s = account.device_from_s or result.began_s or now_s
                account.device_to_s = now_s
        device_s = result.device_s
        for request_id, seconds in result.shares.items():
            if account := self._accounts.get(request_id):
                account.device_s += seconds
                device_s -= seconds
        self.overhead_s += device_s

    def move_to_overhead(self, request_ids: Iterable[str]) -> None:
        """Move the cost of these requests to the overhead: another worker will run them again."""
        for request_id in request_ids:
            account = self._accounts.pop(request_id, None)
            self.overhead_s += 0.0 if account is None else account.device_s

    def with_usage(self, outcome: Outcome) -> Outcome:
        """Close the request's account and return the outcome, with its usage if it had begun."""
        account = self._accounts.pop(outcome.request_id, None)
        self._arrived.pop(outcome.request_id, None)
        if account is None:
            return outcome
        now_s = self._clock()
        usage = replace(
            outcome.usage or Usage(),
            device_s=account.device_s,
            queued_s=account.queued_s,
            ran_s=now_s - account.began_s,
            packed_s=max((account.device_from_s or now_s) - account.began_s, 0.0),
            transfer_s=now_s - (account.device_to_s or now_s),
            behind=account.behind,
            behind_own=account.behind_own,
            others=account.others,
        )
        self.flops += usage.flops
        return replace(outcome, usage=usage)
