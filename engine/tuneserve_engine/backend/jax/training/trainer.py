"""Training on the device: the buffers that all batches share, and the programs that use them."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from tuneserve_engine.adapters.kinds.base import AdapterKind
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import MicroBatch, TrainBatch, TrainResult
from tuneserve_engine.backend.jax.adapters.arrays import (
    LORA,
    LoraWeights,
    TrainingAdapter,
    exported_state,
    in_tree,
    part_shapes,
    target_shapes,
)
from tuneserve_engine.backend.jax.device_errors import translate_device_errors
from tuneserve_engine.backend.jax.mesh import OWN, WHOLE, Parts
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.programs.registry import Program, ProgramRegistry
from tuneserve_engine.backend.jax.training.adamw import adamw_step, start_step, step_scalars
from tuneserve_engine.backend.jax.training.adapter_slots import (
    accumulate_slot,
    is_sum_finite,
    new_gradient_slots,
    write_slot,
)
from tuneserve_engine.backend.jax.training.gradient_sums import GradientSums
from tuneserve_engine.backend.jax.training.kind_programs import KindPrograms, specs_of
from tuneserve_engine.backend.jax.training.micro_batch_programs import (
    MicroBatchPrograms,
    new_slots,
)
from tuneserve_engine.backend.jax.training.programs import ScoredMicroBatch
from tuneserve_engine.backend.jax.training.rounds import joined, rounds_of
from tuneserve_engine.backend.jax.training.running_batch import RunningBatch, TrainingCounts
from tuneserve_engine.backend.jax.training.slots import BatchSlots, GradientsLost, RankSlots
from tuneserve_engine.backend.jax.training.tape import Workspace
from tuneserve_engine.core.adapter import UNEMBED, AdamwParams
from tuneserve_engine.core.shapes import StaticShapes, multiple_from

logger = logging.getLogger(__name__)

_OF_SLOTS = Parts((WHOLE, OWN, WHOLE, WHOLE), WHOLE)
_ATTEMPTS = 3
"""How often a batch restarts because a batch that interrupted it failed.

