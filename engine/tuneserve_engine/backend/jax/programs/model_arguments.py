"""A model as the first argument of a program: its arrays, and the part of each on a device."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from tuneserve_engine.backend.jax.mesh import DeviceMesh


def parts_of_model(model: nnx.Module, mesh: DeviceMesh) -> list[Any]:
    """Return the part of each of the model's arrays that a device has."""
    variables = jax.tree.leaves(
        nnx.split(model)[1], is_leaf=lambda each: isinstance(each, nnx.Variable)
    )
    return [mesh.part_of(x[...].shape, x.get_metadata().get("most_parts")) for x in variables]


def with_leaves(
    model: nnx.Module, function: Callable[..., Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """Return the function with the model's arrays in place of the model, and these arrays.

    The model is split once and merged while tracing, so that a call pays for neither.
    """
    graph, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)

    def run(leaves: list[Any], *args: Any) -> Any:
        return function(nnx.merge(graph, jax.tree.unflatten(structure, leaves)), *args)

    return run, leaves
