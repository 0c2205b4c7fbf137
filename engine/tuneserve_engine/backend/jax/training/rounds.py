"""A round: the micro-batches of a batch that run at once, one on each device."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tuneserve_engine.backend.base import FloatArray, IntArray, MicroBatch
from tuneserve_engine.backend.jax.mesh import of_all
from tuneserve_engine.backend.jax.specs import spec
from tuneserve_engine.backend.jax.training.programs import (
    DeviceMicroBatch,
    ScoredMicroBatch,
    TrainedMicroBatch,
)
from tuneserve_engine.core.shapes import StaticShapes


def rounds_of(micro_batches: Sequence[MicroBatch], count: int) -> Iterator[list[MicroBatch]]:
    """Yield up to ``count`` micro-batches at a time, in order.

    The micro-batches of a round have the same number of targets per token, and the parts of a
    divided datum are a round. Each micro-batch is made only when it is due.
    """
    due: list[MicroBatch] = []
    for micro_batch in micro_batches:
        if due and not _may_join(micro_batch, due[0]):
            yield due
            due = []
        due.append(micro_batch)
        if len(due) == count:
            yield due
            due = []
    if due:
        yield due


def _may_join(micro_batch: MicroBatch, first: MicroBatch) -> bool:
    """Return whether the micro-batch may be in the round that ``first`` began."""
    if micro_batch.targets.shape != first.targets.shape or micro_batch.part == 0:
        return False
    return (micro_batch.part is None) == (first.part is None)


def scores_of_all(program: Callable[..., Any], devices: int) -> Callable[..., Any]:
    """Return a program of one device that gives every device the scores of all of the round."""
    if devices == 1:
        return program

    def run(*args: Any) -> Any:
        result = program(*args)
        if isinstance(result, TrainedMicroBatch):
            return result._replace(out=of_all(result.out))
        return of_all(result)

    return run


def round_specs(static_shapes: StaticShapes, targets: int, devices: int) -> Any:
    """Return specs of a round's arrays, to compile with."""
    n, blocks = (
        static_shapes.micro_batch_tokens,
        static_shapes.micro_batch_tokens // static_shapes.block,
    )

    def ints(*shape: int) -> IntArray:
        return np.zeros(shape, np.int32)

    def floats(*shape: int) -> FloatArray:
        return np.zeros(shape, np.float32)

    fields: dict[str, Any] = {name: floats(n) for name in MicroBatch._fields if name != "part"}
    fields |= {name: ints(n) for name in ("tokens", "positions", "segment_ids", "loss_id")}
    fields |= {name: ints(blocks) for name in ("block_request", "first_visible_block")}
    fields |= {"targets": ints(n, targets), "weights": floats(n, targets), "blocks": 0}
    blank = joined([MicroBatch(**fields)], devices, static_shapes.block, 0)
    return jax.tree.map(lambda x: spec(x.shape, x.dtype), blank)


def joined(due: Sequence[MicroBatch], count: int, block: int, first_slot: int) -> Any:
    """Return a ``DeviceMicroBatch`` of ``count`` devices, on the host.

    Axis 0 has the micro-batch of one device after the other's. Devices without one get one without
    blocks.
    """
    given = [*due, *[_without_blocks(due[0])] * (count - len(due))]
    each = [DeviceMicroBatch.from_host(x, block, first_slot) for x in given]
    if count == 1:
        return each[0]
    return jax.tree.map(lambda *parts: np.concatenate([np.atleast_1d(x) for x in parts]), *each)


def _without_blocks(like: MicroBatch) -> MicroBatch:
    arrays = like._replace(part=None)._asdict()
    fields: dict[str, Any] = {name: np.zeros_like(x) for name, x in arrays.items() if x is not None}
    for name in ("segment_ids", "block_request"):
        fields[name] = np.full_like(fields[name], -1)
    return MicroBatch(**{**fields, "blocks": 0})


def parted(out: ScoredMicroBatch, count: int) -> list[ScoredMicroBatch]:
    """Return each device's results, from the host arrays of a round."""
    size = len(out.loss) // count
    return [
        ScoredMicroBatch(*(x[number * size : (number + 1) * size] for x in out))
        for number in range(count)
    ]
