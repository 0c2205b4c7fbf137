"""The packing of requests into micro-batches, and the way back: pure NumPy.

A request alone decides which of its datums lie one after another, and the order of its blocks. Its
neighbours decide only the micro-batch of a block and its place there: no bit depends on either.
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
    MicroBatch,
    MicroBatchOutput,
    TrainBatch,
)
from tuneserve_engine.core import provenance
from tuneserve_engine.core.shapes import StaticShapes, multiple_from
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData


class DatumLocation(NamedTuple):
    """The place of a datum: its tokens lie from token ``first`` of the micro-batch on."""

    micro_batch: int
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

    Its request i is the one at ``members[i]`` of the packed requests, and ``locations[i]`` has the
    places of that request's datums. ``computed[i]`` is the number of tokens computed for the
    request: its own blocks, padding included, and its share of the tokens that fill the last chunk
    of a micro-batch.
    """

    batch: TrainBatch
    members: tuple[int, ...]
    locations: tuple[tuple[DatumLocation, ...], ...]
    computed: tuple[float, ...]


class _Bin(NamedTuple):
    """Datums of one request that lie one after another, in blocks of their own."""

    member: int
    datum_ids: tuple[int, ...]
    targets: int
    tokens: int  # of its blocks


def _no_limit(forward_only: bool) -> None:
    return None


def pack(
    requests: Sequence[PackingRequest],
    static_shapes: StaticShapes,
    halvings: int = 0,
    tokens_in_slice: Callable[[bool], int | None] = _no_limit,
) -> list[PackedBatch]:
    """Return the batches that run these requests, each of one rank bucket and one direction.

    Batches are in the order in which their first requests came, and so are the requests of each.
    ``halvings`` is how many times the micro-batch length is halved, down to the longest bin, for a
    device without the memory for more: the bits are the same, in a shape that has to be compiled.

    ``tokens_in_slice`` returns about how many tokens a micro-batch takes, given whether its batch
    is forward only; the number is rounded up to whole chunks. A longer bin is alone in its
    micro-batch. The rest of the micro-batch stays unused, which costs nothing.
    """
    groups: dict[tuple[int, bool], list[list[int]]] = {}
    for index, request in enumerate(requests):
        rank_bucket = static_shapes.rank_bucket(request.rank)
        batches = groups.setdefault((rank_bucket, request.data.forward_only), [[]])
        if len(batches[-1]) == static_shapes.slots(rank_bucket):
            batches.append([])
        batches[-1].append(index)
    return [
        _pack_batch(
            requests, tuple(members), static_shapes, halvings, tokens_in_slice(forward_only)
        )
        for (_, forward_only), batches in groups.items()
        for members in batches
    ]


def _pack_batch(
    requests: Sequence[PackingRequest],
    members: tuple[int, ...],
    static_shapes: StaticShapes,
    halvings: int,
    tokens_in_slice: int | None,
) -> PackedBatch:
    data = [requests[index].data for index in members]
    bins = [bin_ for i, each in enumerate(data) for bin_ in _bins_of(i, each, static_shapes)]
    longest = max(bin_.tokens for bin_ in bins)
    capacity = multiple_from(
        max(static_shapes.micro_batch_tokens >> halvings, longest), static_shapes.chunk
    )
    # Whole chunks: a part of a chunk costs the device as much as all of it.
    room = (
        capacity
        if tokens_in_slice is None
        else min(multiple_from(tokens_in_slice, static_shapes.chunk), capacity)
    )
    layout = [
        contents
        for targets in sorted({bin_.targets for bin_ in bins})
        for contents in _fill_micro_batches(
            (bin_ for bin_ in bins if bin_.targets == targets), room
        )
    ]
    locations = _datum_locations(layout, data)
    batch = TrainBatch(
        adapter_ids=tuple(requests[index].adapter_id for index in members),
        forward_only=data[0].forward_only,
        micro_batches=_LazyMicroBatches(
            partial(
                _micro_batch,
                capacity=capacity,
                block=static_shapes.block,
                data=data,
                locations=locations,
            ),
            layout,
        ),
    )
    computed = _computed(layout, len(members), static_shapes)
    return PackedBatch(
        batch, members, tuple(tuple(of_request) for of_request in locations), computed
    )


class _LazyMicroBatches(Sequence[MicroBatch]):
    """The micro-batches of a layout of bins, each made on access.

    In short slices, the micro-batches of a long request take many times the memory of their
    content.
    """

    def __init__(
        self, make: Callable[[Sequence[_Bin]], MicroBatch], layout: Sequence[Sequence[_Bin]]
    ) -> None:
        self._make = make
        self._layout = layout

    def __len__(self) -> int:
        return len(self._layout)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | Sequence[MicroBatch]:
        if isinstance(index, slice):
            return _LazyMicroBatches(self._make, self._layout[index])
        return self._make(self._layout[index])


def _bins_of(member: int, data: TrainingData, static_shapes: StaticShapes) -> list[_Bin]:
    """Return a request's datums, grouped by padded K and packed into bins.

    The longest datum goes first, each into the first bin that has room. The result depends on the
    request alone.
    """
    buckets: dict[int, list[int]] = {}
    for i, datum in enumerate(data.data):
        buckets.setdefault(static_shapes.target_bucket(datum.targets.shape[1]), []).append(i)
    bins = []
    for targets, datum_ids in buckets.items():
        lengths = [len(data.data[i].tokens) for i in datum_ids]
        for group, tokens in _first_fit(lengths, static_shapes.bin_tokens):
            padded = multiple_from(tokens, static_shapes.block)
            bins.append(_Bin(member, tuple(datum_ids[i] for i in group), targets, padded))
    return bins


