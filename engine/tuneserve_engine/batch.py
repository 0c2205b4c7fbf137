"""Requests to micro-batches and back: pure NumPy.

A datum goes into the bucket that its own length chose, in a batch whose number of rows its own
request chose. Neighbours decide neither, so a request's numbers are the same in any company.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tuneserve_engine.backend.base import (
    LOSS_NAMES,
    FloatArray,
    Lattice,
    TrainBatch,
    TrainOutput,
    TrainRequest,
    TrainUnit,
)
from tuneserve_engine.training_wire import Datum, TrainingData


class Shape(NamedTuple):
    """What rows must share to share a micro-batch; chosen by the row's request alone."""

    rows: int
    bucket: int
    targets: int
    rank_class: int
    forward_only: bool


class Place(NamedTuple):
    """Where a datum's row went."""

    batch: int
    row: int


@dataclass(frozen=True)
class PackRequest:
    """One decoded request and the adapter it runs under."""

    adapter_id: str
    rank: int
    data: TrainingData


@dataclass(frozen=True)
class Packed:
    """The unit to run, and the place of each request's datums in it."""

    unit: TrainUnit
    places: tuple[tuple[Place, ...], ...]


def pack(requests: Sequence[PackRequest], lattice: Lattice, halvings: int = 0) -> Packed:
    """Fills micro-batches with the requests' datums.

    Requests share a batch as long as it has room. Batches are ordered by shape, and a request's
    datums of one shape keep their order: its rows are summed in an order that it alone decides.
    Every micro-batch has its rows halved ``halvings`` times, down to one, for a device without the
    memory for more. That changes bits, so it is done to a request alone, and on record.
    """
    open_batches: dict[Shape, int] = {}
    members: list[tuple[Shape, list[tuple[int, Datum]]]] = []
    places: list[tuple[Place, ...]] = []
    for index, request in enumerate(requests):
        placed: dict[int, Place] = {}
        for shape, datum_ids in _shapes(request, lattice, halvings):
            for datum_id in datum_ids:
                at = open_batches.get(shape)
                if at is None or len(members[at][1]) == shape.rows:
                    at = open_batches[shape] = len(members)
                    members.append((shape, []))
                rows = members[at][1]
                placed[datum_id] = Place(at, len(rows))
                rows.append((index, request.data.data[datum_id]))
        places.append(tuple(placed[i] for i in range(len(request.data.data))))
    order = sorted(range(len(members)), key=lambda i: members[i][0])
    rank_of = {old: new for new, old in enumerate(order)}
    unit = TrainUnit(
        requests=tuple(TrainRequest(r.adapter_id, r.data.forward_only) for r in requests),
        batches=tuple(_batch(*members[i], requests) for i in order),
    )
    return Packed(
        unit, tuple(tuple(Place(rank_of[p.batch], p.row) for p in placed) for placed in places)
    )


def _shapes(
    request: PackRequest, lattice: Lattice, halvings: int
) -> Iterator[tuple[Shape, list[int]]]:
    """The request's datums by the shape they need, in order of first appearance."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, datum in enumerate(request.data.data):
        key = lattice.bucket(len(datum.tokens)), lattice.target_class(datum.targets.shape[1])
        groups.setdefault(key, []).append(i)
    for (bucket, targets), datum_ids in groups.items():
        rows = max(lattice.rows(bucket, len(datum_ids)) >> halvings, 1)
        rank_class = lattice.rank_class(request.rank)
        yield Shape(rows, bucket, targets, rank_class, request.data.forward_only), datum_ids


def _batch(
    shape: Shape, rows: Sequence[tuple[int, Datum]], requests: Sequence[PackRequest]
) -> TrainBatch:
    b, t, k = shape.rows, shape.bucket, shape.targets

    def per_token() -> FloatArray:
        return np.zeros((b, t), np.float32)

    batch = TrainBatch(
        tokens=np.zeros((b, t), np.int32),
        targets=np.zeros((b, t, k), np.int32),
        valid=per_token(),
        weights=np.zeros((b, t, k), np.float32),
        old_logprobs=per_token(),
        advantages=per_token(),
        clip_low=per_token(),
        clip_high=per_token(),
        sequence_mask=per_token(),
        beta=np.zeros(b, np.float32),
        loss_id=np.zeros(b, np.int32),
        row_request=np.full(b, -1, np.int32),
    )
    for row, (index, datum) in enumerate(rows):
        _fill_row(batch, row, datum, requests[index].data)
        batch.row_request[row] = index
    return batch


def _fill_row(batch: TrainBatch, row: int, datum: Datum, data: TrainingData) -> None:
    n, k = datum.targets.shape
    batch.tokens[row, :n] = datum.tokens
    batch.targets[row, :n, :k] = datum.targets
    batch.valid[row, :n] = 1
    batch.weights[row, :n, :k] = datum.weights
    batch.loss_id[row] = LOSS_NAMES.index(data.loss)
    batch.beta[row] = data.config.get("beta", 0.0)
    columns = {
        "logprobs": batch.old_logprobs,
        "advantages": batch.advantages,
        "clip_low_threshold": batch.clip_low,
        "clip_high_threshold": batch.clip_high,
        "sequence_ratio_mask": batch.sequence_mask,
    }
    for name, column in columns.items():
        column[row, :n] = datum.per_token.get(name, data.config.get(name, 0.0))


def unpack(
    packed: Packed, outputs: Sequence[TrainOutput], index: int, data: TrainingData
) -> tuple[list[FloatArray], float]:
    """Request ``index``'s logprobs per datum, shaped like its targets, and its loss sum."""
    logprobs = []
    loss = 0.0
    for datum, (batch, row) in zip(data.data, packed.places[index], strict=True):
        n, k = datum.targets.shape
        values = outputs[batch].logprobs[row, :n, :k]
        logprobs.append(values[:, 0] if datum.flat else values)
        loss += float(outputs[batch].loss[row])
    return logprobs, loss
