"""The programs to compile, from shapes alone: no weights or other arrays of a model exist."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tuneserve_engine.adapters.kinds import KINDS
from tuneserve_engine.backend.jax.attention import packed_gpu
from tuneserve_engine.backend.jax.attention.base import Attended, AttentionGradient, Visibility
from tuneserve_engine.backend.jax.memory.planner import Device, Plan, plan
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.precompile.closed_set import worker_programs
from tuneserve_engine.core.backend_options import PlanRequest, Remat

_ROOM_BYTES = 2**50
"""More memory than any model needs, so the planner chooses its largest shapes for every model."""
_DTYPE = "bfloat16"
_BLOCK, _BLOCKS, _KEY_HEADS = 64, 8, 2

Place = Callable[[Any], Any]
"""A function that returns the spec of an argument on the target device."""


@dataclass(frozen=True)
class Task:
    """A program, and the function that lowers it for a device."""

    name: str
    lower: Callable[[Place], jax.stages.Lowered]


def largest_plan(config: ModelConfig, max_rank: int, chunk: int | None = None) -> Plan:
    """Return the plan of a GPU with more memory than any model needs: the largest shapes.

    A chunk has ``chunk`` tokens, or as many as the planner chooses.
    """
    request = PlanRequest(dtype=_DTYPE, max_rank=max_rank, chunk_tokens=chunk)
    return plan(config, Device.accelerator("gpu", _ROOM_BYTES, _ROOM_BYTES), request)


def closed_set(
    model: str, config: ModelConfig, found: Plan, *, is_all: bool, remat: Remat | None = None
) -> Iterator[Task]:
    """Yield the programs that a worker on a GPU compiles ahead, in the worker's order.

    The model is in bfloat16. Training on several targets per position, and the programs of adapter
    kinds other than LoRA, are included only with ``is_all``. ``remat`` is the plan's unless given.
    """
    kinds = [kind for forms in KINDS.values() for kind in forms.values()] if is_all else []
    programs = worker_programs(config, found, remat=remat, kinds=kinds)
    several = f", {found.static_shapes.target_buckets[-1]}, "
    for shape in sorted(programs.shapes(), key=lambda shape: shape.order):
        if is_all or several not in shape.name:
            yield Task(f"{model} {shape.name}", shape.lowered)


def attention(head_dims: Iterable[int], dtype: str, groups: Iterable[int]) -> Iterator[Task]:
    """Yield the attention kernels for each head_dim and group.

    Float32 kernels take ten times as long to compile as bfloat16 kernels.
    """
    groups = tuple(groups)
    for head_dim in head_dims:
        for group in groups:
            name = f"attention {dtype} head_dim {head_dim} group {group}"
            yield Task(f"{name} forward", _lowered(_forward, head_dim, group, dtype))
            yield Task(f"{name} queries", _lowered(_of_queries, head_dim, group, dtype))
            yield Task(f"{name} keys", _lowered(_of_keys, head_dim, group, dtype))


@dataclass(frozen=True)
class _AttentionArguments:
    """The arguments of attention, as shapes. It is a JAX tree of its fields."""

    q: Any
    k: Any
    seen: Visibility
    into: Attended
    gradients: AttentionGradient


jax.tree_util.register_dataclass(_AttentionArguments)
_OPTIONS = {"base": 0, "attended_base": 0, "interpret": False}


def _forward(at: _AttentionArguments) -> Attended:
    return packed_gpu.attend(at.q, at.k, at.k, at.seen, at.into, **_OPTIONS)  # type: ignore[arg-type]


def _backward(at: _AttentionArguments) -> AttentionGradient:
    given = at.q, at.k, at.k, at.into, at.q, at.seen, at.gradients
    return packed_gpu.attend_backward(*given, **_OPTIONS)  # type: ignore[arg-type]


def _of_queries(at: _AttentionArguments) -> jax.Array:
    """Return the gradient of the queries. The compiler drops the other kernel, which is unused."""
    return _backward(at).q


def _of_keys(at: _AttentionArguments) -> tuple[jax.Array, jax.Array]:
    gradients = _backward(at)
    return gradients.k, gradients.v


def _lowered(
    function: Callable[..., Any], head_dim: int, group: int, dtype: str
) -> Callable[[Place], jax.stages.Lowered]:
    def lower(place: Place) -> jax.stages.Lowered:
        arguments = jax.tree.map(place, _arguments(head_dim, group, dtype))
        precision = "highest" if dtype == "float32" else None
        with jax.default_matmul_precision(precision):
            return jax.jit(function).lower(arguments)

    return lower


def _arguments(head_dim: int, group: int, dtype: str) -> _AttentionArguments:
    def floats(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((_BLOCKS, *shape), dtype)

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    q = floats(_KEY_HEADS, group * _BLOCK, head_dim)
    k = floats(_KEY_HEADS, _BLOCK, head_dim)
    seen = Visibility(ints(_BLOCKS, _BLOCK), ints(_BLOCKS, _BLOCK), ints(_BLOCKS), ints())
    sums = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    return _AttentionArguments(q, k, seen, Attended(q, sums), AttentionGradient(q, k, k))
