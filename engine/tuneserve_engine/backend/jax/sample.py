"""Sampling from frozen adapters and the base model: requests in, results out."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuneserve_engine.adapters import AdapterConfig
from tuneserve_engine.backend.base import AdapterState, OutOfMemory, SampleRequest, SampleResult
from tuneserve_engine.backend.jax.adapters import restored_weights, target_shapes
from tuneserve_engine.backend.jax.device import on_device
from tuneserve_engine.backend.jax.generate import Cache, Counts, Draft, Lanes
from tuneserve_engine.backend.jax.models.decoder import Decoder
from tuneserve_engine.backend.jax.page_pool import pages_of
from tuneserve_engine.backend.jax.programs import ProgramSet
from tuneserve_engine.backend.jax.prompt_scores import Answers
from tuneserve_engine.backend.jax.sample_adapters import Adapter, weights_bytes
from tuneserve_engine.backend.jax.sample_programs import CHOICES, Programs
from tuneserve_engine.backend.jax.stops import StopWatch, TextDecoder
from tuneserve_engine.errors import ServerError, UserError
from tuneserve_engine.lattice import ShapeLattice

_NO_ADAPTER = AdapterState(
    AdapterConfig(1, 0.0, 0, train_attn=False, train_mlp=False, train_unembed=False), {}
)
"""The base model as an adapter of zeros, so that its rows can share lanes with any other's."""


