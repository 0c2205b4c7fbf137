"""What the requests of a worker have cost so far, until their outcomes take it to the store."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tuneserve_engine.jobs import Outcome
from tuneserve_engine.usage import Usage

_ARRIVALS = 65_536
"""Requests whose arrival is remembered: more than a store accepts. Those that go elsewhere are
forgotten in turn."""


@dataclass
class _Account:
    """Of a request that has begun."""

    began_s: float
    queued_s: float
    others: int
    device_s: float = 0.0


class Ledger:
    """Every second of the device is in one request's account or in ``overhead_s``: what was done
    for requests that ended long ago (replay), for samples that somebody else will draw again, and
    for nobody (passes that failed)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrived_s: dict[str, float] = {}
        self._accounts: dict[str, _Account] = {}
        self.overhead_s = 0.0
        self.flops = 0.0
        """Of the requests that have ended."""

    def arrived(self, request_ids: Iterable[str]) -> None:
        now_s = self._clock()
        for request_id in request_ids:
            self._arrived_s[request_id] = now_s
        while len(self._arrived_s) > _ARRIVALS:
            del self._arrived_s[next(iter(self._arrived_s))]

    def began(self, request_ids: Iterable[str], others: int) -> None:
        now_s = self._clock()
        for request_id in request_ids:
            queued_s = now_s - self._arrived_s.pop(request_id, now_s)
            self._accounts[request_id] = _Account(now_s, queued_s, others)

    def ran(self, device_s: float, shares: Mapping[str, float]) -> None:
        """A unit had the device for so long; ``shares`` are parts of it, by request id."""
        for request_id, seconds in shares.items():
            if request_id in self._accounts:
                self._accounts[request_id].device_s += seconds
                device_s -= seconds
        self.overhead_s += device_s

    def closed(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes, each with what it cost if it had begun."""
        return [self._closed(each) for each in outcomes]

    def given_up(self, request_ids: Iterable[str]) -> None:
        """These have begun, and will be done again by somebody else."""
        for request_id in request_ids:
            account = self._accounts.pop(request_id, None)
            self.overhead_s += 0.0 if account is None else account.device_s

    def _closed(self, outcome: Outcome) -> Outcome:
        account = self._accounts.pop(outcome.request_id, None)
        self._arrived_s.pop(outcome.request_id, None)
        if account is None:
            return outcome
        usage = replace(
            outcome.usage or Usage(),
            device_s=account.device_s,
            queued_s=account.queued_s,
            ran_s=self._clock() - account.began_s,
            others=account.others,
        )
        self.flops += usage.flops
        return replace(outcome, usage=usage)
