"""Sampling from frozen adapters and the base model: requests in, results out."""

import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import (
    OutOfMemory,
    SampleProgress,
    SampleResult,
    SamplingRequest,
    TokenDelta,
)
from tuneserve_engine.backend.jax.adapters.arrays import target_shapes
from tuneserve_engine.backend.jax.device_errors import translate_device_errors
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.sampling.decode_batch import (
    Counts,
    DecodeBatch,
    DecodedSequence,
    KvCache,
)
from tuneserve_engine.backend.jax.sampling.kv_pages import pages_of
from tuneserve_engine.backend.jax.sampling.programs import CHOICES, Programs
from tuneserve_engine.backend.jax.sampling.prompt_logprobs import PromptLogprobs
from tuneserve_engine.backend.jax.sampling.snapshots import Snapshot, Snapshots
from tuneserve_engine.backend.jax.sampling.stop_criteria import StopCriteria, TextDecoder
from tuneserve_engine.core.errors import EngineError, ServerError, UserError
from tuneserve_engine.core.shapes import StaticShapes


class JaxSampler:
    """Owns the snapshots and runs sampling requests on them.

    At most ``snapshot_bytes`` of the snapshots, or one of them, are on the device. A request's
    tokens and logprobs have the same bits alone and beside any other requests: all products have
    one shape, and a sequence attends to its own pages only. All programs are declared at
    construction; no call compiles anything else. ``lanes`` is the number of decode slots.
    """

    def __init__(  # noqa: PLR0913
        self,
        programs: ProgramRegistry,
        model: Decoder,
        lattice: StaticShapes,
        tokenizer: TextDecoder | None,
        *,
        lanes: int,
        snapshot_bytes: int,
        snapshot_host_bytes: int = sys.maxsize,
    ) -> None:
        self._lattice = lattice
        self._tokenizer = tokenizer
        self._lane_count = lanes
        self._vocab_size = model.config.vocab_size
        self._pages = pages_of(lattice, lanes)
        self._programs = Programs(programs, model, lattice, lanes=lanes, pages=self._pages)
        self.snapshots = Snapshots(
            target_shapes(model.config),
            lattice,
            device_bytes=snapshot_bytes,
            host_bytes=snapshot_host_bytes,
        )
        self.counts = Counts()
        self._held: dict[str, Snapshot] = {}
        """Snapshots of unfinished requests, which may restart after the snapshot is evicted."""
        self._forget_all()

    def has_snapshot(self, snapshot_id: str) -> bool:
        """Return whether the snapshot is loaded, or held by unfinished samples.

        If so, it stays at least until the next call that samples.
        """
        return self.snapshots.get(snapshot_id) is not None or snapshot_id in self._held

    def load_snapshot(self, snapshot_id: str, state: AdapterState) -> None:
        """Keep frozen weights at least until the next call that samples."""
        self.snapshots.put(snapshot_id, state)

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SampleResult]:
        """Return one result per request, in order. Nothing runs if one of them cannot."""
        self._keep({})
        for request in requests:
            self._run(request)
        asked = {str(number): request for number, request in enumerate(requests)}
        ended = self.sample_for(asked, _never).ended
        results = [ended[name] for name in asked]
        assert all(isinstance(result, SampleResult) for result in results)
        return results  # type: ignore[return-value]

    def sample_for(
        self, asked: Mapping[str, SamplingRequest], is_over: Callable[[], bool]
    ) -> SampleProgress:
        """See ``Backend.sample_for``.

        If the device has no room, evict all snapshots from it and try once more from the start.
        """
        try:
            return translate_device_errors(self._sample_for, asked, is_over)
        except OutOfMemory:
            if not self.snapshots.leave_device():
                raise
        return self._sample_for(asked, is_over)

    def _sample_for(
        self, asked: Mapping[str, SamplingRequest], is_over: Callable[[], bool]
    ) -> SampleProgress:
        ended: dict[str, SampleResult | EngineError] = {}
        self._keep(asked)
        new: dict[str, _RunningRequest] = {}
        for name in [name for name in asked if name not in self._under_way]:
            try:
                new[name] = self._run(asked[name])
            except EngineError as error:
                ended[name] = error
        self._under_way |= new
        self.counts.prompt_tokens += sum(run.drafts[0].context for run in new.values())
        # The longest of the new requests first: otherwise it would run alone in the end.
        drafts = [draft for run in new.values() for draft in run.drafts]
        for draft in sorted(drafts, key=lambda draft: -draft.request.max_tokens):
            self._waiting.setdefault(_place(draft), deque()).append(draft)
        self._held = {
            draft.snapshot.name: draft.snapshot
            for run in self._under_way.values()
            for draft in run.drafts
        }
        self.snapshots.settle()
        runs = dict(self._under_way)
        before = {name: run.work for name, run in runs.items()}
        while self._under_way:
            self._advance()
            for name in [name for name, run in self._under_way.items() if not run.left]:
                ended[name] = self._under_way.pop(name).result()
            if is_over():
                break
        left = {name: run.left for name, run in self._under_way.items()}
        work = {name: run.work - before[name] for name, run in runs.items()}
        drawn = {name: run.news() for name, run in self._under_way.items() if asked[name].stream}
        return SampleProgress(
            ended, left, work, {name: each for name, each in drawn.items() if each}
        )

    def _keep(self, asked: Collection[str]) -> None:
        """Drop running requests that are not in ``asked``."""
        for name in self._under_way.keys() - set(asked):
            for draft in self._under_way.pop(name).drafts:
                queue = self._waiting.get(_place(draft), ())
                if draft in queue:
                    self._take(_place(draft), draft)
                else:
                    self._lanes(draft.snapshot.rank_class).leave(draft)

    def _advance(self) -> None:
        """Prefill a chunk of the prompts and decode a few tokens, for every rank class."""
        try:
            self._admit()
            for lanes in self._lanes_of.values():
                lanes.advance()
        except BaseException:  # pages may be consumed: their content is lost
            self._forget_all()
            raise

    def _forget_all(self) -> None:
        """Drop all running requests and everything that the device holds for them."""
        self._cache = KvCache(self._programs, self._pages, self.snapshots, self.counts)
        self._lanes_of: dict[int, DecodeBatch] = {}
        self._waiting: dict[tuple[int, str], deque[DecodedSequence]] = {}
        self._under_way: dict[str, _RunningRequest] = {}

    def _admit(self) -> None:
        """Give lanes to waiting sequences.

        Within a rank class, the owner with the fewest lanes is first, then first come, first
        served. An owner without a lane gets one from the owner with the most. If there are too few
        pages for a sequence, later sequences of its rank class wait too.
        """
        full: set[int] = set()
        while places := [place for place in self._waiting if place[0] not in full]:
            held = Counter(
                _place(each) for lanes in self._lanes_of.values() for each in lanes.drafts
            )
            place = min(places, key=lambda place: held[place])
            lanes, draft = self._lanes(place[0]), self._waiting[place][0]
            if lanes.are_full and not held[place]:
                self._displace(lanes)
            if lanes.enter(draft):
                self._take(place, draft)
                if place in self._waiting:  # among owners with equally many lanes, rotate
                    self._waiting[place] = self._waiting.pop(place)
            else:
                full.add(place[0])

    def _take(self, place: tuple[int, str], draft: DecodedSequence) -> None:
        """Remove the sequence from the waiting ones."""
        self._waiting[place].remove(draft)
        if not self._waiting[place]:
            del self._waiting[place]

    def _displace(self, lanes: DecodeBatch) -> None:
        """Take a lane from the owner with the most lanes, if it has more than one.

        The owner's sequence with the least work done is restarted when its turn comes; its tokens
        will be the same.
        """
        owners = Counter(draft.request.owner for draft in lanes.drafts)
        owner, count = owners.most_common(1)[0]
        if count == 1:
            return
        mine = [draft for draft in lanes.drafts if draft.request.owner == owner]
        loser = min(mine, key=lambda draft: draft.work)
        lanes.leave(loser)
        anew = self._draft(loser.request, loser.snapshot, loser.sample)
        anew.cache_hits = loser.cache_hits
        for run in self._under_way.values():
            if loser in run.drafts:
                run.restart(loser, anew)
        self._waiting.setdefault(_place(anew), deque()).appendleft(anew)

    def _lanes(self, rank_class: int) -> DecodeBatch:
        if rank_class not in self._lanes_of:
            self._lanes_of[rank_class] = DecodeBatch(
                self._programs, self._cache, lanes=self._lane_count, rank_class=rank_class
            )
        return self._lanes_of[rank_class]

    def _run(self, request: SamplingRequest) -> "_RunningRequest":
        _check_widths(request)
        # Python's numbers are wider than the device's; values beyond its range mean its limit.
        request = replace(
            request,
            top_k=min(request.top_k, np.iinfo(np.int32).max),
            temperature=min(request.temperature, float(np.finfo(np.float32).max)),
            topk_prompt=min(request.topk_prompt, self._vocab_size),
            topk_sample=min(request.topk_sample, self._vocab_size),
        )
        snapshot, count = self._snapshot(request.snapshot_id), request.num_samples
        return _RunningRequest([self._draft(request, snapshot, sample) for sample in range(count)])

    def _draft(self, request: SamplingRequest, snapshot: Snapshot, sample: int) -> DecodedSequence:
        asks = sample == 0 and PromptLogprobs.are_asked(request)
        answers = PromptLogprobs(request, self._lattice.block) if asks else None
        return DecodedSequence(request, sample, snapshot, self._watch(request), answers)

    def _snapshot(self, snapshot_id: str | None) -> Snapshot:
        if snapshot_id is None:
            return self.snapshots.base_model
        snapshot = self.snapshots.get(snapshot_id) or self._held.get(snapshot_id)
        if snapshot is None:
            raise ServerError(f"snapshot {snapshot_id!r} is not loaded; load it again, then sample")
        return snapshot

    def _watch(self, request: SamplingRequest) -> StopCriteria:
        return StopCriteria(
            max_tokens=request.max_tokens,
            stop_tokens=request.stop_tokens,
            stop_strings=request.stop_strings,
            tokenizer=self._tokenizer,
        )


