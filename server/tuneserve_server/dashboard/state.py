"""The state that the dashboard shows at one moment, and the rates of counters between moments."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tuneserve_client.runs import RunState
from tuneserve_engine.store.base import StoreStats
from tuneserve_server.dashboard.curves import Curve

T = TypeVar("T")

Counters = Mapping[str, Mapping[str, float]]
"""The values of counters, by owner and by name."""

_WINDOW_S = 20.0  # workers report their metrics every other second


@dataclass(frozen=True)
class Run:
    """A model; ``name`` is the name that its client gave it, or empty."""

    model_id: str
    tenant: str
    name: str
    base_model: str
    rank: int
    adapter: str
    status: str
    state: RunState
    diverged: bool  # restored with other results than those delivered
    created_s: float
    last_request_s: float


@dataclass(frozen=True)
class TenantRow:
    name: str
    unfinished: int
    device_s: float  # today (UTC), as are the tokens
    device_rate: float | None  # device seconds per second
    trained_tokens: int
    sampled_tokens: int


@dataclass(frozen=True)
class WorkerShown:
    name: str
    base_model: str
    figures: Mapping[str, float]
    rates: Mapping[str, float]  # per second, of the counters among the metrics


@dataclass(frozen=True)
class DashboardState:
    """The state of the dashboard at one moment.

    ``curves`` and ``shown_s`` are by model; ``shown_s`` is since when the model has been among the
    runs, as far as is known. ``workers`` and ``store`` are for viewers that see all tenants.
    """

    runs: Sequence[Run]
    tenants: Sequence[TenantRow]
    curves: Mapping[str, Curve]
    shown_s: Mapping[str, float]
    workers: Sequence[WorkerShown] = field(default_factory=list)
    store: StoreStats | None = None


class Rates:
    """The rates per second at which counters grew over the last looks.

    A rate needs two looks since its counters appeared or began again.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looks: dict[str, deque[tuple[float, Mapping[str, float]]]] = {}

    def add_counters(self, counters: Counters) -> None:
        now_s = self._clock()
        self._looks = {key: self._looks.get(key, deque()) for key in counters}
        for key, now in counters.items():
            looks = self._looks[key]
            if looks and (now_s - looks[-1][0] > _WINDOW_S or _began_again(looks[-1][1], now)):
                looks.clear()  # the last look is old, or the counters began again
            looks.append((now_s, now))
            while len(looks) > 2 and now_s - looks[1][0] >= _WINDOW_S:
                looks.popleft()

    def rates_of(self, key: str) -> dict[str, float]:
        """Return the rates by the counters' names."""
        looks = self._looks.get(key)
        if not looks or looks[-1][0] <= looks[0][0]:
            return {}
        (first_s, first), (last_s, last) = looks[0], looks[-1]
        seconds = last_s - first_s
        return {name: (last[name] - first[name]) / seconds for name in last if name in first}


def _began_again(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    return any(now[name] < before[name] for name in now if name in before)
