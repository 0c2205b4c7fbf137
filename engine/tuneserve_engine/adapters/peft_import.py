"""The import of an adapter in PEFT's layout: checked against a base model's shapes, and written in
our own format.

This module reads the list of tensors itself, and each tensor only when it is needed: the file may
be larger than the memory, lies within another file, and may have bfloat16, which NumPy lacks.

Dimension key: L layers, D inputs of a projection, F its outputs, r rank.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product, repeat
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np

from tuneserve_engine.adapters.checkpoint_format import FRESH, Array, initial_layers, metadata_of
from tuneserve_engine.adapters.peft_config import PeftConfig
from tuneserve_engine.adapters.tensor_file import MAX_HEADER_BYTES, write
from tuneserve_engine.core.adapter import ATTENTION, MLP, UNEMBED, AdapterConfig, BaseModelInfo
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.process.permissions import open_shared

_FILE = "adapter_model.safetensors"
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_LARGEST_SIZE = 2**31  # largest dimension of a tensor
_SYNC_BYTES = 256 * 2**20  # most unsynced bytes that a stopping process waits for
_PROJECTION = rf"(?:self_attn\.({'|'.join(ATTENTION)})|mlp\.({'|'.join(MLP)}))"
_NAME = re.compile(
    rf"base_model\.model\.(?:model\.layers\.([0-9]{{1,4}})\.{_PROJECTION}|lm_head)"
    r"\.lora_([AB])(?:\.default)?\.weight"
)
_COPY = re.compile(r"base_model\.model\.(?:model\.embed_tokens|lm_head)(?:\.base_layer)?\.weight")
"""Names of the base model's own tensors, which PEFT adds if the unembedding has an adapter."""

Place = tuple[str, int | None, str]
"""The place of a tensor: target, layer (None for the unembedding), and A or B."""


_Int64 = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]


class _TensorEntry(msgspec.Struct):
    """An entry of the list of tensors, of bounded size: the list comes from an untrusted client."""

    dtype: str
    shape: Annotated[tuple[_Int64, ...], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Int64, _Int64]


Places = dict[Place, tuple[str, _TensorEntry]]
"""The name and entry of the file's tensor for each place."""


