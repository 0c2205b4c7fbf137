"""Named places at which a test can kill the process, as a crash would: nothing is flushed.

A test process calls ``arm`` before it starts the real work. In production nobody does, and a kill
point is a dictionary look-up.
"""

import os
import signal

_armed: dict[str, int] = {}


def arm(name: str, nth: int = 1) -> None:
    """Makes the ``nth`` passage of the kill point ``name`` the end of this process."""
    _armed[name] = nth


def kill_point(name: str) -> None:
    """Does nothing, unless the point is armed and this is the passage it is armed for."""
    if name in _armed:
        _armed[name] -= 1
        if _armed[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
