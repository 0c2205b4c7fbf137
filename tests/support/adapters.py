"""Small random adapters, and questions about their arrays."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np

from tuneserve_engine.adapters.state import AdapterState, Tensors
from tuneserve_engine.backend.jax.adapters.arrays import (
    LoraWeights,
    TargetShapes,
    TrainingAdapter,
    arrays_of,
    new_state,
    restored_adapter,
)
from tuneserve_engine.backend.jax.training.adapter_slots import accumulate_slot, is_sum_finite
from tuneserve_engine.core.adapter import ATTENTION, UNEMBED, AdapterConfig

SMALL = {
    "q_proj": (3, 7, 5),
    "k_proj": (3, 7, 2),
    "v_proj": (3, 7, 2),
    "o_proj": (3, 5, 7),
    UNEMBED: (7, 11),
}
"""Shapes for adapters that train no MLP."""
_COMPILED = "/jax/core/compile/backend_compile_duration"


def random_state(
    seed: int, rank: int = 3, *, step: int = 5, accumulated: bool = True
) -> AdapterState:
    """A trained adapter. It has no moments at step 0, and no unembedding if the seed is odd."""
    random = np.random.default_rng(seed)

    def like(tensors: Tensors) -> Tensors:
        return {
            name: random.standard_normal(tensor.shape, np.float32)
            for name, tensor in tensors.items()
        }

    config = AdapterConfig(rank, 16.0, seed, train_mlp=False, train_unembed=seed % 2 == 0)
    weights = new_state(config, SMALL).weights
    first = like(weights) if step else {}
    second = {name: tensor**2 for name, tensor in like(weights).items()} if step else {}
    return AdapterState(
        config,
        like(weights),
        step=step,
        first_moment=first,
        second_moment=second,
        accumulator=like(weights) if accumulated else {},
    )


def on_device(state: AdapterState, rank_bucket: int = 8) -> TrainingAdapter:
    return restored_adapter(state, SMALL, rank_bucket)


def bits(tree: object) -> list[bytes]:
    """The bytes of a tree of arrays, or of all arrays of an adapter."""
    leaves = arrays_of(tree) if isinstance(tree, TrainingAdapter) else jax.tree.leaves(tree)
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def pointers(*trees: object) -> list[int]:
    """The addresses of the arrays."""
    leaves = [arrays_of(x) if isinstance(x, TrainingAdapter) else x for x in trees]
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(leaves)]


def live() -> tuple[int, int]:
    """The number of arrays that are referenced on the device, and their bytes."""
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


def settled() -> tuple[int, int]:
    """``live()`` after a garbage collection.

    Without it, cycles left by compilation and earlier tests would hold arrays until some later
    moment.
    """
    gc.collect()
    return live()


def nbytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def random_like(tree: LoraWeights, seed: int) -> LoraWeights:
    random = np.random.default_rng(seed)
    fresh = jax.tree.map(lambda x: random.standard_normal(x.shape, np.float32), tree)
    return jax.device_put(fresh)


def shapes_of(layers: int, hidden: int, wide: int, vocabulary: int) -> TargetShapes:
    """Every target of a model of this size."""
    across = dict.fromkeys(ATTENTION, (layers, hidden, hidden))
    up = dict.fromkeys(("gate_proj", "up_proj"), (layers, hidden, wide))
    return across | up | {"down_proj": (layers, wide, hidden), UNEMBED: (hidden, vocabulary)}


def commit(
    accumulator: LoraWeights, gradient_slots: LoraWeights, slot: int, *, trained: bool = True
) -> tuple[LoraWeights, bool]:
    """The donated accumulator with the slot's gradient or unchanged, and which of the two."""
    rest = (gradient_slots, np.int32(slot), np.bool_(trained))
    finite = is_sum_finite(accumulator, *rest)
    return accumulate_slot(accumulator, *rest, finite), bool(finite)


@contextmanager
def counted_compilations() -> Iterator[list[float]]:
    """Collect the duration of each compilation in the block."""
    seen: list[float] = []

    def listen(event: str, duration_s: float, **_: object) -> None:
        if event == _COMPILED:
            seen.append(duration_s)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
