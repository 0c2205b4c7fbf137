"""Training adapters: their initial weights, their device arrays, and moves to and from the host.

Arrays are made on the host and put on the device, so that not even the smallest program is compiled
for a new rank.

Dimension key: L layers, D inputs of a projection, F its outputs, r true rank, R rank bucket.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from tuneserve_engine.adapters import kinds
from tuneserve_engine.adapters.kinds.base import AdapterKind, SvdFactors
from tuneserve_engine.adapters.state import AdapterState, Tensors
from tuneserve_engine.backend.base import FloatArray
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.weight_shapes import layer_shapes
from tuneserve_engine.core.adapter import PROJECTIONS, UNEMBED, AdapterConfig
from tuneserve_engine.core.errors import UserError

TargetShapes = dict[str, tuple[int, ...]]
"""The shape [L, D, F] of every target; [D, F] of the unembedding."""
PartShapes = dict[str, dict[str, tuple[int, ...]]]
"""Shapes by part, then by target."""
Put = Callable[[Any], Any]
"""A function that puts a tree of host arrays on the devices: ``jax.device_put`` for one."""
FrozenOf = Callable[[AdapterConfig, str], SvdFactors | None]
"""A function that returns an adapter's shared factors of a target, on the host."""
LORA = kinds.KINDS["lora"][""]


class LoraWeights(NamedTuple):
    """One adapter's pairs, or their moments or gradient, float32 and padded to the rank bucket.

    ``a[target]`` is [L, D, R] and ``b[target]`` is [L, R, F]; those of ``unembed`` have no L. All
    targets are present. The arrays of targets that the adapter does not train are zero. They stay
    exactly zero, since each of A and B takes its gradient through the other.
    """

    a: dict[str, Array]
    b: dict[str, Array]


Weights = LoraWeights | dict[str, dict[str, Array]]
"""An adapter's own arrays, or their moments, by part and target; a LoRA's arrays are its pairs."""


@dataclass
class TrainingAdapter:
    """One tenant's adapter on the device.

    Its arrays belong to it alone: shared adapter slots would be copied as a whole at every step.
    Programs that change the arrays take them donated, so each exists once. A caller that dispatches
    such a program must store the results here in the same statement.
    """

    config: AdapterConfig
    shapes: TargetShapes
    rank_bucket: int
    weights: Weights
    first_moment: Weights
    second_moment: Weights
    accumulator: LoraWeights  # the gradient of the pairs, whatever the kind
    frozen: dict[str, SvdFactors] | None = None  # by target, on the device, shared with others
    accumulated: bool = False  # whether gradients came since the last step; otherwise it is zero
    step: int = 0  # steps taken; at 0, the moments are zero

    @property
    def kind(self) -> AdapterKind:
        return kinds.kind_of(self.config)

    @property
    def scale(self) -> np.float32:
        return np.float32(self.kind.scale(self.config))


def target_shapes(config: ModelConfig) -> TargetShapes:
    """Return the shape of every weight that LoRA can train, in storage order."""
    layers = layer_shapes(config)
    shapes: TargetShapes = {name: (config.layers, *layers[name]) for name in PROJECTIONS}
    return shapes | {UNEMBED: (config.hidden, config.vocab_size)}


def adapter_bytes(shapes: TargetShapes, rank_bucket: int, kind: AdapterKind = LORA) -> int:
    """Return an adapter's size on the device: weights, two moments and accumulator."""
    return kinds.adapter_bytes(kind, shapes, rank_bucket)


def new_state(
    config: AdapterConfig, shapes: TargetShapes, frozen: FrozenOf = lambda config, target: None
) -> AdapterState:
    """Return a fresh adapter on the host, which equals the base model."""
    return AdapterState(config, initial_weights(config, shapes, frozen))


