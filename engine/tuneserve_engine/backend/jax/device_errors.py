"""The meaning of a failure on the device for the caller."""

from collections.abc import Callable
from typing import TypeVar

import jax

from tuneserve_engine.backend.base import DeviceFailed, OutOfMemory

R = TypeVar("R")

_EXHAUSTED = "RESOURCE_EXHAUSTED"
"""The only sign of missing memory: XLA reports every failure on the device as the same class."""
_OF_THE_PROGRAM = ("INVALID_ARGUMENT", "UNIMPLEMENTED")
"""XLA's words for a program that it can never run. Other requests may need other programs."""


def translate_device_errors(call: Callable[..., R], *args: object, donated: object = ()) -> R:
    """Return the result of the call, with failures of the device as two error classes.

    Raises ``OutOfMemory`` if the device or the host had no room for the call, and ``DeviceFailed``
    if the device failed.

    ``donated`` is the tree of arrays that the call donates to programs and that exist nowhere else.
    A program that has begun has consumed its donated arrays. Any failure is then ``DeviceFailed``,
    since the state before the call cannot be restored. A call that fails earlier for want of memory
    leaves the arrays intact.

    ``OutOfMemory`` has no cause: the frames of the failed call, and with them its arrays, are gone
    by the time a caller tries a smaller call.
    """
    before: list[jax.Array] = jax.tree.leaves(donated)
    try:
        return call(*args)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        if any(array.is_deleted() for array in before):
            raise DeviceFailed(
                f"a program failed that had begun to change an adapter: {reason}"
            ) from error
        if isinstance(error, jax.errors.JaxRuntimeError) and _EXHAUSTED not in str(error):
            if reason.startswith(_OF_THE_PROGRAM):
                raise
            raise DeviceFailed(f"the device failed: {reason}") from error
        if not isinstance(error, jax.errors.JaxRuntimeError | MemoryError):
            raise
    raise OutOfMemory(f"the device has no room: {reason or 'out of memory'}")
