"""The packing of requests into micro-batches, and the way back: pure NumPy.

A request alone decides which of its datums lie one after another, and the order of its blocks. Its
neighbours decide only the micro-batch of a block and its place there: no bit depends on either.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, overload

import numpy as np

from tuneserve_engine.backend.base import (
    LOSS_NAMES,
    FloatArray,
    MicroBatch,
    MicroBatchOutput,
    TrainBatch,
)
from tuneserve_engine.core import provenance
from tuneserve_engine.core.shapes import StaticShapes, multiple_from
from tuneserve_engine.worker.codecs.training import TrainingData


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
    of a micro-batch. Every micro-batch has ``length`` tokens. A token's datum has ``datum_tokens``,
    averaged over the tokens. ``paced_tokens`` are the tokens that the devices could have computed
    in the same time: all of them take as long as the one with the longest micro-batch.
    """

    batch: TrainBatch
    length: int
    members: tuple[int, ...]
    locations: tuple[tuple[DatumLocation, ...], ...]
    computed: tuple[float, ...]
    datum_tokens: float
    paced_tokens: int


class _Bin(NamedTuple):
    """Datums of one request that lie one after another, in blocks of their own."""

    member: int
    datum_ids: tuple[int, ...]
    targets: int
    tokens: int  # of its blocks


class _Size(NamedTuple):
    """The choices that decide the sizes of micro-batches, as ``pack`` takes them."""

    static_shapes: StaticShapes
    halvings: int
    tokens_in_slice: Callable[[bool, float], int | None]
    at_once: int


def _no_limit(forward_only: bool, datum_tokens: float) -> None:
    return None


def pack(
    requests: Sequence[PackingRequest],
    static_shapes: StaticShapes,
    halvings: int = 0,
    tokens_in_slice: Callable[[bool, float], int | None] = _no_limit,
    at_once: int = 1,
) -> list[PackedBatch]:
    """Return the batches that run these requests, each of one rank bucket and one direction.

    Batches are in the order in which their first requests came, and so are the requests of each.
    ``halvings`` is how many times the micro-batch length is halved, down to the longest bin, for a
    device without the memory for more: the bits are the same, in a shape that has to be compiled.

    ``at_once`` is the number of micro-batches that the backend runs at once. ``tokens_in_slice``
    returns about how many tokens these take, given whether their batch is forward only, and its
    ``datum_tokens``; the number is rounded up to whole chunks of each. A longer bin is alone in its
    micro-batch. The rest of the micro-batch stays unused, which costs nothing.
    """
    size = _Size(static_shapes, halvings, tokens_in_slice, at_once)
    groups: dict[tuple[int, bool], list[list[int]]] = {}
    for index, request in enumerate(requests):
        rank_bucket = static_shapes.rank_bucket(request.rank)
        batches = groups.setdefault((rank_bucket, request.data.forward_only), [[]])
        if len(batches[-1]) == static_shapes.slots(rank_bucket):
            batches.append([])
        batches[-1].append(index)
    return [
        _pack_batch(requests, tuple(members), size)
        for batches in groups.values()
        for members in batches
    ]


