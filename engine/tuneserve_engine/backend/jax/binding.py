"""Programs on a model: how a pure function of a decoder becomes one compiled function of arrays."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from tuneserve_engine.backend.jax.models.decoder import Decoder


def bind(
    model: Decoder,
    function: Callable[..., Any],
    *,
    donate: tuple[int, ...] = (),
    static: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """``function(model, ...)`` compiled, its first argument bound to the model's weights.

    Taken apart once, merged while tracing: a call pays for neither.
    """
    graph, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)

    def run(leaves: list[Array], *args: Any, **kwargs: Any) -> Any:
        return function(nnx.merge(graph, jax.tree.unflatten(structure, leaves)), *args, **kwargs)

    compiled = jax.jit(run, donate_argnums=donate, static_argnames=static)
    return partial(compiled, leaves)
