"""Training on the device: the buffers that all batches share, and the programs that use them."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from tuneserve_engine.adapters.kinds.base import AdapterKind
from tuneserve_engine.backend.base import (
    LOSS_NAMES,
    FloatArray,
    IntArray,
    MicroBatch,
    MicroBatchOutput,
    TrainBatch,
    TrainResult,
)
from tuneserve_engine.backend.jax.adapters.arrays import (
    LORA,
    LoraWeights,
    TrainingAdapter,
    in_tree,
    part_shapes,
    target_shapes,
)
from tuneserve_engine.backend.jax.device_errors import translate_device_errors
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.specs import spec
from tuneserve_engine.backend.jax.training import adapter_slots as banks
from tuneserve_engine.backend.jax.training.adamw import adamw_step, start_step, step_scalars
from tuneserve_engine.backend.jax.training.adapter_slots import AdapterSlots
from tuneserve_engine.backend.jax.training.kind_programs import KindPrograms, specs_of
from tuneserve_engine.backend.jax.training.programs import (
    DeviceMicroBatch,
    ScoredMicroBatch,
    score_micro_batch,
    space_shapes,
    train_micro_batch,
)
from tuneserve_engine.backend.jax.training.slots import BatchSlots, Disturbed, RankSlots
from tuneserve_engine.backend.jax.training.tape import Workspace
from tuneserve_engine.core.adapter import UNEMBED, AdamwParams
from tuneserve_engine.core.shapes import StaticShapes, multiple_from

logger = logging.getLogger(__name__)

_CROSS_ENTROPY = LOSS_NAMES.index("cross_entropy")
_ATTEMPTS = 3
"""How often a batch restarts because a batch that interrupted it failed.

