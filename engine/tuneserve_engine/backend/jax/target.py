"""The kind of device that programs are made for: JAX's default, or one that is absent."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

_absent: list[str] = []
"""The platforms that ``compile_for`` and ``compiling_for`` have set, the current one last."""


def target_platform() -> str:
    """Return JAX's name of the platform: ``cpu`` or ``gpu``."""
    return _absent[-1] if _absent else jax.default_backend()


def compile_for(platform: str) -> None:
    """Make the engine choose its programs, in all threads, as on a device of this platform."""
    _absent.append(platform)


@contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Call ``compile_for`` until the end of the block."""
    compile_for(platform)
    try:
        yield
    finally:
        _absent.pop()
