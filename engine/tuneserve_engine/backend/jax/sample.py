"""Sampling from frozen adapters and the base model: requests in, results out."""

import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuneserve_engine.backend.base import (
    AdapterState,
    Drawn,
    OutOfMemory,
    Sampled,
    SampleRequest,
    SampleResult,
)
from tuneserve_engine.backend.jax.adapters import target_shapes
from tuneserve_engine.backend.jax.device import on_device
from tuneserve_engine.backend.jax.generate import Cache, Counts, Draft, Lanes
from tuneserve_engine.backend.jax.models.decoder import Decoder
from tuneserve_engine.backend.jax.page_pool import pages_of
from tuneserve_engine.backend.jax.programs import ProgramSet
from tuneserve_engine.backend.jax.prompt_scores import Answers
from tuneserve_engine.backend.jax.sample_programs import CHOICES, Programs
from tuneserve_engine.backend.jax.snapshots import Snapshot, Snapshots
from tuneserve_engine.backend.jax.stops import StopWatch, TextDecoder
from tuneserve_engine.errors import EngineError, ServerError, UserError
from tuneserve_engine.lattice import ShapeLattice


class Sampler:
    """Owns the snapshots, at most ``snapshot_bytes`` of them, or one, on the device, and runs
    requests on them.

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
        """Of requests under way, who may have to begin again when it is nowhere else."""
        self._forget_all()

    def has_snapshot(self, snapshot_id: str) -> bool:
        """Whether it is loaded, or held by samples under way; if so it stays at least until the
        next call that samples."""
        return self.snapshots.get(snapshot_id) is not None or snapshot_id in self._held

    def load_snapshot(self, snapshot_id: str, state: AdapterState) -> None:
        """Keeps frozen weights at least until the next call that samples."""
        self.snapshots.put(snapshot_id, state)

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """One result per request, in order. Nothing runs if one of them cannot."""
        self._keep({})
        for request in requests:
            self._run(request)
        asked = {str(number): request for number, request in enumerate(requests)}
        ended = self.sample_for(asked, _never).ended
        results = [ended[name] for name in asked]
        assert all(isinstance(result, SampleResult) for result in results)
        return results  # type: ignore[return-value]

    def sample_for(
        self, asked: Mapping[str, SampleRequest], is_over: Callable[[], bool]
    ) -> Sampled:
        """See ``Backend.sample_for``. If the device has no room, once more from the start without
        the snapshots that are on it."""
        try:
            return on_device(self._sample_for, asked, is_over)
        except OutOfMemory:
            if not self.snapshots.leave_device():
                raise
        return self._sample_for(asked, is_over)

    def _sample_for(
        self, asked: Mapping[str, SampleRequest], is_over: Callable[[], bool]
    ) -> Sampled:
        ended: dict[str, SampleResult | EngineError] = {}
        self._keep(asked)
        new: dict[str, _Run] = {}
        for name in [name for name in asked if name not in self._under_way]:
            try:
                new[name] = self._run(asked[name])
            except EngineError as error:
                ended[name] = error
        self._under_way |= new
        self.counts.prompt_tokens += sum(run.drafts[0].context for run in new.values())
        # Of those that come together the longest first: else it would be alone in the end.
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
        return Sampled(ended, left, work, {name: each for name, each in drawn.items() if each})

    def _keep(self, asked: Collection[str]) -> None:
        """Gives up what is under way and not asked for."""
        for name in self._under_way.keys() - set(asked):
            for draft in self._under_way.pop(name).drafts:
                queue = self._waiting.get(_place(draft), ())
                if draft in queue:
                    self._take(_place(draft), draft)
                else:
                    self._lanes(draft.snapshot.rank_class).leave(draft)

    def _advance(self) -> None:
        """A chunk of the prompts and a few tokens of the rest, of every rank class."""
        try:
            self._admit()
            for lanes in self._lanes_of.values():
                lanes.advance()
        except BaseException:  # pages may be consumed: whatever they held is lost
            self._forget_all()
            raise

    def _forget_all(self) -> None:
        """Nothing is on its way, and the device holds nothing for it."""
        self._cache = Cache(self._programs, self._pages, self.snapshots, self.counts)
        self._lanes_of: dict[int, Lanes] = {}
        self._waiting: dict[tuple[int, str], deque[Draft]] = {}
        self._under_way: dict[str, _Run] = {}

    def _admit(self) -> None:
        """Lanes for those who wait: first for the owner that has the fewest, then first come, first
        served. An owner that has none gets one of whoever has most. Nobody overtakes one for whom
        there are not enough pages, but in lanes of another rank class."""
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
                if place in self._waiting:  # of owners with as many lanes, the next comes first
                    self._waiting[place] = self._waiting.pop(place)
            else:
                full.add(place[0])

    def _take(self, place: tuple[int, str], draft: Draft) -> None:
        """Out of those who wait."""
        self._waiting[place].remove(draft)
        if not self._waiting[place]:
            del self._waiting[place]

    def _displace(self, lanes: Lanes) -> None:
        """Takes a lane from the owner that has most, if that is more than one: of the sequence that
        has the least to lose, which begins again when its turn comes. It will be the same."""
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

    def _lanes(self, rank_class: int) -> Lanes:
        if rank_class not in self._lanes_of:
            self._lanes_of[rank_class] = Lanes(
                self._programs, self._cache, lanes=self._lane_count, rank_class=rank_class
            )
        return self._lanes_of[rank_class]

    def _run(self, request: SampleRequest) -> "_Run":
        _check_widths(request)
        # Python's numbers are wider than the device's; beyond its range they mean its limit.
        request = replace(
            request,
            top_k=min(request.top_k, np.iinfo(np.int32).max),
            temperature=min(request.temperature, float(np.finfo(np.float32).max)),
            topk_prompt=min(request.topk_prompt, self._vocab_size),
            topk_sample=min(request.topk_sample, self._vocab_size),
        )
        snapshot, count = self._snapshot(request.snapshot_id), request.num_samples
        return _Run([self._draft(request, snapshot, sample) for sample in range(count)])

    def _draft(self, request: SampleRequest, snapshot: Snapshot, sample: int) -> Draft:
        asks = sample == 0 and Answers.are_asked(request)
        answers = Answers(request, self._lattice.block) if asks else None
        return Draft(request, sample, snapshot, self._watch(request), answers)

    def _snapshot(self, snapshot_id: str | None) -> Snapshot:
        if snapshot_id is None:
            return self.snapshots.base_model
        snapshot = self.snapshots.get(snapshot_id) or self._held.get(snapshot_id)
        if snapshot is None:
            raise ServerError(f"snapshot {snapshot_id!r} is not loaded; load it again, then sample")
        return snapshot

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
    lost: float = 0.0  # work on drafts that began again

    @property
    def left(self) -> int:
        """Sequences that have not ended."""
        return sum(draft.stop_reason is None for draft in self.drafts)

    @property
    def work(self) -> float:
        return self.lost + sum(draft.work for draft in self.drafts)

    def news(self) -> list[Drawn]:
        """What was drawn since this was last asked."""
        found = [draft.news() for draft in self.drafts]
        return [each for each in found if each is not None]

    def restart(self, draft: Draft, anew: Draft) -> None:
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


def _place(draft: Draft) -> tuple[int, str]:
    """The rank class, and who asked."""
    return draft.snapshot.rank_class, draft.request.owner


def _check_widths(request: SampleRequest) -> None:
    targets = 0 if request.targets is None else request.targets.shape[1]
    widest = max(request.topk_prompt, request.topk_sample, request.alt_tokens, targets)
    if widest > CHOICES:
        raise UserError(
            f"a sample asks for {widest} top, alternative or target tokens per position; at most "
            f"{CHOICES} are computed; ask for fewer"
        )