def initial_weights(
    config: AdapterConfig, shapes: TargetShapes, frozen: FrozenOf = lambda config, target: None
) -> Tensors:
    """Return the initial weights of an adapter."""
    kind = kinds.kind_of(config)
    weights: Tensors = {}
    for index, name in enumerate(shapes):
        if name not in config.targets:
            continue
        parts = kind.initial(config, index, shapes[name], frozen(config, name))
        weights |= {f"{name}.{part}": np.array(x, np.float32) for part, x in parts.items()}
    return weights


def new_adapter(config: AdapterConfig, shapes: TargetShapes, rank_bucket: int) -> TrainingAdapter:
    """Return a fresh LoRA on the device."""
    return restored_adapter(new_state(config, shapes), shapes, rank_bucket)


def check_state(state: AdapterState, shapes: TargetShapes) -> None:
    """Raise ``UserError`` with the tensor's name if the state does not fit this base model."""
    own, pairs = _true_shapes(state.config, shapes), _true_shapes(state.config, shapes, LORA)
    _check_tensors("weights", state.weights, own)
    if state.first_moment or state.second_moment:
        _check_tensors("first_moment", state.first_moment, own)
        _check_tensors("second_moment", state.second_moment, own)
    if state.accumulator:
        _check_tensors("accumulator", state.accumulator, pairs)


def restored_adapter(
    state: AdapterState,
    shapes: TargetShapes,
    rank_bucket: int,
    frozen: dict[str, SvdFactors] | None = None,
    put: Put = jax.device_put,
) -> TrainingAdapter:
    """Return the adapter of a saved state, on the device.

    Includes the accumulator if the state has one, and step and moments if it has taken a step.
    Raises ``UserError`` with the tensor's name if the state does not fit this base model.
    """
    check_state(state, shapes)
    has_stepped = state.step > 0 and bool(state.first_moment)
    own = part_shapes(shapes, rank_bucket, kinds.kind_of(state.config))
    adapter = TrainingAdapter(
        state.config,
        shapes,
        rank_bucket,
        _to_device(state.weights, own, put),
        _to_device(state.first_moment if has_stepped else {}, own, put),
        _to_device(state.second_moment if has_stepped else {}, own, put),
        _to_device(state.accumulator, part_shapes(shapes, rank_bucket, LORA), put),
        frozen=frozen,
        accumulated=bool(state.accumulator),
        step=state.step if has_stepped else 0,
    )
    # Waits here: a lack of room fails now and not in a later batch, and the caller may change the
    # state after the return.
    jax.block_until_ready(arrays_of(adapter))  # type: ignore[no-untyped-call]
    return adapter


def restored_weights(
    state: AdapterState, shapes: TargetShapes, rank_bucket: int, put: Put = jax.device_put
) -> LoraWeights:
    """Return the pairs of a saved LoRA on the device; its moments are not loaded.

    Raises ``UserError`` with the tensor's name if the state does not fit this base model.
    """
    _check_tensors("weights", state.weights, _true_shapes(state.config, shapes, LORA))
    weights = _to_device(state.weights, part_shapes(shapes, rank_bucket, LORA), put)
    # Waits here: the caller may change the state after the return.
    return jax.block_until_ready(weights)  # type: ignore[no-untyped-call, no-any-return]


def saved_state(adapter: TrainingAdapter, *, optimizer: bool, accumulator: bool) -> AdapterState:
    """Return a copy on the host without padding and untrained targets; restores the same bits."""
    own = _true_shapes(adapter.config, adapter.shapes)
    state = AdapterState(adapter.config, _to_host(adapter.weights, own))
    if optimizer:
        state = replace(
            state,
            step=adapter.step,
            first_moment=_to_host(adapter.first_moment, own),
            second_moment=_to_host(adapter.second_moment, own),
        )
    if accumulator and adapter.accumulated:
        pairs = _true_shapes(adapter.config, adapter.shapes, LORA)
        state = replace(state, accumulator=_to_host(adapter.accumulator, pairs))
    return state


def exported_state(adapter: TrainingAdapter, pairs: LoraWeights) -> AdapterState:
    """Return the adapter's pairs as a LoRA on the host, without padding and untrained targets."""
    config = kinds.exported(adapter.config)
    return AdapterState(config, _to_host(pairs, _true_shapes(config, adapter.shapes)))