def _pack_batch(
    requests: Sequence[PackingRequest],
    members: tuple[int, ...],
    size: _Size,
) -> PackedBatch:
    static_shapes = size.static_shapes
    data = [requests[index].data for index in members]
    bins = [bin_ for i, each in enumerate(data) for bin_ in _bins_of(i, each, static_shapes)]
    longest = max(bin_.tokens for bin_ in bins)
    capacity = multiple_from(
        max(static_shapes.micro_batch_tokens >> size.halvings, longest), static_shapes.chunk
    )
    lengths = [len(datum.tokens) for each in data for datum in each.data]
    datum_tokens = sum(length**2 for length in lengths) / max(sum(lengths), 1)
    slice_tokens = size.tokens_in_slice(data[0].forward_only, datum_tokens)
    room = capacity
    if slice_tokens is not None:
        # Whole chunks: a part of a chunk costs the device as much as all of it.
        each = -(-slice_tokens // size.at_once)
        room = min(multiple_from(each, static_shapes.chunk), capacity)
    has_gradients = not data[0].forward_only
    layout = _micro_batches_of(bins, room, has_gradients=has_gradients)
    if size.at_once > 1:
        spread = partial(_micro_batches_of, bins, has_gradients=has_gradients)
        layout = _spread(layout, spread, static_shapes.chunk, size.at_once)

    locations = [[DatumLocation(-1, -1)] * len(each.data) for each in data]
    computed = [0.0] * len(members)
    for number, contents in enumerate(layout):
        used = sum(bin_.tokens for bin_ in contents)
        start = 0
        for bin_ in contents:
            computed[bin_.member] += bin_.tokens * multiple_from(used, static_shapes.chunk) / used
            first = start
            for i in bin_.datum_ids:
                locations[bin_.member][i] = DatumLocation(number, first)
                first += len(data[bin_.member].data[i].tokens)
            start += bin_.tokens

    micro_batches = _LazyMicroBatches(layout, capacity, static_shapes.block, data, locations)
    adapter_ids = tuple(requests[index].adapter_id for index in members)
    return PackedBatch(
        TrainBatch(adapter_ids, data[0].forward_only, micro_batches),
        capacity,
        members,
        tuple(tuple(of_request) for of_request in locations),
        tuple(computed),
        datum_tokens,
        _paced_tokens(layout, static_shapes.chunk, size.at_once),
    )


def _paced_tokens(layout: Sequence[Sequence[_Bin]], chunk: int, at_once: int) -> int:
    tokens = [multiple_from(sum(bin_.tokens for bin_ in contents), chunk) for contents in layout]
    rounds = (tokens[first : first + at_once] for first in range(0, len(tokens), at_once))
    return at_once * sum(max(each) for each in rounds)


def _spread(
    layout: list[list[_Bin]],
    spread: Callable[[int], list[list[_Bin]]],
    chunk: int,
    at_once: int,
) -> list[list[_Bin]]:
    """Return ``spread(room)`` with the least room that needs no more rounds than ``layout``."""

    def rounds(micro_batches: Sequence[Sequence[_Bin]]) -> int:
        counts = Counter(contents[0].targets for contents in micro_batches)
        return sum(-(-count // at_once) for count in counts.values())

    longest = max(sum(bin_.tokens for bin_ in contents) for contents in layout)
    most = rounds(layout)
    smaller = map(spread, range(chunk, longest, chunk))
    return next((each for each in smaller if rounds(each) <= most), layout)


def _micro_batches_of(bins: Sequence[_Bin], room: int, *, has_gradients: bool) -> list[list[_Bin]]:
    """Return the bins of each micro-batch.

    The bins of a request keep their order. A micro-batch without room for the next bin is closed; a
    bin longer than ``room`` is alone in its own. With gradients, a micro-batch has only one bin of
    the requests with several: their gradients are sums of their bins' gradients, and a slot takes
    one.
    """
    counts = Counter(bin_.member for bin_ in bins)
    layout: list[list[_Bin]] = []
    for targets in sorted({bin_.targets for bin_ in bins}):
        free = 0
        has_part = False  # whether the micro-batch has a bin of a request with several
        for bin_ in bins:
            if bin_.targets != targets:
                continue
            is_part = has_gradients and counts[bin_.member] > 1
            if bin_.tokens > free or (is_part and has_part):
                layout.append([])
                free, has_part = room, False
            layout[-1].append(bin_)
            free -= bin_.tokens
            has_part |= is_part
    return layout


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
        groups: list[list[int]] = []
        sums: list[int] = []
        for i in sorted(datum_ids, key=lambda i: -len(data.data[i].tokens)):
            length = len(data.data[i].tokens)
            room = static_shapes.bin_tokens - length
            at = next((at for at, tokens in enumerate(sums) if tokens <= room), len(groups))
            if at == len(groups):
                groups.append([])
                sums.append(0)
            groups[at].append(i)
            sums[at] += length
        for group, tokens in zip(groups, sums, strict=True):
            padded = multiple_from(tokens, static_shapes.block)
            bins.append(_Bin(member, tuple(group), targets, padded))
    return bins


@dataclass(frozen=True, eq=False)
class _LazyMicroBatches(Sequence[MicroBatch]):
    """The micro-batches of a layout of bins, each made on access.

    In short slices, the micro-batches of a long request take many times the memory of their
    content.
    """

    layout: Sequence[Sequence[_Bin]]
    capacity: int
    block: int
    data: Sequence[TrainingData]
    locations: Sequence[Sequence[DatumLocation]]

    def __len__(self) -> int:
        return len(self.layout)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | Sequence[MicroBatch]:
        if isinstance(index, slice):
            return replace(self, layout=self.layout[index])
        contents, n, block = self.layout[index], self.capacity, self.block
        shape = n, contents[0].targets
        micro_batch = MicroBatch(
            tokens=np.zeros(n, np.int32),
            targets=np.zeros(shape, np.int32),
            positions=np.zeros(n, np.int32),
            segment_ids=np.full(n, -1, np.int32),
            weights=np.zeros(shape, np.float32),
            old_logprobs=np.zeros(n, np.float32),
            advantages=np.zeros(n, np.float32),
            clip_low=np.zeros(n, np.float32),
            clip_high=np.zeros(n, np.float32),
            sequence_mask=np.zeros(n, np.float32),
            beta=np.zeros(n, np.float32),
            loss_id=np.zeros(n, np.int32),
            block_request=np.full(n // block, -1, np.int32),
            first_visible_block=np.zeros(n // block, np.int32),
            blocks=sum(bin_.tokens for bin_ in contents) // block,
        )
        number = at = 0
        for bin_ in contents:
            after = at + bin_.tokens // block
            micro_batch.block_request[at:after] = bin_.member
            at = after
            request = self.data[bin_.member]
            for i in bin_.datum_ids:
                datum, first = request.data[i], self.locations[bin_.member][i].first
                length, k = datum.targets.shape
                part = slice(first, first + length)
                micro_batch.tokens[part] = datum.tokens
                micro_batch.targets[part, :k] = datum.targets
                micro_batch.positions[part] = np.arange(length, dtype=np.int32)
                micro_batch.segment_ids[part] = number
                micro_batch.weights[part, :k] = datum.weights
                micro_batch.loss_id[part] = LOSS_NAMES.index(request.loss)
                for name, values in (*request.config.items(), *datum.per_token.items()):
                    getattr(micro_batch, _COLUMNS[name])[part] = values
                number += 1
        # A block's first token belongs to a datum, never to padding, and no datum in it began
        # earlier.
        starts = np.arange(0, n, block, dtype=np.int32)
        micro_batch.first_visible_block[:] = (starts - micro_batch.positions[::block]) // block
        return micro_batch


_COLUMNS = {
    "logprobs": "old_logprobs",
    "advantages": "advantages",
    "clip_low_threshold": "clip_low",
    "clip_high_threshold": "clip_high",
    "sequence_ratio_mask": "sequence_mask",
    provenance.MASK: "sequence_mask",
    "beta": "beta",
    "kl_coeff": "beta",
}
"""The arrays of a micro-batch that hold the inputs and the config of the policy losses."""


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
