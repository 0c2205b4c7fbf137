"""An event loop with virtual time: sleeps take none, and load does not change their order."""

import asyncio
import selectors
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while tasks are ready, and then jumps to the next timer."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


class _VirtualSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events:
            assert timeout is not None, "everybody waits for somebody else"
            self.now_s += max(timeout, 0.0)
        return events