After that, the batch runs without interruptions, and all other work waits for it.
"""


class Trainer:
    """Runs batches and optimizer steps on adapters that the caller owns.

    The workspace of the backward pass and each rank bucket's adapter slots and gradient slots
    (gradients) are allocated once, when first needed: programs take them and give them back.
    """

    def __init__(
        self, programs: ProgramRegistry, model: Decoder, static_shapes: StaticShapes
    ) -> None:
        self._static_shapes = static_shapes
        self._shapes = target_shapes(model.config)
        self._mesh = programs.mesh
        self._micro_batches = MicroBatchPrograms(programs, model, static_shapes)
        gradients = "forward_backward by rank bucket"
        self._write_slot = programs.add_program(
            "write_slot", write_slot, use=gradients, donate=(0,)
        )
        self._sums = GradientSums(programs, gradients)
        self._is_sum_finite = programs.add_program(
            "is_sum_finite", is_sum_finite, use=gradients, parts=_OF_SLOTS
        )
        self._accumulate_slot = programs.add_program(
            "accumulate_slot",
            accumulate_slot,
            use=gradients,
            donate=(0,),
            parts=Parts((*_OF_SLOTS.arguments, WHOLE), WHOLE),
        )
        self._step = programs.add_program(
            "adamw_step", adamw_step, use="optim_step by rank bucket", donate=(0, 1, 2, 3)
        )
        self._kinds = KindPrograms(programs, self._shapes, static_shapes)
        self._space: Workspace | None = None  # only one exists at a time
        self._space_blocks = 0  # of the newest workspace
        self._empties: dict[int, tuple[Program, Program]] = {}
        self._slots = self._empty_slots(programs, gradients)
        self.counts = TrainingCounts()

    def _empty_slots(self, programs: ProgramRegistry, use: str) -> dict[int, RankSlots]:
        """Add the programs that allocate slots; return the slots of each rank bucket."""
        slots = {}
        for rank in self._static_shapes.rank_buckets:
            empty = partial(new_slots, self._shapes, self._static_shapes, rank)
            empty_slots = programs.add_program("empty_slots", empty, use=use)
            count = self._static_shapes.slots(rank)
            new_gradients = partial(new_gradient_slots, self._shapes, rank, count)
            empty_gradients = programs.add_program(
                "empty_gradient_slots", new_gradients, use=use, parts=Parts((), OWN)
            )
            self._empties[rank] = empty_slots, empty_gradients
            slots[rank] = RankSlots(
                rank, count, partial(empty_slots, rank), partial(empty_gradients, rank)
            )
        return slots

    def run_batch(
        self,
        batch: TrainBatch,
        adapters: Sequence[TrainingAdapter],
        interrupt: Callable[[], Sequence[TrainingAdapter]] | None = None,
    ) -> TrainResult:
        """Run the batch on its requests' adapters; see ``Backend.forward_backward``.

        ``interrupt`` may call this method for other adapters. It returns the batch's adapters,
        which may have been evicted and loaded again meanwhile. No gradient is added to an
        accumulator before all micro-batches have run: a batch whose gradients are lost, because a
        batch that interrupted it failed, restarts.
        """
        for _ in range(_ATTEMPTS):
            try:
                return self._try_batch(batch, adapters, interrupt)
            except GradientsLost as lost:
                logger.warning("%s; a batch of %d requests starts again", lost, len(adapters))
                assert interrupt is not None
                adapters = lost.adapters
        return self._try_batch(batch, adapters, None)

    def _try_batch(
        self,
        batch: TrainBatch,
        adapters: Sequence[TrainingAdapter],
        interrupt: Callable[[], Sequence[TrainingAdapter]] | None,
    ) -> TrainResult:
        with self._slots[adapters[0].rank_bucket].claimed(len(adapters)) as claimed:
            running = RunningBatch(batch, claimed, np.ones(len(adapters), np.bool_), self.counts)
            try:
                # Waits here: a failure on the device comes before an accumulator is touched.
                adapters = self._run_micro_batches(running, adapters, interrupt)
            except GradientsLost:
                raise
            except Exception:
                # A program returns its buffers before it has run: if it fails, they are spoiled.
                self._space = None
                claimed.slots.spoil()
                raise
            finite = running.finite.tolist()
            if not batch.forward_only:
                accumulators = [adapter.accumulator for adapter in adapters]
                commit = partial(self._commit, adapters, claimed, finite)
                finite = translate_device_errors(commit, donated=accumulators)
        return TrainResult(tuple(running.outputs), tuple(finite))

    def start_step(self, adapter: TrainingAdapter, params: AdamwParams) -> Array:
        """Take one step with the adapter and return the gradient's norm; wait for neither."""
        run = self._kinds.step(adapter) or partial(self._step, adapter.rank_bucket)
        return start_step(adapter, params, run)

    def exported(self, adapter: TrainingAdapter) -> AdapterState:
        """Return the LoRA of the same effect; its pairs have the bits that training computes with.

        Compiles what it needs if no adapter of the kind is trained here.
        """
        self._kinds.prepare_pairs(adapter)
        return exported_state(adapter, self._kinds.pairs(adapter))

    def prepare(self, kind: AdapterKind) -> None:
        """Compile the programs that only adapters of this kind need. Thread-safe."""
        self._kinds.prepare(kind)

    def is_prepared(self, kind: AdapterKind) -> bool:
        return self._kinds.is_prepared(kind)

    def _run_micro_batches(
        self,
        running: RunningBatch,
        adapters: Sequence[TrainingAdapter],
        interrupt: Callable[[], Sequence[TrainingAdapter]] | None,
    ) -> Sequence[TrainingAdapter]:
        """Run the micro-batches and wait for all of them.

        Returns the batch's adapters as they are afterwards.
        """
        claimed = running.claimed
        self._write_adapters(claimed, adapters)
        version = claimed.slots.version
        dispatched: tuple[list[MicroBatch], ScoredMicroBatch] | None = None
        block, devices = self._static_shapes.block, self._mesh.count
        for due in rounds_of(running.batch.micro_batches, devices):
            # Sent while the previous round runs.
            device_batch = self._mesh.put(joined(due, devices, block, claimed.first), OWN)
            if dispatched is not None:
                running.add_outputs(*dispatched, devices)
                if interrupt is not None:
                    adapters = interrupt()
                    if claimed.slots.version != version:
                        raise GradientsLost(adapters)
                    self._write_adapters(claimed, adapters)
            for micro_batch in due:
                used = micro_batch.blocks * block
                self.counts.tokens += int(np.count_nonzero(micro_batch.segment_ids >= 0))
                self.counts.tokens_computed += multiple_from(used, self._static_shapes.chunk)
            dispatched = due, self._dispatch(device_batch, running, due)
        if dispatched is not None:
            running.add_outputs(*dispatched, devices)
        return adapters

    def _dispatch(
        self, device_batch: Any, running: RunningBatch, due: Sequence[MicroBatch]
    ) -> ScoredMicroBatch:
        """Dispatch a round."""
        slots = running.claimed.slots
        rows, _, targets = device_batch.targets.shape
        blocks = rows // self._mesh.count
        key, is_divided = (slots.rank_bucket, targets, blocks), due[0].part is not None
        if running.batch.forward_only:
            score = self._micro_batches.score[is_divided]
            out: ScoredMicroBatch = score(key, slots.adapter_slots, device_batch)
            return out

        if self._space is None or self._space_blocks != blocks:
            self._space = None  # frees its memory before the other is allocated
            self._space_blocks = blocks
            self._space = self._micro_batches.empty_space(blocks)(blocks)

        earlier = self._sums.earlier(running, due)
        space, gradient_slots = self._space, slots.gradient_slots
        self._space = slots.gradient_slots = None  # donated: an exception leaves neither
        train = self._micro_batches.train[is_divided]
        trained = train(key, space, gradient_slots, slots.adapter_slots, device_batch)
        self._space, gradient_slots = trained.space, trained.gradient_slots
        slots.gradient_slots = self._sums.added(gradient_slots, running, due, earlier)
        return trained.out  # type: ignore[no-any-return]

    def _commit(
        self, adapters: Sequence[TrainingAdapter], claimed: BatchSlots, finite: list[bool]
    ) -> list[bool]:
        """Add each finite request's gradient to its adapter's accumulator, in order.

        Returns which requests are finite, gradients included.
        """
        checks: dict[int, Array] = {}
        for index, adapter in enumerate(adapters):
            if not finite[index]:
                continue
            key, slot = adapter.rank_bucket, np.int32(claimed.first + index)
            rest = (claimed.slots.gradient_slots, slot, np.bool_(UNEMBED in adapter.config.targets))
            checks[index] = self._is_sum_finite(key, adapter.accumulator, *rest)
            adapter.accumulator = self._accumulate_slot(
                key, adapter.accumulator, *rest, checks[index]
            )
        checked = jax.device_get(checks)
        jax.block_until_ready([adapter.accumulator for adapter in adapters])  # type: ignore[no-untyped-call]
        for index, is_added in checked.items():
            adapters[index].accumulated |= bool(is_added)
        return [ok and bool(checked[index]) for index, ok in enumerate(finite)]

    def _write_adapters(self, claimed: BatchSlots, adapters: Sequence[TrainingAdapter]) -> None:
        """Put request i's adapter into the i-th of the batch's adapter slots."""
        slots = claimed.slots
        if slots.adapter_slots is None or slots.gradient_slots is None:
            slots.allocate()
        for slot, adapter in enumerate(adapters, claimed.first):
            if slots.held.get(slot) is adapter.weights:
                continue
            pairs = self._kinds.pairs(adapter)
            adapter_slots, slots.adapter_slots = slots.adapter_slots, None
            slots.adapter_slots = self._write_slot(
                slots.rank_bucket,
                adapter_slots,
                np.int32(slot),
                pairs,
                adapter.scale,
                np.bool_(UNEMBED in adapter.config.targets),
            )
            slots.held[slot] = adapter.weights

    # --- what is compiled ahead -----------------------------------------------------------------

    def declare(self) -> None:
        """Declare all programs, low ranks and single targets first: most requests use those."""
        blocks = self._static_shapes.micro_batch_tokens // self._static_shapes.block
        self._micro_batches.empty_space(blocks).declare(blocks, order=0)
        index, flag = np.int32(0), np.bool_(False)
        for order, rank_bucket in enumerate(self._static_shapes.rank_buckets):
            empty = partial(new_slots, self._shapes, self._static_shapes, rank_bucket)
            adapter_slots = jax.eval_shape(empty)
            for each in self._empties[rank_bucket]:
                each.declare(rank_bucket, order=order)
            one = LoraWeights(adapter_slots.a, adapter_slots.b)
            gradient_slots = self._mesh.of_all(one)
            weights = self._adapter_specs(rank_bucket)
            self._micro_batches.declare(rank_bucket, adapter_slots, gradient_slots, order)
            self._sums.declare(rank_bucket, one, gradient_slots, order)
            self._write_slot.declare(
                rank_bucket, adapter_slots, index, weights, np.float32(0), flag, order=order
            )
            self._is_sum_finite.declare(
                rank_bucket, weights, gradient_slots, index, flag, order=order
            )
            self._accumulate_slot.declare(
                rank_bucket, weights, gradient_slots, index, flag, flag, order=order
            )
            scalars = step_scalars(AdamwParams(), 1)
            self._step.declare(
                rank_bucket, weights, weights, weights, weights, scalars, order=order
            )

    def _adapter_specs(self, rank_bucket: int) -> Any:
        return in_tree(specs_of(part_shapes(self._shapes, rank_bucket, LORA)))