After that, the batch runs without interruptions, and all other work waits for it.
"""


class Trainer:
    """Runs batches and optimizer steps on adapters that the caller owns.

    The workspace of the backward pass and each rank class's bank (adapter slots) and scratch
    (gradients) are allocated once, when first needed: programs take them and give them back.
    """

    def __init__(self, programs: ProgramRegistry, model: Decoder, lattice: StaticShapes) -> None:
        self._lattice = lattice
        self._shapes = target_shapes(model.config)
        by = "by rank class, targets per token and blocks"
        model.eval()  # type: ignore[no-untyped-call]
        self._score = programs.add(
            "score_stream", score_micro_batch, use=f"forward {by}", model=model
        )
        model.train()  # type: ignore[no-untyped-call]
        self._train = programs.add(
            "train_stream",
            train_micro_batch,
            use=f"forward_backward {by}",
            model=model,
            donate=(0, 1),
        )
        gradients = "forward_backward by rank class"
        self._place = programs.add("place", banks.place, use=gradients, donate=(0,))
        self._finite = programs.add("finite_sum", banks.finite_sum, use=gradients)
        self._add = programs.add("add", banks.add, use=gradients, donate=(0,))
        self._step = programs.add(
            "adamw_step", adamw_step, use="optim_step by rank class", donate=(0, 1, 2, 3)
        )
        self._kinds = KindPrograms(programs, self._shapes, lattice)
        self._space_shapes = partial(space_shapes, model)
        self._space: Workspace | None = None
        self._slots: dict[int, RankSlots] = {}
        self._spaces: dict[tuple[int, int], Any] = {}  # shapes by blocks and rank class
        self.tokens_trained = self.tokens_computed = 0
        """Tokens of all batches so far (``forward_only`` too), without and with padding."""
        self.policy_tokens, self.policy_gap = 0, 0.0
        """Tokens of policy losses that count, and the sum of the absolute differences between the
        logprobs that came with them and those computed here."""
        self._declare()
        model.eval()  # type: ignore[no-untyped-call]

    def forward_backward(
        self,
        unit: TrainBatch,
        adapters: Sequence[TrainingAdapter],
        between: Callable[[], Sequence[TrainingAdapter]] | None = None,
    ) -> TrainResult:
        """Run the batch on its requests' adapters; see ``Backend.forward_backward``.

        ``between`` may call this method for other adapters. It returns the batch's adapters, which
        may have been evicted and loaded again meanwhile. No gradient is added to an accumulator
        before all micro-batches have run: a batch whose gradients are lost, because a batch that
        interrupted it failed, restarts.
        """
        for _ in range(_ATTEMPTS):
            try:
                return self._forward_backward(unit, adapters, between)
            except Disturbed as disturbed:
                logger.warning("%s; a unit of %d requests begins anew", disturbed, len(adapters))
                assert between is not None
                adapters = disturbed.adapters
        return self._forward_backward(unit, adapters, None)

    def _forward_backward(
        self,
        unit: TrainBatch,
        adapters: Sequence[TrainingAdapter],
        between: Callable[[], Sequence[TrainingAdapter]] | None,
    ) -> TrainResult:
        rank_class = adapters[0].rank_class
        with self._slots_of(rank_class).claimed(len(adapters)) as place:
            running = _Running(unit, place, len(adapters))
            try:
                # Waits here: a failure on the device comes before an accumulator is touched.
                adapters = self._run_all(running, adapters, between)
            except Disturbed:
                raise
            except Exception:
                # A program returns its buffers before it has run: if it fails, they are spoiled.
                self._space = None
                place.slots.spoil()
                raise
            finite = running.finite
            if not unit.forward_only:
                accumulators = [adapter.accumulator for adapter in adapters]
                commit = partial(self._commit, adapters, place, finite)
                finite = translate_device_errors(commit, donated=accumulators)
        return TrainResult(tuple(running.outputs), tuple(finite))

    def start_step(self, adapter: TrainingAdapter, params: AdamwParams) -> Array:
        """Take one step with the adapter and return the gradient's norm; wait for neither."""
        run = self._kinds.step(adapter) or partial(self._step, adapter.rank_class)
        return start_step(adapter, params, run)

    def prepare(self, kind: AdapterKind) -> None:
        """Compile the programs that only adapters of this kind need. Thread-safe."""
        self._kinds.prepare(kind)

    def is_prepared(self, kind: AdapterKind) -> bool:
        return self._kinds.is_prepared(kind)

    def _run_all(
        self,
        running: "_Running",
        adapters: Sequence[TrainingAdapter],
        between: Callable[[], Sequence[TrainingAdapter]] | None,
    ) -> Sequence[TrainingAdapter]:
        """Run the micro-batches and wait for all of them.

        Returns the batch's adapters as they are afterwards.
        """
        place = running.place
        self._fill(place, adapters)
        version = place.slots.version
        dispatched: tuple[MicroBatch, ScoredMicroBatch] | None = None
        begun: set[int] = set()
        for batch in running.unit.batches:
            # Sent while the previous micro-batch runs.
            shifted = batch._replace(block_request=place.shifted(batch.block_request))
            stream = jax.device_put(DeviceMicroBatch.of(shifted, self._lattice.block, begun))
            if dispatched is not None:
                self._take_in(running, *dispatched)
                if between is not None:
                    adapters = between()
                    if place.slots.version != version:
                        raise Disturbed(adapters)
                    self._fill(place, adapters)
            begun |= set(shifted.block_request.tolist())
            used = batch.blocks * self._lattice.block
            self.tokens_trained += int(np.count_nonzero(batch.datum >= 0))
            self.tokens_computed += multiple_from(used, self._lattice.chunk)
            dispatched = batch, self._run(stream, place.slots, running.unit.forward_only)
        if dispatched is not None:
            self._take_in(running, *dispatched)
        return adapters

    def _take_in(self, running: "_Running", batch: MicroBatch, out: ScoredMicroBatch) -> None:
        """Wait for a micro-batch and add its output to the batch's."""
        output = running.take(batch, out)
        gaps = _policy_gaps(batch, output)
        self.policy_tokens += gaps.size
        self.policy_gap += float(gaps.sum(dtype=np.float64))

    def _run(self, stream: Any, slots: RankSlots, is_scored: bool) -> ScoredMicroBatch:
        """Dispatch one micro-batch."""
        blocks, _, targets = stream.targets.shape
        key = (slots.rank_class, targets, blocks)
        if is_scored:
            out: ScoredMicroBatch = self._score(key, slots.bank, stream)
            return out
        space, scratch = self._workspace(blocks, slots.rank_class), slots.scratch
        self._space = slots.scratch = None  # donated: an exception leaves neither
        trained = self._train(key, space, scratch, slots.bank, stream)
        self._space, slots.scratch = trained.space, trained.scratch
        return trained.out  # type: ignore[no-any-return]

    def _commit(
        self, adapters: Sequence[TrainingAdapter], place: BatchSlots, finite: list[bool]
    ) -> list[bool]:
        """Add each finite request's gradient to its adapter's accumulator, in order.

        Returns which requests are finite, gradients included.
        """
        checks: dict[int, Array] = {}
        for index, adapter in enumerate(adapters):
            if not finite[index]:
                continue
            key, slot = adapter.rank_class, np.int32(place.first + index)
            rest = (place.slots.scratch, slot, np.bool_(UNEMBED in adapter.config.targets))
            checks[index] = self._finite(key, adapter.accumulator, *rest)
            adapter.accumulator = self._add(key, adapter.accumulator, *rest, checks[index])
        checked = jax.device_get(checks)
        jax.block_until_ready([adapter.accumulator for adapter in adapters])  # type: ignore[no-untyped-call]
        for index, is_added in checked.items():
            adapters[index].accumulated |= bool(is_added)
        return [ok and bool(checked[index]) for index, ok in enumerate(finite)]

    def _slots_of(self, rank_class: int) -> RankSlots:
        if rank_class not in self._slots:
            count = self._lattice.slots(rank_class)
            self._slots[rank_class] = RankSlots(self._shapes, rank_class, count)
        return self._slots[rank_class]

    def _fill(self, place: BatchSlots, adapters: Sequence[TrainingAdapter]) -> None:
        """Put request i's adapter into the i-th of the batch's slots in the bank."""
        slots = place.slots
        slots.allocate()
        for slot, adapter in enumerate(adapters, place.first):
            if slots.held.get(slot) is adapter.weights:
                continue
            pairs = self._kinds.pairs(adapter)
            bank, slots.bank = slots.bank, None
            slots.bank = self._place(
                slots.rank_class,
                bank,
                np.int32(slot),
                pairs,
                adapter.scale,
                np.bool_(UNEMBED in adapter.config.targets),
            )
            slots.held[slot] = adapter.weights

    def _workspace(self, blocks: int, rank_class: int) -> Workspace:
        """Return the workspace for streams of ``blocks`` blocks; only one exists at a time."""
        shapes = self._shapes_of_space(blocks, rank_class)
        if self._space is None or jax.tree.map(_shape, self._space) != shapes:
            self._space = None
            self._space = jax.device_put(jax.tree.map(_blank, shapes))
        return self._space

    def _shapes_of_space(self, blocks: int, rank_class: int) -> Any:
        if (blocks, rank_class) not in self._spaces:
            bank = self._bank_specs(rank_class)
            self._spaces[blocks, rank_class] = self._space_shapes(bank, blocks)
        return self._spaces[blocks, rank_class]

    # --- what is compiled ahead -----------------------------------------------------------------

    def _declare(self) -> None:
        """Declare all programs, low ranks and single targets first: most requests use those."""
        blocks = self._lattice.stream // self._lattice.block
        index, flag = np.int32(0), np.bool_(False)
        for order, rank_class in enumerate(self._lattice.rank_classes):
            bank = self._bank_specs(rank_class)
            scratch = LoraWeights(bank.a, bank.b)
            weights = self._adapter_specs(rank_class)
            for targets in self._lattice.target_classes:
                stream = _stream_specs(self._lattice, targets)
                key, late = (rank_class, targets, blocks), order + (targets > 1)
                space = self._shapes_of_space(blocks, rank_class)
                self._train.declare(key, space, scratch, bank, stream, order=late)
                self._score.declare(key, bank, stream, order=late + 1)
            self._place.declare(rank_class, bank, index, weights, np.float32(0), flag, order=order)
            self._finite.declare(rank_class, weights, scratch, index, flag, order=order)
            self._add.declare(rank_class, weights, scratch, index, flag, flag, order=order)
            scalars = step_scalars(AdamwParams(), 1)
            self._step.declare(rank_class, weights, weights, weights, weights, scalars, order=order)

    def _bank_specs(self, rank_class: int) -> Any:
        count = self._lattice.slots(rank_class)
        a, b = {}, {}
        for name, (*layers, inputs, outputs) in self._shapes.items():
            stack = (*(layers or (1,)), count)
            a[name] = _float32((*stack, inputs, rank_class))
            b[name] = _float32((*stack, rank_class, outputs))
        return AdapterSlots(a, b, _float32((count,)), spec((count,), np.bool_))

    def _adapter_specs(self, rank_class: int) -> Any:
        return in_tree(specs_of(part_shapes(self._shapes, rank_class, LORA)))


