"""Pauses of the interpreter, in which no request goes on, made short."""

import gc
import sys
from collections.abc import Callable

_SWITCH_S = 0.001
"""For which a thread may keep the interpreter's lock from others. The event loop gives the lock up
in many system calls, and waits so long for it beside a busy thread, each time; Python has 5 ms."""


def shorten() -> None:
    """For a process that has just started, and will keep what it has loaded."""
    sys.setswitchinterval(_SWITCH_S)
    freeze()


def freeze() -> None:
    """Hides all objects that are here now from the garbage collector. It took tenths of a second to
    look through them, again and again, in which no thread ran."""
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
