"""The time that this process was awake, for limits on the silence of clients.

A silence that is longer than a limit by the wall clock may be shorter by the time in which the
client could be heard: the process may have been stopped meanwhile (SIGSTOP, a paused virtual
machine), or the wall clock was set.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

_LEAST_S = 2.0
"""The shortest gap that is reported: a process that is only busy may be this late."""
_REMEMBERED = 10_000
"""The number of absences and clock jumps remembered: enough for a week, at one a minute."""


class _Gap(NamedTuple):
    """The end of a gap by the wall clock, and the wall clock's excess over the time awake in it."""

    at_s: float
    excess_s: float


class AwakeTime:
    """The time awake, computed from calls of ``tick`` and ``absent``.

    Call ``tick`` after each sleep of ``interval_s``, and with ``worked`` before each sleep. Excess
    time adds up, and counts once it is longer than an interval and than ``_LEAST_S``.
    """

    def __init__(
        self,
        interval_s: float,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s = interval_s
        self._least_s = max(interval_s, _LEAST_S)
        self.wall = wall
        self.clock = clock
        self._last = wall(), clock()
        self._excess_s = 0.0  # excess time that does not count yet
        self._gaps: deque[_Gap] = deque(maxlen=_REMEMBERED)

    def tick(self, *, worked: bool = False) -> float:
        """Return how much further than the time awake the wall clock went since the last tick.

        Negative if the clock was set back, and 0 if the process may just have been busy.
        """
        now = self.wall(), self.clock()
        passed_s, elapsed_s = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        excess_s = passed_s - min(elapsed_s, self._least_s if worked else self._interval_s)
        if excess_s < -self._least_s:
            for n, gap in enumerate(self._gaps):
                self._gaps[n] = gap._replace(at_s=min(gap.at_s + excess_s, now[0]))
            return excess_s
        self._excess_s = max(self._excess_s + excess_s, 0.0)
        if self._excess_s > self._least_s:
            self.absent(self._excess_s)
            self._excess_s = 0.0
        return excess_s if excess_s > self._least_s else 0.0

    def absent(self, excess_s: float) -> None:
        """Note that clients could not be heard for ``excess_s`` seconds before the last tick."""
        self._gaps.append(_Gap(self._last[0], excess_s))

    def age_s(self, awake_s: float) -> float:
        """Return the wall-clock age, at the last tick, of an event ``awake_s`` awake seconds ago.

        If the clock was set back, earlier events look younger than they are; none looks older.
        """
        now_s, age_s = self._last[0], awake_s
        for gap in reversed(self._gaps):
            since_s = now_s - gap.at_s
            if age_s <= since_s:
                break
            age_s += gap.excess_s
        return age_s