class _Running:
    """A running batch: its slots, its ``outputs`` so far, and which of its requests are finite.

    A request is finite if the losses and logprobs of all its tokens are.
    """

    def __init__(self, unit: TrainBatch, place: BatchSlots, requests: int) -> None:
        self.unit = unit
        self.place = place
        self.outputs: list[MicroBatchOutput] = []
        self._finite = np.ones(requests, np.bool_)

    @property
    def finite(self) -> list[bool]:
        return [bool(ok) for ok in self._finite]

    def take(self, batch: MicroBatch, out: ScoredMicroBatch) -> MicroBatchOutput:
        """Wait for the micro-batch's output and return it."""
        output = _fetched(out)
        bad = ~(np.isfinite(output.logprobs).all(axis=1) & np.isfinite(output.loss))
        bad &= batch.datum >= 0
        blocks = bad.reshape(len(batch.block_request), -1).any(axis=1)
        self._finite[batch.block_request[blocks]] = False
        self.outputs.append(output)
        return output


def _policy_gaps(batch: MicroBatch, out: MicroBatchOutput) -> FloatArray:
    """Return the absolute differences between sampled and current logprobs, all finite.

    Covers tokens of policy losses with an advantage other than 0.
    """
    counts = (batch.datum >= 0) & (batch.loss_id != _CROSS_ENTROPY) & (batch.advantages != 0)
    gaps: FloatArray = np.abs(out.logprobs[counts, 0] - batch.old_logprobs[counts])
    return gaps[np.isfinite(gaps)]