class Sampler:
    """Owns the snapshots, at most ``snapshot_bytes`` of them or one, and runs requests on them.

    A request's tokens and logprobs have the same bits alone and in any company: all products have
    one shape, and a sequence attends to its own pages only. All programs are declared at
    construction; no call compiles anything else.
    """

    def __init__(  # noqa: PLR0913
        self,
        programs: ProgramSet,
        model: Decoder,
        lattice: ShapeLattice,
        tokenizer: TextDecoder | None,
        *,
        lanes: int,
        snapshot_bytes: int,
    ) -> None:
        self._lattice = lattice
        self._tokenizer = tokenizer
        self._lane_count = lanes
        self._snapshot_bytes = snapshot_bytes
        self._vocab_size = model.config.vocab_size
        self._pages = pages_of(lattice, lanes)
        self._programs = Programs(programs, model, lattice, lanes=lanes, pages=self._pages)
        self._shapes = target_shapes(model.config)
        self._sizes = {rank: weights_bytes(self._shapes, rank) for rank in lattice.rank_classes}
        self._base = self._on_device(_NO_ADAPTER)
        self._snapshots: OrderedDict[str, Adapter] = OrderedDict()  # least recently used first
        self.counts = Counts()
        self._forget_all()

    def has_snapshot(self, snapshot_id: str) -> bool:
        """Whether it is loaded; if so it counts as just used.

        Asking for, or loading, every snapshot of a call before the call therefore keeps all of
        them, as long as there is room for them.
        """
        if snapshot_id not in self._snapshots:
            return False
        self._snapshots.move_to_end(snapshot_id)
        return True

    def load_snapshot(self, snapshot_id: str, state: AdapterState) -> None:
        """Puts frozen weights on the device. Drops the least recently used ones first, where they
        would be beyond the limit, or the device has no room for another."""
        self._snapshots.pop(snapshot_id, None)
        room = self._snapshot_bytes - self._sizes[self._lattice.rank_class(state.config.rank)]
        while self._snapshots and self._held_bytes() > room:
            self._snapshots.popitem(last=False)
        while (adapter := self._loaded(state)) is None:
            self._snapshots.popitem(last=False)
        self._snapshots[snapshot_id] = adapter

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """One result per request, in order. Nothing runs if one of them cannot. If the device has
        no room, once more without the snapshots that the requests do not need."""
        try:
            return on_device(self._sample, requests)
        except OutOfMemory:
            needed = {request.snapshot_id for request in requests}
            others = self._snapshots.keys() - needed
            if not others:
                raise
        for snapshot_id in others:
            del self._snapshots[snapshot_id]
        return self._sample(requests)

    def _sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        runs = [self._run(request) for request in requests]
        for run in runs:
            self._waiting.extend(run.drafts)
        while not all(run.is_done for run in runs):
            self._advance()
        return [run.result() for run in runs]

    def _advance(self) -> None:
        """A chunk of the prompts and a few tokens of the rest, of every rank class."""
        try:
            self._admit()
            for lanes in self._lanes_of.values():
                if lanes.reading:
                    lanes.read()
                # Until most lanes write, to fill them is worth more than to use the few.
                if lanes.writing and lanes.writing >= lanes.reading:
                    lanes.write()
        except BaseException:  # pages may be consumed: whatever they held is lost
            self._forget_all()
            raise

    def _forget_all(self) -> None:
        """Nothing is on its way, and the device holds nothing for it."""
        self._cache = Cache(self._programs, self._pages, self.counts)
        self._lanes_of: dict[int, Lanes] = {}
        self._waiting: deque[Draft] = deque()

    def _admit(self) -> None:
        """Lanes for those who wait, first come first served: nobody overtakes one for whom there
        are not enough pages, but in lanes of another rank class."""
        full: set[int] = set()
        again: deque[Draft] = deque()
        while self._waiting:
            draft = self._waiting.popleft()
            rank_class = draft.adapter.rank_class
            if rank_class in full or not self._lanes(rank_class).enter(draft):
                full.add(rank_class)
                again.append(draft)
        self._waiting = again

    def _lanes(self, rank_class: int) -> Lanes:
        if rank_class not in self._lanes_of:
            self._lanes_of[rank_class] = Lanes(
                self._programs, self._cache, lanes=self._lane_count, rank_class=rank_class
            )
        return self._lanes_of[rank_class]

    def _run(self, request: SampleRequest) -> "_Run":
        adapter = self._adapter(request.snapshot_id)
        _check_widths(request)
        # Python's numbers are wider than the device's; beyond its range they mean its limit.
        request = replace(
            request,
            top_k=min(request.top_k, np.iinfo(np.int32).max),
            temperature=min(request.temperature, float(np.finfo(np.float32).max)),
            topk_prompt=min(request.topk_prompt, self._vocab_size),
            topk_sample=min(request.topk_sample, self._vocab_size),
        )
        drafts = [
            Draft(request, sample, adapter, self._watch(request))
            for sample in range(request.num_samples)
        ]
        answers = None
        if Answers.are_asked(request):
            answers = drafts[0].answers = Answers(request, self._lattice.block)
        self.counts.prompt_tokens += drafts[0].context
        return _Run(drafts, answers)

    def _loaded(self, state: AdapterState) -> Adapter | None:
        """None if the device has no room and there are snapshots to drop."""
        try:
            return on_device(self._on_device, state)
        except OutOfMemory:
            if not self._snapshots:
                raise
            return None

    def _held_bytes(self) -> int:
        return sum(self._sizes[adapter.rank_class] for adapter in self._snapshots.values())

    def _on_device(self, state: AdapterState) -> Adapter:
        rank_class = self._lattice.rank_class(state.config.rank)
        weights = restored_weights(state, self._shapes, rank_class)
        return Adapter(weights, np.float32(state.config.scale))

    def _adapter(self, snapshot_id: str | None) -> Adapter:
        if snapshot_id is None:
            return self._base
        if snapshot_id not in self._snapshots:
            raise ServerError(
                f"snapshot {snapshot_id!r} is not loaded; this server keeps {self._snapshot_bytes} "
                "bytes of them, and one call can use no more; load it again, then sample"
            )
        self._snapshots.move_to_end(snapshot_id)
        return self._snapshots[snapshot_id]

    def _watch(self, request: SampleRequest) -> StopWatch:
        return StopWatch(
            max_tokens=request.max_tokens,
            stop_tokens=request.stop_tokens,
            stop_strings=request.stop_strings,
            tokenizer=self._tokenizer,
        )


@dataclass
class _Run:
    """A request on its way."""

    drafts: list[Draft]
    answers: Answers | None

    @property
    def is_done(self) -> bool:
        return all(draft.stop_reason is not None for draft in self.drafts)

    def result(self) -> SampleResult:
        scores = SampleResult(()) if self.answers is None else self.answers.result()
        return replace(
            scores,
            sequences=tuple(draft.result() for draft in self.drafts),
            prompt_cache_hit_tokens=self.drafts[0].cache_hits,
        )


def _check_widths(request: SampleRequest) -> None:
    targets = 0 if request.targets is None else request.targets.shape[1]
    widest = max(request.topk_prompt, request.topk_sample, request.alt_tokens, targets)
    if widest > CHOICES:
        raise UserError(
            f"a sample asks for {widest} top, alternative or target tokens per position; at most "
            f"{CHOICES} are computed; ask for fewer"
        )