def arrays_of(adapter: TrainingAdapter) -> list[Array]:
    """Return every array of the adapter."""
    parts = (adapter.weights, adapter.first_moment, adapter.second_moment, adapter.accumulator)
    return jax.tree.leaves(parts)


def part_shapes(shapes: TargetShapes, rank: int, kind: AdapterKind) -> PartShapes:
    """Return shapes of all arrays of an adapter that is padded to the rank, trained or not."""
    found: PartShapes = {}
    for name, shape in shapes.items():
        for part, padded in kind.parameter_shapes(shape, rank).items():
            found.setdefault(part, {})[name] = padded
    return found


def in_tree(parts: Mapping[str, dict[str, Any]]) -> Any:
    """Return a ``Weights`` tree of anything that is given by part and target."""
    return LoraWeights(parts["A"], parts["B"]) if parts.keys() == {"A", "B"} else dict(parts)


def by_target(weights: Any) -> dict[str, dict[str, Any]]:
    """Return each target's parts of ``Weights``, on the device or the host."""
    parts = {"A": weights.a, "B": weights.b} if isinstance(weights, LoraWeights) else weights
    found: dict[str, dict[str, Any]] = {}
    for part, arrays in parts.items():
        for name, array in arrays.items():
            found.setdefault(name, {})[part] = array
    return found


def _true_shapes(
    config: AdapterConfig, shapes: TargetShapes, kind: AdapterKind | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor the adapter trains: parts of its own kind, or of ``kind``."""
    own = kinds.kind_of(config)
    return {
        f"{name}.{part}": shape
        for name in config.targets
        for part, shape in (kind or own)
        .parameter_shapes(shapes[name], own.rank(config, shapes[name]))
        .items()
    }


def _to_device(tensors: Mapping[str, FloatArray], shapes: PartShapes, put: Put) -> Any:
    """Pad the tensors to the shapes and put them on the device; a missing tensor is zeros."""
    padded = {
        part: {name: _padded(tensors.get(f"{name}.{part}"), shape) for name, shape in of.items()}
        for part, of in shapes.items()
    }
    return in_tree(put(padded))


def _padded(tensor: FloatArray | None, shape: tuple[int, ...]) -> FloatArray:
    if tensor is not None and tensor.shape == shape and _is_copied(tensor):
        return tensor
    return host_zeros(shape) if tensor is None else _filled(tensor, shape)


def _filled(tensor: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """Return the tensor, followed by zeros."""
    padded = host_zeros(shape)
    padded[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded


def _is_copied(array: FloatArray) -> bool:
    """Return whether ``jax.device_put`` copies the array on every device.

    On CPU, it adopts memory that is aligned to 64 bytes instead, whatever ``may_alias`` says. JAX
    does not own such memory: when donated, it is copied and not reused.
    """
    return array.flags.c_contiguous and array.ctypes.data % 64 != 0


def host_zeros(shape: tuple[int, ...]) -> FloatArray:
    """Return zeros on the host that ``jax.device_put`` copies."""
    size = math.prod(shape)
    room = np.zeros(size + 1, np.float32)
    zeros = room[:size] if _is_copied(room) else room[1:]
    return zeros.reshape(shape)


def _to_host(weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    # Other handles of the same memory: an array keeps the host copy of its values as long as it
    # lives, and that would be a second copy of every adapter that was ever saved.
    host = by_target(jax.device_get(jax.tree.map(lambda x: x.addressable_data(0), weights)))
    tensors: Tensors = {}
    for tensor, shape in shapes.items():
        name, part = tensor.rsplit(".", 1)
        # Copies: on CPU these are read-only views that keep the device's memory.
        true = host[name][part][tuple(slice(size) for size in shape)]
        tensors[tensor] = np.array(true, order="C")
    return tensors


def _check_tensors(
    part: str, tensors: Mapping[str, FloatArray], expected: Mapping[str, tuple[int, ...]]
) -> None:
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
