"""A running batch: its slots, its outputs so far, and which of its requests are finite."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tuneserve_engine.backend.base import LOSS_NAMES, MicroBatch, MicroBatchOutput, TrainBatch
from tuneserve_engine.backend.jax.training.programs import ScoredMicroBatch
from tuneserve_engine.backend.jax.training.rounds import parted
from tuneserve_engine.backend.jax.training.slots import BatchSlots

_CROSS_ENTROPY = LOSS_NAMES.index("cross_entropy")


@dataclass
class TrainingCounts:
    """Counters of training since the start, ``forward_only`` included."""

    tokens: int = 0  # without padding
    tokens_computed: int = 0  # with padding
    policy_tokens: int = 0  # tokens of policy losses with an advantage other than 0
    policy_gap: float = 0.0  # sum of absolute differences of their logprobs, sampled and current


@dataclass(eq=False)
class RunningBatch:
    """A running batch: its slots, its ``outputs`` so far, and which of its requests are finite.

    A request is finite if the losses and logprobs of all its tokens are. ``counts`` are those of
    all batches.
    """

    batch: TrainBatch
    claimed: BatchSlots
    finite: np.ndarray[tuple[int], np.dtype[np.bool_]]
    counts: TrainingCounts
    outputs: list[MicroBatchOutput] = field(default_factory=list)
    _begun: set[int] = field(default_factory=set)

    def slots_of(self, micro_batch: MicroBatch) -> set[int]:
        """Return the slots of the micro-batch's requests."""
        used = micro_batch.block_request[: micro_batch.blocks]
        return set((self.claimed.first + used).tolist())

    def continued(self, due: Sequence[MicroBatch]) -> list[int]:
        """Return the slots that have gradients of the round's requests in earlier rounds.

        Call it once for each round, in their order.
        """
        slots = set[int]().union(*map(self.slots_of, due))
        earlier, self._begun = slots & self._begun, slots | self._begun
        return sorted(earlier)

    def add_outputs(self, due: Sequence[MicroBatch], out: ScoredMicroBatch, devices: int) -> None:
        """Wait for a round's outputs and add those of its micro-batches."""
        for micro_batch, part in zip(due, parted(jax.device_get(out), devices), strict=False):
            self._add_output(micro_batch, part)

    def _add_output(self, micro_batch: MicroBatch, out: Any) -> None:
        logprobs, loss = out
        output = MicroBatchOutput(logprobs.reshape(-1, logprobs.shape[-1]), loss.reshape(-1))
        self.outputs.append(output)
        is_real = micro_batch.segment_ids >= 0

        bad = ~(np.isfinite(output.logprobs).all(axis=1) & np.isfinite(output.loss)) & is_real
        blocks = bad.reshape(len(micro_batch.block_request), -1).any(axis=1)
        self.finite[micro_batch.block_request[blocks]] = False

        is_policy = micro_batch.loss_id != _CROSS_ENTROPY
        counted = is_real & is_policy & (micro_batch.advantages != 0)
        gaps = np.abs(output.logprobs[counted, 0] - micro_batch.old_logprobs[counted])
        gaps = gaps[np.isfinite(gaps)]
        self.counts.policy_tokens += gaps.size
        self.counts.policy_gap += float(gaps.sum(dtype=np.float64))
