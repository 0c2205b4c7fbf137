"""Named places at which a test can kill the process, as a crash would: nothing is flushed.

A test process calls ``arm`` before it starts the real work. In production nobody does, and a kill
point is a dictionary look-up.
"""

import os
import signal

_armed: dict[str, tuple[int, signal.Signals]] = {}


def arm(name: str, nth: int = 1, number: signal.Signals = signal.SIGKILL) -> None:
    """Sends this process the signal at the ``nth`` passage of the kill point ``name``: by default
    its end, with SIGSTOP a sleep."""
    _armed[name] = nth, number


def kill_point(name: str) -> None:
    """Does nothing, unless the point is armed and this is the passage it is armed for."""
    if name in _armed:
        nth, number = _armed[name]
        _armed[name] = nth - 1, number
        if nth == 1:
            os.kill(os.getpid(), number)
