"""Training adapters: their start, their arrays on the device, and their way to the host and back.

Arrays are made on the host and put on the device: not even the smallest program is compiled for a
rank that was not seen before.

Dimension key: L layers, D inputs of a projection, F its outputs, r true rank, R rank class.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from tuneserve_engine.adapters import PROJECTIONS, UNEMBED, AdapterConfig
from tuneserve_engine.backend.base import AdapterState, FloatArray, Tensors
from tuneserve_engine.backend.jax.models.block import layer_shapes
from tuneserve_engine.backend.jax.models.config import ModelConfig
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
    be copied whole at every step.

    Programs that change them take them donated, so each exists once. Whoever dispatches such a
    program puts what it returns here in the same statement.
    """

    config: AdapterConfig
    rank_class: int
    weights: LoraWeights
    first_moment: LoraWeights
    second_moment: LoraWeights
    accumulator: LoraWeights
    accumulated: bool = False  # since the last step; the accumulator is zero until then
    step: int = 0  # the moments are zero until the first one


def target_shapes(config: ModelConfig) -> TargetShapes:
    """The shape of every weight that LoRA can train, in storage order."""
    layers = layer_shapes(config)
    shapes: TargetShapes = {name: (config.layers, *layers[name]) for name in PROJECTIONS}
    return shapes | {UNEMBED: (config.hidden, config.vocab_size)}


def adapter_bytes(shapes: TargetShapes, rank_class: int) -> int:
    """What an adapter takes on the device: weights, two moments and accumulator."""
    rows = sum(math.prod(layers) * (i + o) for *layers, i, o in shapes.values())
    return 4 * np.dtype(np.float32).itemsize * rows * rank_class


def new_state(config: AdapterConfig, shapes: TargetShapes) -> AdapterState:
    """A fresh adapter on the host: B is zero, so that it equals the base model."""
    return AdapterState(config, initial_weights(config, shapes))


def new_adapter(config: AdapterConfig, shapes: TargetShapes, rank_class: int) -> TrainingAdapter:
    """A fresh adapter on the device."""
    return restored_adapter(new_state(config, shapes), shapes, rank_class)


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


def check_state(state: AdapterState, shapes: TargetShapes) -> None:
    """Raises UserError, naming the tensor, if the state does not fit this base model."""
    _check_tensors("weights", state.weights, state.config, shapes)
    if state.first_moment or state.second_moment:
        _check_tensors("first_moment", state.first_moment, state.config, shapes)
        _check_tensors("second_moment", state.second_moment, state.config, shapes)
    if state.accumulator:
        _check_tensors("accumulator", state.accumulator, state.config, shapes)


def restored_adapter(state: AdapterState, shapes: TargetShapes, rank_class: int) -> TrainingAdapter:
    """The adapter of a saved state; the accumulator included when it has one, step and moments
    when it has taken a step.

    Raises UserError, naming the tensor, if the state does not fit this base model.
    """
    check_state(state, shapes)
    has_stepped = state.step > 0 and bool(state.first_moment)
    adapter = TrainingAdapter(
        state.config,
        rank_class,
        _to_device(state.weights, shapes, rank_class),
        _to_device(state.first_moment if has_stepped else {}, shapes, rank_class),
        _to_device(state.second_moment if has_stepped else {}, shapes, rank_class),
        _to_device(state.accumulator, shapes, rank_class),
        accumulated=bool(state.accumulator),
        step=state.step if has_stepped else 0,
    )
    # Waits here: what there is no room for fails now, not in somebody's unit, and from now on the
    # caller may do what it likes with the state.
    jax.block_until_ready(arrays_of(adapter))  # type: ignore[no-untyped-call]
    return adapter


def restored_weights(state: AdapterState, shapes: TargetShapes, rank_class: int) -> LoraWeights:
    """The weights of a saved state on the device; its moments stay where they are.

    Raises UserError, naming the tensor, if the state does not fit this base model.
    """
    _check_tensors("weights", state.weights, state.config, shapes)
    weights = _to_device(state.weights, shapes, rank_class)
    # Waits here: from now on the caller may do what it likes with the state.
    return jax.block_until_ready(weights)  # type: ignore[no-untyped-call, no-any-return]


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


def arrays_of(adapter: TrainingAdapter) -> list[Array]:
    """Every array of the adapter."""
    parts = (adapter.weights, adapter.first_moment, adapter.second_moment, adapter.accumulator)
    return jax.tree.leaves(parts)


def _to_device(tensors: Mapping[str, FloatArray], shapes: TargetShapes, rank: int) -> LoraWeights:
    """Pads the tensors to the rank class; a missing one is zeros."""
    a, b = {}, {}
    for name, (*layers, inputs, outputs) in shapes.items():
        a[name] = _padded(tensors.get(f"{name}.A"), (*layers, inputs, rank))
        b[name] = _padded(tensors.get(f"{name}.B"), (*layers, rank, outputs))
    return LoraWeights(*jax.device_put((a, b)))


def _padded(tensor: FloatArray | None, shape: tuple[int, ...]) -> FloatArray:
    if tensor is not None and tensor.shape == shape and _is_copied(tensor):
        return tensor
    padded = host_zeros(shape)
    if tensor is not None:
        padded[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded


def _is_copied(array: FloatArray) -> bool:
    """Whether ``jax.device_put`` copies the array on every device.

    The CPU's adopts memory that is aligned to 64 bytes instead, whatever ``may_alias`` says. JAX
    does not own such memory: donated, it is copied, not reused.
    """
    return array.flags.c_contiguous and array.ctypes.data % 64 != 0


def host_zeros(shape: tuple[int, ...]) -> FloatArray:
    """Zeros on the host that ``jax.device_put`` copies."""
    size = math.prod(shape)
    room = np.zeros(size + 1, np.float32)
    zeros = room[:size] if _is_copied(room) else room[1:]
    return zeros.reshape(shape)


def _to_host(weights: LoraWeights, config: AdapterConfig) -> Tensors:
    # Other handles of the same memory: an array keeps what it once gave to the host, as long as it
    # lives, and that would be a second copy of every adapter that was ever saved.
    handles = jax.tree.map(lambda x: x.addressable_data(0), weights)
    host: LoraWeights = jax.device_get(handles)
    tensors: Tensors = {}
    for name in config.targets:
        # Copies: on CPU these are read-only views that keep the device's memory.
        tensors[f"{name}.A"] = np.array(host.a[name][..., : config.rank], order="C")
        tensors[f"{name}.B"] = np.array(host.b[name][..., : config.rank, :], order="C")
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
