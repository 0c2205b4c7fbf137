"""What the live page is told at one moment, and how fast counters grow between such moments."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tuneserve_engine.queue.base import StoreFigures
from tuneserve_server.live_curves import Curve

T = TypeVar("T")

Counters = Mapping[str, Mapping[str, float]]
"""By whom they are of, and their names."""

_WINDOW_S = 20.0  # workers tell their figures every other second


@dataclass(frozen=True)
class Run:
    """A model; ``name`` is what its client calls it, if anything."""

    model_id: str
    tenant: str
    name: str
    base_model: str
    rank: int
    adapter: str
    status: str
    diverged: bool
    created_s: float
    last_request_s: float


@dataclass(frozen=True)
class TenantShown:
    name: str
    unfinished: int
    device_s: float  # today, in UTC, as the tokens
    device_rate: float | None  # device seconds a second
    trained_tokens: int
    sampled_tokens: int


@dataclass(frozen=True)
class WorkerShown:
    name: str
    base_model: str
    figures: Mapping[str, float]
    rates: Mapping[str, float]  # a second, of the counters among them


@dataclass(frozen=True)
class Look:
    """What there was to see. Curves are by model, and so is since when it has been among the runs,
    as far as is known. The last two are for who sees all tenants."""

    runs: Sequence[Run]
    tenants: Sequence[TenantShown]
    curves: Mapping[str, Curve]
    shown_s: Mapping[str, float]
    workers: Sequence[WorkerShown] = field(default_factory=list)
    store: StoreFigures | None = None


class Rates:
    """How fast counters grow, over the last looks: a second, where there were two since it came, or
    since it began again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looks: dict[str, deque[tuple[float, Mapping[str, float]]]] = {}

    def add(self, counters: Counters) -> None:
        now_s = self._clock()
        self._looks = {key: self._looks.get(key, deque()) for key in counters}
        for key, now in counters.items():
            looks = self._looks[key]
            if looks and (now_s - looks[-1][0] > _WINDOW_S or _began_again(looks[-1][1], now)):
                looks.clear()  # nobody has looked for a while, or what was counted is another
            looks.append((now_s, now))
            while len(looks) > 2 and now_s - looks[1][0] >= _WINDOW_S:
                looks.popleft()

    def of(self, key: str) -> dict[str, float]:
        """By the counters' names."""
        looks = self._looks.get(key)
        if not looks or looks[-1][0] <= looks[0][0]:
            return {}
        (first_s, first), (last_s, last) = looks[0], looks[-1]
        seconds = last_s - first_s
        return {name: (last[name] - first[name]) / seconds for name in last if name in first}


def _began_again(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    return any(now[name] < before[name] for name in now if name in before)
