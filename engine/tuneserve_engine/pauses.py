"""Pauses of the interpreter, in which no request goes on, made short."""

import gc
import sys
from collections.abc import Callable

_SWITCH_S = 0.001
"""For which a thread keeps the interpreter's lock from others. With Python's 5 ms, an event loop
that gives it up in each system call waits for seconds beside a busy thread."""


def shorten() -> None:
    """For a process that has just started, and will keep what it has loaded."""
    sys.setswitchinterval(_SWITCH_S)
    freeze()


def freeze() -> None:
    """Takes all that is here now out of the garbage collector's sight, which took 0.1 to 0.5 s to
    look through it, again and again."""
    gc.collect()
    gc.freeze()


class Settling:
    """Freezes the heap again after it grew: when ``size``, which is looked at now and then, has
    become larger and then stayed as it is."""

    def __init__(self, size: Callable[[], float]) -> None:
        self._size = size
        self._last = self._frozen = size()

    def look(self) -> None:
        """To be called now and then, some seconds apart; sooner only costs a pause."""
        size = self._size()
        if size == self._last and size != self._frozen:
            self._frozen = size
            freeze()
        self._last = size
