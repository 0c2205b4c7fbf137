"""A running batch: its slots, its outputs so far, and which of its requests are finite."""

import jax
import numpy as np

from tuneserve_engine.backend.base import (
    LOSS_NAMES,
    FloatArray,
    MicroBatch,
    MicroBatchOutput,
    TrainBatch,
)
from tuneserve_engine.backend.jax.training.programs import (
    ScoredMicroBatch,
)
from tuneserve_engine.backend.jax.training.slots import BatchSlots

_CROSS_ENTROPY = LOSS_NAMES.index("cross_entropy")


class RunningBatch:
    """A running batch: its slots, its ``outputs`` so far, and which of its requests are finite.

    A request is finite if the losses and logprobs of all its tokens are.
    """

    def __init__(self, batch: TrainBatch, claimed: BatchSlots, requests: int) -> None:
        self.batch = batch
        self.claimed = claimed
        self.outputs: list[MicroBatchOutput] = []
        self._finite = np.ones(requests, np.bool_)

    @property
    def finite(self) -> list[bool]:
        return [bool(ok) for ok in self._finite]

    def add_output(self, micro_batch: MicroBatch, out: ScoredMicroBatch) -> MicroBatchOutput:
        """Wait for the micro-batch's output and return it."""
        output = _fetched(out)
        bad = ~(np.isfinite(output.logprobs).all(axis=1) & np.isfinite(output.loss))
        bad &= micro_batch.segment_ids >= 0
        blocks = bad.reshape(len(micro_batch.block_request), -1).any(axis=1)
        self._finite[micro_batch.block_request[blocks]] = False
        self.outputs.append(output)
        return output


def policy_gaps(micro_batch: MicroBatch, out: MicroBatchOutput) -> FloatArray:
    """Return the absolute differences between sampled and current logprobs, all finite.

    Covers tokens of policy losses with an advantage other than 0.
    """
    counts = (
        (micro_batch.segment_ids >= 0)
        & (micro_batch.loss_id != _CROSS_ENTROPY)
        & (micro_batch.advantages != 0)
    )
    gaps: FloatArray = np.abs(out.logprobs[counts, 0] - micro_batch.old_logprobs[counts])
    return gaps[np.isfinite(gaps)]


def _fetched(out: ScoredMicroBatch) -> MicroBatchOutput:
    """Return the output on the host, once it has been computed."""
    host: ScoredMicroBatch = jax.device_get(out)
    return MicroBatchOutput(_rows(host.logprobs), _rows(host.loss))  # type: ignore[arg-type]


def _rows(blocks: FloatArray) -> FloatArray:
    """Reshape [n, S, ...] to [N, ...]."""
    return blocks.reshape(-1, *blocks.shape[2:])
