"""Sampling from frozen adapters and the base model: requests in, results out."""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuneserve_engine.adapters import AdapterConfig
from tuneserve_engine.backend.base import AdapterState, OutOfMemory, SampleRequest, SampleResult
from tuneserve_engine.backend.jax.adapters import restored_weights, target_shapes
from tuneserve_engine.backend.jax.device import on_device
from tuneserve_engine.backend.jax.generate import Draft, Lanes, draw_first
from tuneserve_engine.backend.jax.models.decoder import Decoder
from tuneserve_engine.backend.jax.programs import ProgramSet
from tuneserve_engine.backend.jax.prompt_scores import score_prompt
from tuneserve_engine.backend.jax.sample_adapters import Adapter, weights_bytes
from tuneserve_engine.backend.jax.sample_programs import CHOICES, Prefilled, Programs
from tuneserve_engine.backend.jax.stops import StopWatch, TextDecoder
from tuneserve_engine.errors import ServerError, UserError
from tuneserve_engine.lattice import ShapeLattice

_NO_ADAPTER = AdapterState(
    AdapterConfig(1, 0.0, 0, train_attn=False, train_mlp=False, train_unembed=False), {}
)
"""The base model as an adapter of zeros, so that its rows can share lanes with any other's."""


class Sampler:
    """Owns the snapshots, at most ``snapshot_bytes`` of them or one, and runs requests on them.

    A request's tokens and logprobs have the same bits alone and in any company: its prompt is run
    by itself, and it decodes in lanes whose shapes it chose itself. Its programs are declared at
    construction; none of its calls compiles anything else.
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
        self._lanes = lanes
        self._snapshot_bytes = snapshot_bytes
        self._vocab_size = model.config.vocab_size
        self._programs = Programs(programs, model, lattice, lanes)
        self._shapes = target_shapes(model.config)
        self._sizes = {rank: weights_bytes(self._shapes, rank) for rank in lattice.rank_classes}
        self._base = self._on_device(_NO_ADAPTER)
        self._snapshots: OrderedDict[str, Adapter] = OrderedDict()  # least recently used first

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
        groups: defaultdict[tuple[int, int], list[_Run]] = defaultdict(list)
        runs = [self._run(request) for request in requests]
        for run in runs:
            groups[run.capacity, run.adapter.rank_class].append(run)
        for (capacity, rank_class), members in groups.items():
            lanes = Lanes(
                self._programs, lanes=self._lanes, capacity=capacity, rank_class=rank_class
            )
            lanes.run(draft for run in members for draft in self._started(run))
        return [run.result() for run in runs]

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
        capacity = self._lattice.capacity(len(request.prompt) + request.max_tokens)
        return _Run(request, adapter, capacity, drafts)

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

    def _started(self, run: "_Run") -> list[Draft]:
        """The drafts that one token did not finish, after the request's one pass over its prompt.

        Scores and first tokens come from that pass: a request for logprobs never decodes.
        """
        request = run.request
        tokens = np.zeros((1, run.capacity), np.int32)
        tokens[0, : len(request.prompt)] = request.prompt
        key = run.capacity, run.adapter.rank_class
        prefilled: Prefilled = self._programs.prefill(
            key, tokens, np.int32(len(request.prompt)), run.adapter
        )
        run.scores = score_prompt(self._programs, request, prefilled.hidden, run.adapter)
        draw_first(self._programs, prefilled.logits, run.drafts, self._lanes)
        unfinished = [draft for draft in run.drafts if draft.stop_reason is None]
        for draft in unfinished:
            draft.prompt = prefilled.cache
        return unfinished


@dataclass
class _Run:
    """A request on its way through a call; ``capacity`` is its own choice."""

    request: SampleRequest
    adapter: Adapter
    capacity: int
    drafts: list[Draft]
    scores: SampleResult | None = None

    def result(self) -> SampleResult:
        assert self.scores is not None, "the request has not started"
        return replace(self.scores, sequences=tuple(draft.result() for draft in self.drafts))


def _check_widths(request: SampleRequest) -> None:
    targets = 0 if request.targets is None else request.targets.shape[1]
    widest = max(request.topk_prompt, request.topk_sample, request.alt_tokens, targets)
    if widest > CHOICES:
        raise UserError(
            f"a sample asks for {widest} top, alternative or target tokens per position; at most "
            f"{CHOICES} are computed; ask for fewer"
        )
