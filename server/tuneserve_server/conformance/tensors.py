"""Tensors of the protocol's messages, from and to plain lists."""

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tuneserve_client.wire.proto import wire_pb2 as wire

_WIDTHS = {wire.DTYPE_FLOAT32: 4, wire.DTYPE_BFLOAT16: 2}


def datum(tokens: Sequence[int], *, chunk: int | None = None, **inputs: wire.Tensor) -> wire.Datum:
    """Return a datum of the tokens, in chunks of so many tokens, with these loss inputs."""
    size = chunk or len(tokens)
    parts = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    return wire.Datum(
        model_input=[
            wire.Chunk(encoded_text=wire.EncodedTextChunk(tokens=struct.pack(f"<{len(p)}i", *p)))
            for p in parts
        ],
        loss_fn_inputs=inputs,
    )


def integers(values: Sequence[int], *shape: int) -> wire.Tensor:
    """Return an int64 tensor; its shape is that of the list unless given."""
    dense = struct.pack(f"<{len(values)}q", *values)
    return wire.Tensor(dense=dense, dtype=wire.DTYPE_INT64, shape=shape or [len(values)])


def floats(values: Sequence[float], *shape: int) -> wire.Tensor:
    """Return a float32 tensor; its shape is that of the list unless given."""
    dense = struct.pack(f"<{len(values)}f", *values)
    return wire.Tensor(dense=dense, dtype=wire.DTYPE_FLOAT32, shape=shape or [len(values)])


def sparse(values: Sequence[float], columns: Sequence[int], width: int) -> wire.Tensor:
    """Return a float32 tensor [N, width] with one value per row, at its column."""
    rows = range(len(values) + 1)
    return wire.Tensor(
        sparse_csr=wire.SparseCsr(
            values=struct.pack(f"<{len(values)}f", *values),
            crow_indices=struct.pack(f"<{len(rows)}q", *rows),
            col_indices=struct.pack(f"<{len(columns)}q", *columns),
        ),
        dtype=wire.DTYPE_FLOAT32,
        shape=[len(values), width],
    )


def floats_of(batched: wire.BatchedTensor) -> Iterator[list[float]]:
    """Yield the numbers of each datum of a batch, flat. Raises ``struct.error`` for odd sizes."""
    width = _WIDTHS.get(batched.dtype, 4)
    offsets = struct.unpack(f"<{len(batched.offsets) // 8}q", batched.offsets)
    for start, end in pairwise(offsets):
        yield list(_unpacked(batched.data[start:end], width))


def floats_in(data: bytes) -> list[float]:
    """Return the float32 numbers of packed bytes."""
    return list(_unpacked(data, 4))


def integers_in(data: bytes) -> list[int]:
    """Return the int32 numbers of packed bytes."""
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def _unpacked(data: bytes, width: int) -> tuple[float, ...]:
    if width == 4:
        return struct.unpack(f"<{len(data) // 4}f", data)
    halves = struct.unpack(f"<{len(data) // 2}H", data)  # the upper halves of float32
    return struct.unpack(
        f"<{len(halves)}f", struct.pack(f"<{len(halves)}I", *(h << 16 for h in halves))
    )
