"""The packing of requests into streams of tokens, and the way back: pure NumPy.

A request alone decides which of its datums lie one after another, and the order of its blocks. Its
neighbours decide only the stream of a block and its place there: no bit depends on either.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, overload

import numpy as np

from tuneserve_engine.backend.base import (
    LOSS_NAMES,
    FloatArray,
    IntArray,
    Lattice,
    MicroBatch,
    MicroBatchOutput,
    TrainBatch,
)
from tuneserve_engine.core import provenance
from tuneserve_engine.core.shapes import multiple_from
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData


class DatumLocation(NamedTuple):
    """The place of a datum's tokens: one after another, from token ``first`` of the stream on."""

    batch: int
    first: int


@dataclass(frozen=True)
class PackingRequest:
    """One decoded request and the adapter it runs under."""

    adapter_id: str
    rank: int
    data: TrainingData


@dataclass(frozen=True)
class PackedBatch:
    """One batch to run.

    Its request i is the one at ``members[i]`` of the packed requests, and ``places[i]`` has the
    places of that request's datums. ``computed[i]`` is the number of tokens computed for the
    request: its own blocks, padding included, and its share of the tokens that fill the last chunk
    of a micro-batch.
    """

    unit: TrainBatch
    members: tuple[int, ...]
    places: tuple[tuple[DatumLocation, ...], ...]
    computed: tuple[float, ...]


class _Bin(NamedTuple):
    """Datums of one request that lie one after another, in blocks of their own."""

    member: int
    datum_ids: tuple[int, ...]
    targets: int
    tokens: int  # of its blocks


def _whole_stream(forward_only: bool) -> None:
    return None


def pack(
    requests: Sequence[PackingRequest],
    lattice: Lattice,
    halvings: int = 0,
    most: Callable[[bool], int | None] = _whole_stream,
) -> list[PackedBatch]:
    """Return the batches that run these requests, each of one rank class and one direction.

    Batches are in the order in which their first requests came, and so are the requests of each.
    ``halvings`` is how many times the stream length is halved, down to the longest piece, for a
    device without the memory for more: the bits are the same, in a shape that has to be compiled.

    ``most`` returns about how many tokens a micro-batch takes, given whether its batch is forward
    only; the number is rounded up to whole chunks. A longer piece is alone in its micro-batch. The
    rest of the stream stays unused, which costs nothing.
    """
    groups: dict[tuple[int, bool], list[list[int]]] = {}
    for index, request in enumerate(requests):
        rank_class = lattice.rank_class(request.rank)
        units = groups.setdefault((rank_class, request.data.forward_only), [[]])
        if len(units[-1]) == lattice.slots(rank_class):
            units.append([])
        units[-1].append(index)
    return [
        _packed(requests, tuple(members), lattice, halvings, most(forward_only))
        for (_, forward_only), units in groups.items()
        for members in units
    ]


def _packed(
    requests: Sequence[PackingRequest],
    members: tuple[int, ...],
    lattice: Lattice,
    halvings: int,
    most: int | None,
) -> PackedBatch:
    data = [requests[index].data for index in members]
    pieces = [piece for i, each in enumerate(data) for piece in _pieces(i, each, lattice)]
    longest = max(piece.tokens for piece in pieces)
    capacity = multiple_from(max(lattice.stream >> halvings, longest), lattice.chunk)
    # Whole chunks: a part of a chunk costs the device as much as all of it.
    room = capacity if most is None else min(multiple_from(most, lattice.chunk), capacity)
    streams = [
        stream
        for targets in sorted({piece.targets for piece in pieces})
        for stream in _streams((piece for piece in pieces if piece.targets == targets), room)
    ]
    places = _places(streams, data)
    unit = TrainBatch(
        adapter_ids=tuple(requests[index].adapter_id for index in members),
        forward_only=data[0].forward_only,
        batches=_Batches(
            partial(_batch, capacity=capacity, block=lattice.block, data=data, places=places),
            streams,
        ),
    )
    computed = _computed(streams, len(members), lattice)
    return PackedBatch(unit, members, tuple(tuple(of_request) for of_request in places), computed)


class _Batches(Sequence[MicroBatch]):
    """The micro-batches of streams, each made on access.

    In short slices, the micro-batches of a long request take many times the memory of their
    content.
    """

    def __init__(
        self, make: Callable[[Sequence[_Bin]], MicroBatch], streams: Sequence[Sequence[_Bin]]
    ) -> None:
        self._make = make
        self._streams = streams

    def __len__(self) -> int:
        return len(self._streams)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | Sequence[MicroBatch]:
        if isinstance(index, slice):
            return _Batches(self._make, self._streams[index])
        return self._make(self._streams[index])


def _pieces(member: int, data: TrainingData, lattice: Lattice) -> list[_Bin]:
    """Return a request's datums, grouped by padded K and packed into pieces.

    The longest datum goes first, each into the first piece that has room. The result depends on the
    request alone.
    """
    classes: dict[int, list[int]] = {}
    for i, datum in enumerate(data.data):
        classes.setdefault(lattice.target_class(datum.targets.shape[1]), []).append(i)
    pieces = []
    for targets, datum_ids in classes.items():
        lengths = [len(data.data[i].tokens) for i in datum_ids]
        for group, tokens in _first_fit(lengths, lattice.piece):
            padded = multiple_from(tokens, lattice.block)
            pieces.append(_Bin(member, tuple(datum_ids[i] for i in group), targets, padded))
    return pieces