def _first_fit(lengths: Sequence[int], limit: int) -> list[tuple[list[int], int]]:
    """Return groups of indices, and the sum of each: at most ``limit``, or one member's length."""
    groups: list[list[int]] = []
    sums: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = limit - lengths[i]
        at = next((at for at, tokens in enumerate(sums) if tokens <= room), len(groups))
        if at == len(groups):
            groups.append([])
            sums.append(0)
        groups[at].append(i)
        sums[at] += lengths[i]
    return list(zip(groups, sums, strict=True))


def _fill_micro_batches(bins: Iterable[_Bin], room: int) -> list[list[_Bin]]:
    """Split the bins into micro-batches, in order, so that a request's blocks keep their order.

    A micro-batch without room for the next bin is closed. A bin longer than ``room`` is alone.
    """
    layout: list[list[_Bin]] = []
    free = 0
    for bin_ in bins:
        if bin_.tokens > free:
            layout.append([])
            free = room
        layout[-1].append(bin_)
        free -= bin_.tokens
    return layout


def _datum_locations(
    layout: Sequence[Sequence[_Bin]], data: Sequence[TrainingData]
) -> list[list[DatumLocation]]:
    locations = [[DatumLocation(-1, -1)] * len(each.data) for each in data]
    for number, contents in enumerate(layout):
        start = 0
        for bin_ in contents:
            first = start
            for i in bin_.datum_ids:
                locations[bin_.member][i] = DatumLocation(number, first)
                first += len(data[bin_.member].data[i].tokens)
            start += bin_.tokens
    return locations


def _micro_batch(
    contents: Sequence[_Bin],
    capacity: int,
    block: int,
    data: Sequence[TrainingData],
    locations: Sequence[Sequence[DatumLocation]],
) -> MicroBatch:
    blocks = sum(bin_.tokens for bin_ in contents) // block
    micro_batch = _empty(capacity, contents[0].targets, block, blocks)
    number = 0
    at = 0
    for bin_ in contents:
        after = at + bin_.tokens // block
        micro_batch.block_request[at:after] = bin_.member
        at = after
        for i in bin_.datum_ids:
            request = data[bin_.member]
            _fill(micro_batch, locations[bin_.member][i].first, number, request.data[i], request)
            number += 1
    # A block's first token belongs to a datum, never to padding, and no datum in it began earlier.
    starts = np.arange(0, capacity, block, dtype=np.int32)
    micro_batch.first_visible_block[:] = (starts - micro_batch.positions[::block]) // block
    return micro_batch


def _empty(n: int, k: int, block: int, blocks: int) -> MicroBatch:
    def whole() -> IntArray:
        return np.zeros(n, np.int32)

    def real() -> FloatArray:
        return np.zeros(n, np.float32)

    return MicroBatch(
        tokens=whole(),
        targets=np.zeros((n, k), np.int32),
        positions=whole(),
        segment_ids=np.full(n, -1, np.int32),
        weights=np.zeros((n, k), np.float32),
        old_logprobs=real(),
        advantages=real(),
        clip_low=real(),
        clip_high=real(),
        sequence_mask=real(),
        beta=real(),
        loss_id=whole(),
        block_request=np.full(n // block, -1, np.int32),
        first_visible_block=np.zeros(n // block, np.int32),
        blocks=blocks,
    )


def _fill(
    micro_batch: MicroBatch, first: int, number: int, datum: DecodedDatum, data: TrainingData
) -> None:
    n, k = datum.targets.shape
    part = slice(first, first + n)
    micro_batch.tokens[part] = datum.tokens
    micro_batch.targets[part, :k] = datum.targets
    micro_batch.positions[part] = np.arange(n, dtype=np.int32)
    micro_batch.segment_ids[part] = number
    micro_batch.weights[part, :k] = datum.weights
    micro_batch.loss_id[part] = LOSS_NAMES.index(data.loss)
    columns = {
        "logprobs": micro_batch.old_logprobs,
        "advantages": micro_batch.advantages,
        "clip_low_threshold": micro_batch.clip_low,
        "clip_high_threshold": micro_batch.clip_high,
        "sequence_ratio_mask": micro_batch.sequence_mask,
        provenance.MASK: micro_batch.sequence_mask,
        "beta": micro_batch.beta,
        "kl_coeff": micro_batch.beta,
    }
    given: dict[str, float | FloatArray] = {**data.config, **datum.per_token}
    for name, values in given.items():
        columns[name][part] = values


def _computed(
    layout: Sequence[Sequence[_Bin]], members: int, static_shapes: StaticShapes
) -> tuple[float, ...]:
    computed = [0.0] * members
    for contents in layout:
        tokens = sum(bin_.tokens for bin_ in contents)
        for bin_ in contents:
            computed[bin_.member] += (
                bin_.tokens * multiple_from(tokens, static_shapes.chunk) / tokens
            )
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
    for datum, (micro_batch, first) in zip(data.data, packed.locations[member], strict=True):
        n, k = datum.targets.shape
        part = slice(first, first + n)
        values = outputs[micro_batch].logprobs[part, :k]
        logprobs.append(values[:, 0] if datum.flat else values)
        loss += float(outputs[micro_batch].loss[part].sum(dtype=np.float64))
    return logprobs, loss
