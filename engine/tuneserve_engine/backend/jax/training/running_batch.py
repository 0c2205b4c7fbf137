"""A running batch: its slots, its outputs so far, and which of its requests are finite."""

from dataclasses import dataclass, field

import jax
import numpy as np

from tuneserve_engine.backend.base import LOSS_NAMES, MicroBatch, MicroBatchOutput, TrainBatch
from tuneserve_engine.backend.jax.training.programs import ScoredMicroBatch
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

    def continued(self, micro_batch: MicroBatch) -> list[int]:
        """Return the slots that have gradients of earlier micro-batches of the same requests.

        Call it once for each micro-batch, in their order.
        """
        requests = set(micro_batch.block_request[: micro_batch.blocks].tolist())
        earlier, self._begun = requests & self._begun, requests | self._begun
        return [self.claimed.first + index for index in sorted(earlier)]

    def add_output(self, micro_batch: MicroBatch, out: ScoredMicroBatch) -> None:
        """Wait for the micro-batch's output and add it."""
        logprobs, loss = jax.device_get(out)
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