@dataclass(frozen=True)
class PeftWeights:
    """The tensors of an ``adapter_model.safetensors`` that lies in ``path`` from ``start`` on."""

    path: Path
    start: int
    size: int

    def adapter(self, config: PeftConfig, info: BaseModelInfo, seed: int) -> "PeftAdapter":
        """Check that the tensors are a complete adapter for this base model, and return it.

        Raises ``UserError`` if they are not.
        """
        _check_rank(config.rank, info)
        first, entries = self._entries()
        places: Places = {}
        for name, entry in entries.items():
            if _COPY.fullmatch(name):
                _check_copy(name, entry, info)
                continue
            place = _place(name)
            if place in places:
                raise UserError(
                    f"{_FILE} has {places[place][0]} and {name}, which are the same; save the "
                    "adapter with save_pretrained"
                )
            _check_entry(name, entry, self.size - first)
            places[place] = name, entry
        _check_layout(entries, self.size - first)
        _check_places(places, config.rank, info)
        targets = {target for target, _, _ in places}
        made = AdapterConfig(
            rank=config.rank,
            alpha=config.alpha,
            seed=seed,
            train_attn=not targets.isdisjoint(ATTENTION),
            train_mlp=not targets.isdisjoint(MLP),
            train_unembed=UNEMBED in targets,
        )
        return PeftAdapter(self.path, self.start + first, places, made, info)

    def _entries(self) -> tuple[int, dict[str, _TensorEntry]]:
        """Return the offset of the tensors, and their list."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            length = int.from_bytes(file.read(min(8, self.size)), "little")
            if self.size < 8 or length > min(self.size - 8, MAX_HEADER_BYTES):
                raise _no_safetensors(
                    f"its list of tensors would have {length} bytes, of the file's {self.size}; at "
                    f"most {MAX_HEADER_BYTES} are read"
                )
            text = file.read(length)
        try:
            raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            return 8 + length, {
                n: msgspec.json.decode(r, type=_TensorEntry) for n, r in raw.items()
            }
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise _no_safetensors(f"its list of tensors cannot be read: {error}") from None


@dataclass(frozen=True)
class PeftAdapter:
    """A complete adapter: its list of tensors is checked, their numbers are not."""

    path: Path
    first: int
    places: Places
    config: AdapterConfig
    info: BaseModelInfo

    @property
    def size(self) -> int:
        """The bytes of the numbers that ``write`` writes."""
        return 4 * sum(math.prod(shape) for shape in self._shapes().values())

    def write(self, path: Path, check: Callable[[], object] = lambda: None) -> None:
        """Write a new file in our format, from which training resumes with a fresh optimizer.

        The numbers are PEFT's. If a target, for example one part of attention, has no adapter in
        the file, it starts like a new adapter: B is zero. ``check`` is called before each layer of
        a target is written. Raises ``UserError`` if a number is not finite, and any error of
        ``check``.
        """
        shapes = self._shapes()
        metadata = metadata_of(self.config, self.info.name, 0, self.info.revision) | FRESH
        with open_shared(path, "xb") as file:
            pieces = _written(self._pieces(shapes), file, check)
            write(file, shapes, metadata, pieces)
            file.flush()
            os.fsync(file.fileno())

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for target, (*layers, inputs, outputs) in self.info.target_shapes:
            if target in self.config.targets:
                shapes[f"weights/{target}.A"] = (*layers, inputs, self.config.rank)
                shapes[f"weights/{target}.B"] = (*layers, self.config.rank, outputs)
        return shapes

    def _pieces(self, shapes: dict[str, tuple[int, ...]]) -> Iterator[Array]:
        """Yield the numbers of all tensors, layer by layer."""
        data = np.memmap(self.path, np.uint8, "r")
        indices = {target: index for index, (target, _) in enumerate(self.info.target_shapes)}
        given = {target for target, _, _ in self.places}
        for name, shape in shapes.items():
            target, part = name.removeprefix("weights/").split(".")
            if target in given:
                layers = [None] if target == UNEMBED else range(shape[0])
                for layer in layers:
                    yield self._numbers(data, (target, layer, part)).T
                continue
            count, rows, columns = shape  # never the unembedding: if trained, the file has it
            if part == "A":
                drawn = (count, rows, columns)
                yield from initial_layers(self.config.seed, indices[target], drawn)
            else:
                yield from repeat(np.zeros((rows, columns), np.float32), count)

    def _numbers(self, data: np.ndarray[Any, Any], place: Place) -> Array:
        name, entry = self.places[place]
        start, end = (self.first + each for each in entry.data_offsets)
        numbers = _float32(data[start:end], entry.dtype).reshape(entry.shape)
        if not np.isfinite(numbers).all():
            first = int(np.argmin(np.isfinite(numbers)))  # a list of all could outgrow them
            row, column = divmod(first, numbers.shape[1])
            raise UserError(
                f"{name} of {_FILE} is {numbers[row, column]} at [{row}, {column}]; all numbers of "
                "an adapter must be finite: import one from before it diverged"
            )
        return numbers


def _written(
    pieces: Iterable[Array], file: BinaryIO, check: Callable[[], object]
) -> Iterator[Array]:
    """Yield the pieces, and sync the file now and then.

    The caller writes each piece to the file before it asks for the next.
    """
    unsynced = 0
    for piece in pieces:
        check()
        yield piece
        unsynced += piece.nbytes
        if unsynced >= _SYNC_BYTES:
            file.flush()
            os.fsync(file.fileno())
            unsynced = 0


def _float32(data: np.ndarray[Any, Any], dtype: str) -> Array:
    """Return the exact numbers of these bytes."""
    if dtype == "BF16":  # the upper half of a float32
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return data.view({"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def _place(name: str) -> Place:
    found = _NAME.fullmatch(name)
    if found is None:
        raise UserError(
            f"{_FILE} has {name[:200]!r}, which is no LoRA tensor of a module that is trained "
            f"here: {', '.join(ATTENTION + MLP)} of each layer, and lm_head; train the adapter on "
            "these alone"
        )
    layer, attention, mlp, part = found.groups()
    return attention or mlp or UNEMBED, None if layer is None else int(layer), part


def _check_entry(name: str, entry: _TensorEntry, size: int) -> None:
    if entry.dtype not in _ITEM_BYTES:
        raise UserError(
            f"{name} of {_FILE} is {entry.dtype[:20]}; float32, bfloat16 and float16 can be read: "
            "save the adapter as one of them"
        )
    if len(entry.shape) != 2:
        raise UserError(
            f"{name} of {_FILE} is {list(entry.shape)}; a LoRA tensor of these modules has 2 "
            "dimensions: save the adapter with save_pretrained"
        )
    rows, columns = entry.shape
    start, end = entry.data_offsets
    if not (0 < rows <= _LARGEST_SIZE and 0 < columns <= _LARGEST_SIZE and 0 <= start <= end):
        raise _no_safetensors(f"{name} is {[rows, columns]} at bytes {start} to {end}")
    if end - start != rows * columns * _ITEM_BYTES[entry.dtype]:
        raise _no_safetensors(f"{name} is {[rows, columns]} and has {end - start} bytes")
    if end > size:
        raise _no_safetensors(f"{name} ends at byte {end}, of {size} that there are: it was cut")


def _check_layout(entries: dict[str, _TensorEntry], size: int) -> None:
    """Raise ``UserError`` unless the tensors lie one behind the other and fill the file.

    Otherwise a small file could have any number of tensors that share their bytes.
    """
    expected = 0
    for name, entry in sorted(entries.items(), key=lambda each: each[1].data_offsets):
        start, end = entry.data_offsets
        if start != expected or end < start:
            raise _no_safetensors(
                f"{name} is at bytes {start} to {end}, and the next tensor should begin at byte "
                f"{expected}"
            )
        expected = end
    if expected != size:
        raise _no_safetensors(f"its tensors end at byte {expected}, of {size} that there are")


def _check_copy(name: str, entry: _TensorEntry, info: BaseModelInfo) -> None:
    inputs, outputs = dict(info.target_shapes)[UNEMBED]
    if entry.shape != (outputs, inputs):
        raise UserError(
            f"{name} of {_FILE} is {list(entry.shape)[:8]}; {info.name!r} has {[outputs, inputs]}: "
            "its vocabulary was changed, or it is of another base model; name that one"
        )


def _check_rank(rank: int, info: BaseModelInfo) -> None:
    if rank > info.max_rank:
        raise UserError(
            f"adapter_config.json has r = {rank}; this server takes 1 to {info.max_rank} for "
            f"{info.name!r}; train it with less, or ask the operator for a larger max_rank"
        )


def _check_places(places: Places, rank: int, info: BaseModelInfo) -> None:
    """Raise ``UserError`` unless each target in the file has tensors for exactly the base model's
    layers."""
    targets = {target for target, _, _ in places}
    if not targets:
        raise UserError(f"{_FILE} has no LoRA tensors; save the adapter with save_pretrained")
    for target, shape in info.target_shapes:
        if target in targets:
            _check_target(target, shape, places, rank, info.name)
    layers = dict(info.target_shapes)[ATTENTION[0]][0]
    for (_, layer, _), (name, _) in places.items():
        if layer is not None and layer >= layers:
            raise UserError(
                f"{_FILE} has {name}; {info.name!r} has {layers} layers: the adapter was trained "
                "on another base model; name that one"
            )


def _check_target(
    target: str, shape: tuple[int, ...], places: Places, rank: int, base_model: str
) -> None:
    """Raise ``UserError`` unless there is an A and a B of the right shape for each layer."""
    *_, inputs, outputs = shape
    layers: list[int | None] = [None] if target == UNEMBED else [*range(shape[0])]
    parts = {"A": (rank, inputs), "B": (outputs, rank)}
    for layer, part in product(layers, parts):
        name, entry = places.get((target, layer, part), (None, None))
        where = target if layer is None else f"{target} of layer {layer}"
        if name is None or entry is None:
            raise UserError(
                f"{_FILE} has no lora_{part} for {where}, and {base_model!r} has {len(layers)} "
                "layers; the adapter must have both parts in every layer, or was trained on "
                "another base model: name that one"
            )
        if entry.shape != parts[part]:
            raise UserError(
                f"{name} of {_FILE} is {list(entry.shape)[:8]}; with rank {rank} {base_model!r} "
                f"has {list(parts[part])} there: r is not the rank it has, or it was trained on "
                "another base model; name that one"
            )


def _no_safetensors(reason: str) -> UserError:
    return UserError(
        f"{_FILE} is no whole safetensors file: {reason}; save the adapter again with "
        "safe_serialization=True, and send all of it"
    )