def _stream_specs(lattice: StaticShapes, targets: int) -> Any:
    """Return a blank micro-batch: only the shapes matter to the programs."""
    n, blocks = lattice.stream, lattice.stream // lattice.block

    def ints(*shape: int) -> IntArray:
        return np.zeros(shape, np.int32)

    def floats(*shape: int) -> FloatArray:
        return np.zeros(shape, np.float32)

    fields = {name: floats(n) for name in MicroBatch._fields}
    fields |= {name: ints(n) for name in ("tokens", "positions", "datum", "loss_id")}  # type: ignore[misc]
    fields |= {name: ints(blocks) for name in ("block_request", "block_start")}  # type: ignore[misc]
    fields |= {"targets": ints(n, targets), "weights": floats(n, targets), "blocks": 0}  # type: ignore[dict-item]
    return DeviceMicroBatch.of(MicroBatch(**fields), lattice.block)  # type: ignore[arg-type]


def _float32(shape: tuple[int, ...]) -> Any:
    return spec(shape, np.float32)


def _shape(x: Array) -> Any:
    return spec(x.shape, x.dtype)


def _blank(shape: Any) -> Any:
    """Return zeros on the host, which the device copies, so that donation reuses its own memory."""
    room = np.zeros(int(np.prod(shape.shape)) + 1, shape.dtype)
    start = int(room.ctypes.data % 64 == 0)
    return room[start : start + room.size - 1].reshape(shape.shape)


def _fetched(out: ScoredMicroBatch) -> MicroBatchOutput:
    """Return the output on the host, once it has been computed."""
    host: ScoredMicroBatch = jax.device_get(out)
    return MicroBatchOutput(_rows(host.logprobs), _rows(host.loss))  # type: ignore[arg-type]


def _rows(blocks: FloatArray) -> FloatArray:
    """Reshape [n, S, ...] to [N, ...]."""
    return blocks.reshape(-1, *blocks.shape[2:])
