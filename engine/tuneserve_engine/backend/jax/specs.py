"""Shapes of arrays that need not exist."""

from typing import Any

import jax
from jax.typing import DTypeLike


def spec(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """What an array of this shape looks like to a program that is being compiled."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
