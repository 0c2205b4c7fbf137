"""What a failure on the device means for whoever asked."""

from collections.abc import Callable
from typing import TypeVar

import jax

from tuneserve_engine.backend.base import DeviceFailed, OutOfMemory

R = TypeVar("R")

_EXHAUSTED = "RESOURCE_EXHAUSTED"
"""XLA's only sign of it: every failure on the device is the same class."""
_OF_THE_PROGRAM = ("INVALID_ARGUMENT", "UNIMPLEMENTED")
"""What XLA says of a program that it will never run; other requests may need others."""


def on_device(call: Callable[..., R], *args: object, donated: object = ()) -> R:
    """What the call returns. Raises OutOfMemory if the device, or the host, had no room for it,
    DeviceFailed if the device is in trouble.

    ``donated`` is the tree of arrays that the call gives to programs and that exist nowhere else.
    Programs that have begun have consumed theirs: then any failure is DeviceFailed, since nothing
    can be as it was before the call. What fails earlier, for want of memory, leaves them intact.

    OutOfMemory has no cause: the failed call's frames, and with them its arrays, are gone by the
    time that somebody tries a smaller one.
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
