"""Named places at which a test can kill the process, as a crash would: nothing is flushed.

A test process calls ``arm`` before it starts the real work. In production no point is armed, and a
failpoint costs one dictionary look-up.
"""

import os
import signal

_armed: dict[str, tuple[int, signal.Signals]] = {}


def arm(name: str, nth: int = 1, number: signal.Signals = signal.SIGKILL) -> None:
    """Send this process a signal at the ``nth`` passage of the failpoint ``name``.

    The default, SIGKILL, ends the process; SIGSTOP suspends it.
    """
    _armed[name] = nth, number


def failpoint(name: str) -> None:
    """Send the armed signal if this is the passage for which the point is armed."""
    if name in _armed:
        nth, number = _armed[name]
        _armed[name] = nth - 1, number
        if nth == 1:
            os.kill(os.getpid(), number)
