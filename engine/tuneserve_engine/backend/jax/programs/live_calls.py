"""Compiling ahead yields to requests: while programs are called, it rests most of the time."""

import threading
import time
from collections.abc import Callable

_LIVE_S = 30.0
"""The time after a call in which it may still compute, or another one is expected."""
_REST = 3.0
"""Seconds of rest per second of compiling, while programs are called."""
_PAUSE_S = 0.1


class LiveCalls:
    """The time of the last call of any program, and how long compiling ahead rests for such calls.

    Compiling and computing share the cores. A request whose own program is missing compiles it
    itself, without a rest.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now = now
        self._sleep = sleep
        self._last_s = float("-inf")
        self._rest_until_s = float("-inf")  # of all threads: one that compiles disturbs as two do

    def note(self) -> None:
        """A program is called now."""
        self._last_s = self._now()

    def rest(self, compiled_s: float) -> None:
        """Return after the rest that is due for ``compiled_s`` seconds of compiling.

        Returns at once when no program was called for 30 s, and when the process ends.
        """
        if self._is_live:
            self._rest_until_s = max(self._rest_until_s, self._now() + _REST * compiled_s)
        while self._is_live and self._now() < self._rest_until_s:
            if not threading.main_thread().is_alive():
                return
            self._sleep(_PAUSE_S)

    @property
    def _is_live(self) -> bool:
        return self._now() - self._last_s < _LIVE_S
