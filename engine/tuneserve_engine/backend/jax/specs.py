"""Shapes of arrays that do not have to exist."""

from typing import Any

import jax
from jax.typing import DTypeLike


def spec(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Return an array's shape and dtype as a program that is being compiled takes them."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