def _first_fit(lengths: Sequence[int], limit: int) -> list[tuple[list[int], int]]:
    """Return groups of indices, and the sum of each: at most ``limit``, or one member's length."""
    groups: list[list[int]] = []
    sums: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        most = limit - lengths[i]
        at = next((at for at, tokens in enumerate(sums) if tokens <= most), len(groups))
        if at == len(groups):
            groups.append([])
            sums.append(0)
        groups[at].append(i)
        sums[at] += lengths[i]
    return list(zip(groups, sums, strict=True))


def _streams(pieces: Iterable[_Bin], room: int) -> list[list[_Bin]]:
    """Split the pieces into streams, in their order, so that a request's blocks keep their order.

    A stream without room for the next piece is closed. A piece longer than ``room`` is alone.
    """
    streams: list[list[_Bin]] = []
    free = 0
    for piece in pieces:
        if piece.tokens > free:
            streams.append([])
            free = room
        streams[-1].append(piece)
        free -= piece.tokens
    return streams


def _places(
    streams: Sequence[Sequence[_Bin]], data: Sequence[TrainingData]
) -> list[list[DatumLocation]]:
    places = [[DatumLocation(-1, -1)] * len(each.data) for each in data]
    for number, stream in enumerate(streams):
        start = 0
        for piece in stream:
            first = start
            for i in piece.datum_ids:
                places[piece.member][i] = DatumLocation(number, first)
                first += len(data[piece.member].data[i].tokens)
            start += piece.tokens
    return places


def _batch(
    stream: Sequence[_Bin],
    capacity: int,
    block: int,
    data: Sequence[TrainingData],
    places: Sequence[Sequence[DatumLocation]],
) -> MicroBatch:
    blocks = sum(piece.tokens for piece in stream) // block
    batch = _empty(capacity, stream[0].targets, block, blocks)
    number = 0
    at = 0
    for piece in stream:
        after = at + piece.tokens // block
        batch.block_request[at:after] = piece.member
        at = after
        for i in piece.datum_ids:
            request = data[piece.member]
            _fill(batch, places[piece.member][i].first, number, request.data[i], request)
            number += 1
    # A block's first token belongs to a datum, never to padding, and no datum in it began earlier.
    starts = np.arange(0, capacity, block, dtype=np.int32)
    batch.block_start[:] = (starts - batch.positions[::block]) // block
    return batch


def _empty(n: int, k: int, block: int, blocks: int) -> MicroBatch:
    def whole() -> IntArray:
        return np.zeros(n, np.int32)

    def real() -> FloatArray:
        return np.zeros(n, np.float32)

    return MicroBatch(
        tokens=whole(),
        targets=np.zeros((n, k), np.int32),
        positions=whole(),
        datum=np.full(n, -1, np.int32),
        weights=np.zeros((n, k), np.float32),
        old_logprobs=real(),
        advantages=real(),
        clip_low=real(),
        clip_high=real(),
        sequence_mask=real(),
        beta=real(),
        loss_id=whole(),
        block_request=np.full(n // block, -1, np.int32),
        block_start=np.zeros(n // block, np.int32),
        blocks=blocks,
    )


def _fill(
    batch: MicroBatch, first: int, number: int, datum: DecodedDatum, data: TrainingData
) -> None:
    n, k = datum.targets.shape
    part = slice(first, first + n)
    batch.tokens[part] = datum.tokens
    batch.targets[part, :k] = datum.targets
    batch.positions[part] = np.arange(n, dtype=np.int32)
    batch.datum[part] = number
    batch.weights[part, :k] = datum.weights
    batch.loss_id[part] = LOSS_NAMES.index(data.loss)
    columns = {
        "logprobs": batch.old_logprobs,
        "advantages": batch.advantages,
        "clip_low_threshold": batch.clip_low,
        "clip_high_threshold": batch.clip_high,
        "sequence_ratio_mask": batch.sequence_mask,
        provenance.MASK: batch.sequence_mask,
        "beta": batch.beta,
        "kl_coeff": batch.beta,
    }
    given: dict[str, float | FloatArray] = {**data.config, **datum.per_token}
    for name, values in given.items():
        columns[name][part] = values


def _computed(
    streams: Sequence[Sequence[_Bin]], members: int, lattice: Lattice
) -> tuple[float, ...]:
    computed = [0.0] * members
    for stream in streams:
        tokens = sum(piece.tokens for piece in stream)
        for piece in stream:
            computed[piece.member] += piece.tokens * multiple_from(tokens, lattice.chunk) / tokens
    return tuple(computed)


def unpack(
    packed: PackedBatch, outputs: Sequence[MicroBatchOutput], member: int, data: TrainingData
) -> tuple[list[FloatArray], float]:
    """Return the logprobs of the batch's request ``member``, and its loss sum.

    There is one array of logprobs per datum, shaped like its targets. The loss is summed in double
    precision, token by token in the order of the datums.
    """
    logprobs = []
    loss = 0.0
    for datum, (batch, first) in zip(data.data, packed.places[member], strict=True):
        n, k = datum.targets.shape
        part = slice(first, first + n)
        values = outputs[batch].logprobs[part, :k]
        logprobs.append(values[:, 0] if datum.flat else values)
        loss += float(outputs[batch].loss[part].sum(dtype=np.float64))
    return logprobs, loss
