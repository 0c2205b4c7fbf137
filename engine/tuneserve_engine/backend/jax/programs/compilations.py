"""The number of compilations in the process."""

import threading
from collections import Counter
from functools import cache

import jax

_COMPILATION = "/jax/core/compile/backend_compile_duration"
"""JAX's event for every program that it compiles, a single eager operation included."""


class Compilations:
    """Counts compilations in the whole process."""

    def __init__(self) -> None:
        self.count = 0
        self.by_thread: Counter[int] = Counter()
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILATION:
            with self._lock:
                self.count += 1
                self.by_thread[threading.get_ident()] += 1


@cache
def compilations() -> Compilations:
    """Return the counter of this process, which counts from the first call on."""
    return Compilations()
