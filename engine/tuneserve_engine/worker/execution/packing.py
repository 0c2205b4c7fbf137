"""The packing of requests into micro-batches, and the way back: pure NumPy.

A request alone decides which of its datums lie one after another, and the order of its blocks. Its
neighbours decide only the micro-batch of a block and its place there: no bit depends on either.
"""

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
from tuneserve_engine.worker.execution.bins import (
    Bin,
    bins_of,
    micro_batches_of,
    paced_tokens,
    spread_out,
)


class DatumLocation(NamedTuple):
    """The place of a datum: its tokens lie from token ``first`` of the micro-batch on.

    A divided datum goes on in the micro-batches behind that one, after ``part`` tokens in each.
    """

    micro_batch: int
    first: int
    part: int | None = None


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
    bins = [bin_ for i, each in enumerate(data) for bin_ in bins_of(i, each, static_shapes)]
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
    layout = micro_batches_of(bins, room, has_gradients=has_gradients)
    if size.at_once > 1:
        spread = partial(micro_batches_of, bins, has_gradients=has_gradients)
        layout = spread_out(layout, spread, static_shapes.chunk, size.at_once)

    locations = [[DatumLocation(-1, -1)] * len(each.data) for each in data]
    computed = [0.0] * len(members)
    for number, contents in enumerate(layout):
        used = sum(bin_.tokens for bin_ in contents)
        start = 0
        for bin_ in contents:
            computed[bin_.member] += bin_.tokens * multiple_from(used, static_shapes.chunk) / used
            first = start
            for i in bin_.datum_ids:
                if not bin_.part:  # the first part of a divided datum has the place of all
                    part = None if bin_.part is None else bin_.tokens
                    locations[bin_.member][i] = DatumLocation(number, first, part)
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
        paced_tokens(layout, static_shapes.chunk, size.at_once),
    )


@dataclass(frozen=True, eq=False)
class _LazyMicroBatches(Sequence[MicroBatch]):
    """The micro-batches of a layout of bins, each made on access.

    In short slices, the micro-batches of a long request take many times the memory of their
    content.
    """

    layout: Sequence[Sequence[Bin]]
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
            part=contents[0].part,
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
                own = slice(0, length)
                if bin_.part is not None:
                    own = slice(bin_.skipped, min(bin_.skipped + bin_.tokens, length))
                part = slice(first, first + own.stop - own.start)
                micro_batch.tokens[part] = datum.tokens[own]
                micro_batch.targets[part, :k] = datum.targets[own]
                micro_batch.positions[part] = np.arange(own.start, own.stop, dtype=np.int32)
                micro_batch.segment_ids[part] = number
                micro_batch.weights[part, :k] = datum.weights[own]
                micro_batch.loss_id[part] = LOSS_NAMES.index(request.loss)
                for name, value in request.config.items():
                    getattr(micro_batch, _COLUMNS[name])[part] = value
                for name, values in datum.per_token.items():
                    getattr(micro_batch, _COLUMNS[name])[part] = values[own]
                number += 1
        # A block's first token belongs to a datum, never to padding, and no datum in it began
        # earlier.
        if micro_batch.part is None:  # else the datum began in the first block of its first part
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
    for datum, place in zip(data.data, packed.locations[member], strict=True):
        n, k = datum.targets.shape
        of_datum = _of_datum(outputs, place, n)
        values = of_datum.logprobs[:, :k]
        logprobs.append(values[:, 0] if datum.flat else values)
        loss += float(of_datum.loss.sum(dtype=np.float64))
    return logprobs, loss


def _of_datum(
    outputs: Sequence[MicroBatchOutput], place: DatumLocation, tokens: int
) -> MicroBatchOutput:
    """Return the outputs of a datum's tokens."""
    micro_batch, first, part = place
    if part is None:
        return MicroBatchOutput(*(x[first : first + tokens] for x in outputs[micro_batch]))
    mine = outputs[micro_batch : micro_batch - (-tokens // part)]
    return MicroBatchOutput(
        *(np.concatenate([x[:part] for x in field])[:tokens] for field in zip(*mine, strict=True))
    )