@dataclass
class _RunningRequest:
    """A request that has not ended."""

    drafts: list[DecodedSequence]
    lost: float = 0.0  # work on sequences that were restarted

    @property
    def left(self) -> int:
        """The number of sequences that have not ended."""
        return sum(draft.stop_reason is None for draft in self.drafts)

    @property
    def work(self) -> float:
        return self.lost + sum(draft.work for draft in self.drafts)

    def news(self) -> list[TokenDelta]:
        """Return what was drawn since the previous call."""
        found = [draft.news() for draft in self.drafts]
        return [each for each in found if each is not None]

    def restart(self, draft: DecodedSequence, anew: DecodedSequence) -> None:
        self.lost += draft.work
        self.drafts[self.drafts.index(draft)] = anew

    def result(self) -> SampleResult:
        first = self.drafts[0]
        scores = SampleResult(()) if first.answers is None else first.answers.result()
        return replace(
            scores,
            sequences=tuple(draft.result() for draft in self.drafts),
            prompt_cache_hit_tokens=first.cache_hits or 0,
        )


def _never() -> bool:
    return False


def _place(draft: DecodedSequence) -> tuple[int, str]:
    """Return the rank class and the owner of the sequence."""
    return draft.snapshot.rank_class, draft.request.owner


def _check_widths(request: SamplingRequest) -> None:
    targets = 0 if request.targets is None else request.targets.shape[1]
    widest = max(request.topk_prompt, request.topk_sample, request.alt_tokens, targets)
    if widest > CHOICES:
        raise UserError(
            f"a sample asks for {widest} top, alternative or target tokens per position; at most "
            f"{CHOICES} are computed; ask for fewer"
        )
