"""Training adapters: their start, their arrays on the device, and their way to the host and back.

Dimension key: L layers, D inputs of a projection, F its outputs, r true rank, R rank class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tuneserve_engine.adapters import PROJECTIONS, UNEMBED, AdapterConfig
from tuneserve_engine.backend.base import AdapterState, FloatArray, Tensors
from tuneserve_engine.backend.jax.models.config import ModelConfig
from tuneserve_engine.backend.jax.models.decoder import layer_shapes
from tuneserve_engine.errors import UserError

TargetShapes = dict[str, tuple[int, ...]]
"""[L, D, F] of every target; [D, F] of the unembedding."""


class LoraWeights(NamedTuple):
    """One adapter's arrays, or their moments or gradient, float32 and padded to the rank class:
    ``a[target]`` is [L, D, R], ``b[target]`` is [L, R, F]; ``unembed`` has no L.

    All targets are there. Those that the adapter does not train are zero and, since each of A and
    B takes its gradient through the other, stay exactly zero.
    """

    a: dict[str, Array]
    b: dict[str, Array]


@dataclass
class TrainingAdapter:
    """One tenant's adapter on the device. Its arrays are its own: a bank shared with others would
    be copied whole at every step."""

    config: AdapterConfig
    rank_class: int
    weights: LoraWeights
    first_moment: LoraWeights
    second_moment: LoraWeights
    accumulator: LoraWeights
    accumulated: bool = False  # since the last step; the accumulator is zero until then
    step: int = 0


def target_shapes(config: ModelConfig) -> TargetShapes:
    """The shape of every weight that LoRA can train, in storage order."""
    layers = layer_shapes(config)
    shapes: TargetShapes = {name: (config.layers, *layers[name]) for name in PROJECTIONS}
    return shapes | {UNEMBED: (config.hidden, config.vocab_size)}


def new_adapter(config: AdapterConfig, shapes: TargetShapes, rank_class: int) -> TrainingAdapter:
    """A fresh adapter: B is zero, so that it equals the base model."""
    weights = _to_device(initial_weights(config, shapes), shapes, rank_class)
    return _training_adapter(config, rank_class, shapes, weights)


def initial_weights(config: AdapterConfig, shapes: TargetShapes) -> Tensors:
    """A uniform in ±1/sqrt(D), as PEFT's ``kaiming_uniform_(a=sqrt(5))``, and B zero.

    A target's numbers depend on the seed, the target and the shape alone. They are drawn on the
    host, so they are the same on every device; a ``jax.random`` program would be compiled for each
    new rank, two seconds in front of a client that waits for its model.
    """
    weights: Tensors = {}
    for index, name in enumerate(shapes):
        if name not in config.targets:
            continue
        *layers, inputs, outputs = shapes[name]
        key = np.array([config.seed % 2**64, index], np.uint64)
        uniform = np.random.Generator(np.random.Philox(key=key)).random(
            (*layers, inputs, config.rank), np.float32
        )
        weights[f"{name}.A"] = (2 * uniform - 1) / np.float32(np.sqrt(inputs))
        weights[f"{name}.B"] = np.zeros((*layers, config.rank, outputs), np.float32)
    return weights


def restored_adapter(state: AdapterState, shapes: TargetShapes, rank_class: int) -> TrainingAdapter:
    """The adapter of a saved state; moments, step and accumulator included when it has them.

    Raises UserError, naming the tensor, if the state does not fit this base model.
    """
    weights = restored_weights(state, shapes, rank_class)
    adapter = _training_adapter(state.config, rank_class, shapes, weights)
    if state.first_moment or state.second_moment:
        _check_tensors("first_moment", state.first_moment, state.config, shapes)
        _check_tensors("second_moment", state.second_moment, state.config, shapes)
        adapter.first_moment = _to_device(state.first_moment, shapes, rank_class)
        adapter.second_moment = _to_device(state.second_moment, shapes, rank_class)
        adapter.step = state.step
    if state.accumulator:
        _check_tensors("accumulator", state.accumulator, state.config, shapes)
        adapter.accumulator = _to_device(state.accumulator, shapes, rank_class)
        adapter.accumulated = True
    return adapter


def restored_weights(state: AdapterState, shapes: TargetShapes, rank_class: int) -> LoraWeights:
    """The weights of a saved state on the device; its moments stay where they are.

    Raises UserError, naming the tensor, if the state does not fit this base model.
    """
    _check_tensors("weights", state.weights, state.config, shapes)
    return _to_device(state.weights, shapes, rank_class)


def saved_state(adapter: TrainingAdapter, *, optimizer: bool, accumulator: bool) -> AdapterState:
    """A copy on the host without padding and untrained targets; restores to the same bits."""
    config = adapter.config
    state = AdapterState(config, _to_host(adapter.weights, config))
    if optimizer:
        state = replace(
            state,
            step=adapter.step,
            first_moment=_to_host(adapter.first_moment, config),
            second_moment=_to_host(adapter.second_moment, config),
        )
    if accumulator and adapter.accumulated:
        state = replace(state, accumulator=_to_host(adapter.accumulator, config))
    return state


def _training_adapter(
    config: AdapterConfig, rank_class: int, shapes: TargetShapes, weights: LoraWeights
) -> TrainingAdapter:
    def zeros() -> LoraWeights:
        return _to_device({}, shapes, rank_class)

    adapter = TrainingAdapter(config, rank_class, weights, zeros(), zeros(), zeros())
    # Waits here: zeros for which there is no room fail now, not in somebody's unit.
    jax.block_until_ready((weights, adapter.accumulator))  # type: ignore[no-untyped-call]
    return adapter


def _to_device(tensors: Mapping[str, FloatArray], shapes: TargetShapes, rank: int) -> LoraWeights:
    """Pads the tensors to the rank class; a missing one is zeros."""
    a, b = {}, {}
    for name, (*layers, inputs, outputs) in shapes.items():
        a[name] = _padded(tensors.get(f"{name}.A"), (*layers, inputs, rank))
        b[name] = _padded(tensors.get(f"{name}.B"), (*layers, rank, outputs))
    return LoraWeights(a, b)


def _padded(tensor: FloatArray | None, shape: tuple[int, ...]) -> Array:
    if tensor is None:
        return jnp.zeros(shape, jnp.float32)
    room = [(0, full - size) for full, size in zip(shape, tensor.shape, strict=True)]
    return jnp.asarray(np.pad(tensor, room))


def _to_host(weights: LoraWeights, config: AdapterConfig) -> Tensors:
    rank = config.rank
    tensors: Tensors = {}
    for name in config.targets:
        # Copies: on CPU these would be read-only views that keep the device's buffers alive.
        tensors[f"{name}.A"] = np.array(np.asarray(weights.a[name])[..., :rank], order="C")
        tensors[f"{name}.B"] = np.array(np.asarray(weights.b[name])[..., :rank, :], order="C")
    return tensors


def _check_tensors(
    part: str, tensors: Mapping[str, FloatArray], config: AdapterConfig, shapes: TargetShapes
) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for name in config.targets:
        *layers, inputs, outputs = shapes[name]
        expected[f"{name}.A"] = (*layers, inputs, config.rank)
        expected[f"{name}.B"] = (*layers, config.rank, outputs)
    if tensors.keys() != expected.keys():
        differing = ", ".join(sorted(tensors.keys() ^ expected.keys()))
        raise UserError(
            f"{part} of the saved adapter do not match its configuration in: {differing}; "
            "load it as it was saved"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape or tensors[name].dtype != np.float32:
            raise UserError(
                f"{part}[{name}] of the saved adapter is {tensors[name].dtype} "
                f"{list(tensors[name].shape)}; this base model needs float32 {list(shape)}; "
                "load it on the base model that it was trained on"
            )
