"""Shorter pauses of the interpreter, in which no request makes progress."""

import gc
import sys
from collections.abc import Callable

_SWITCH_S = 0.001
"""Seconds for which a thread may keep the interpreter's lock from other threads. The event loop
releases the lock in many system calls, and each time waits this long for it beside a busy thread.
Python's default is 5 ms."""


def shorten() -> None:
    """Shorten the pauses of a process that has just started and keeps all that it has loaded."""
    sys.setswitchinterval(_SWITCH_S)
    freeze()


def freeze() -> None:
    """Hide all present objects from the garbage collector.

    Without this the collector took tenths of a second to look through them, again and again, during
    which no thread ran.
    """
    gc.collect()
    gc.freeze()


class Settling:
    """A watcher that freezes the heap again after it grew.

    The heap is frozen when ``size``, read by ``look``, has changed and then stayed the same.
    """

    def __init__(self, size: Callable[[], float]) -> None:
        self._size = size
        self._last = self._frozen = size()

    def look(self) -> None:
        """Look at the size. Call this every few seconds; calling it sooner only costs a pause."""
        size = self._size()
        if size == self._last and size != self._frozen:
            self._frozen = size
            freeze()
        self._last = size
