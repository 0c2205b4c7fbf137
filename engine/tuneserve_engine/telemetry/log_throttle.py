"""A throttle for log lines that a fault would repeat for each client and attempt while it lasts."""

import logging
import math
import time
from collections.abc import Callable


class ThrottledLog:
    """A log of warnings that writes each kind at most once per ``every_s``.

    A written warning has the number of those left out since the last one. The kinds must be few:
    names from the code, nothing that a client chooses.
    """

    def __init__(
        self,
        logger: logging.Logger,
        every_s: float = 60.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._every_s = every_s
        self._clock = clock
        self._kinds: dict[str, tuple[float, int]] = {}  # when it was written, how many since

    def warn(self, kind: str, text: str) -> None:
        now_s = self._clock()
        written_s, left_out = self._kinds.get(kind, (-math.inf, 0))
        if now_s - written_s < self._every_s:
            self._kinds[kind] = written_s, left_out + 1
            return
        self._kinds[kind] = now_s, 0
        more = f" (and {left_out} more like this)" if left_out else ""
        self._logger.warning("%s%s", text, more)

    def forget(self) -> None:
        """Forget past warnings after a fault is over: the next one is written at once."""
        self._kinds.clear()
