"""The kind of device that programs are made for: JAX's default, or one that is absent."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

_absent: list[str] = []
"""The platforms that ``compiling_for`` has set, the current one last."""


def target_platform() -> str:
    """Return JAX's name of the platform: ``cpu`` or ``gpu``."""
    return _absent[-1] if _absent else jax.default_backend()


@contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Make the engine choose its programs, in all threads, as on a device of this platform."""
    _absent.append(platform)
    try:
        yield
    finally:
        _absent.pop()
