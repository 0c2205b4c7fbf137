"""The sequences that decode together: each one's prompt is prefilled, then it decodes to its end.

A fixed number of lanes (decode slots) of one rank class decode together. A free lane goes to the
next sequence, of any tenant. Prompts are prefilled in chunks of blocks that belong to any of the
lanes; a part that has been prefilled already is not prefilled again.

Dimension key: B lanes, n blocks of a chunk, S positions of a block, U steps per dispatch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tuneserve_engine.backend.base import (
    PROMPT_TOKENS_PER_STEP,
    FloatArray,
    IntArray,
    SampledSequence,
    SamplingRequest,
    TokenDelta,
    TopK,
)
from tuneserve_engine.backend.jax.attention.paged import Pages
from tuneserve_engine.backend.jax.sampling.adapter_slots import DecodeAdapters
from tuneserve_engine.backend.jax.sampling.kv_pages import (
    KvPageAllocator,
    PrefixPage,
    prefix_hashes,
)
from tuneserve_engine.backend.jax.sampling.logits import AnyArray, RowParams, seed_halves
from tuneserve_engine.backend.jax.sampling.programs import (
    Decoded,
    Programs,
    TopTokens,
    no_blocks,
    no_lanes,
    no_questions,
    no_rows,
)
from tuneserve_engine.backend.jax.sampling.prompt_logprobs import PromptLogprobs
from tuneserve_engine.backend.jax.sampling.snapshots import Snapshot, Snapshots
from tuneserve_engine.backend.jax.sampling.stop_criteria import StopCriteria, StopReason

_MOST = 3
"""Lanes that must decode for each lane in prefill before prefill gives way to decoding."""
_CHUNKS_IN_A_ROW = 4
"""Most chunks of prompts in a row before decoding continues, however few lanes decode.

Without this limit, a tenant that keeps sending long prompts would stall all decoding.
"""


@dataclass(eq=False)
class DecodedSequence:
    """A sequence being sampled.

    Its prompt except the last token is prefilled into ``parts``; what follows goes to its ``own``
    pages. ``answers`` collects what is asked about the prompt.
    """

    request: SamplingRequest
    sample: int
    snapshot: Snapshot
    watch: StopCriteria
    answers: PromptLogprobs | None = None
    parts: list[PrefixPage] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    read: int = 0  # number of parts that are prefilled
    read_tokens: int = 0  # tokens prefilled for this sequence
    cache_hits: int | None = None  # tokens in the cache when the sequence first got a lane
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[AnyArray, AnyArray]] = field(default_factory=list)
    told: int = 0  # tokens that ``news`` has returned
    stop_reason: StopReason | None = None

    @property
    def context(self) -> int:
        """Tokens to prefill before the first is drawn: decoding begins with the last one."""
        return len(self.request.prompt) - 1

    def push(self, token: int, logprob: float, top: tuple[AnyArray, AnyArray] | None) -> bool:
        """Append the next token. Returns True if it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.top.append(top)
        self.stop_reason = self.watch.push(token)
        return self.stop_reason is not None

    @property
    def work(self) -> float:
        """The work done for the sequence: see ``SampleProgress``."""
        return len(self.tokens) + self.read_tokens / PROMPT_TOKENS_PER_STEP

    def result(self) -> SampledSequence:
        assert self.stop_reason is not None, "a sequence was left unfinished"
        tokens, logprobs, top = self._since(0)
        return SampledSequence(tokens, logprobs, self.stop_reason, top)

    def news(self) -> TokenDelta | None:
        """Return what was drawn since the previous call; None if nothing was."""
        start, self.told = self.told, len(self.tokens)
        return TokenDelta(self.sample, start, *self._since(start)) if start < self.told else None

    def _since(self, start: int) -> tuple[IntArray, FloatArray, TopK | None]:
        """Return tokens, logprobs and the most likely ids, from a position on."""
        top = None
        if self.top:
            ids, logprobs = zip(*self.top[start:], strict=True)
            top = TopK(np.stack(ids), np.stack(logprobs))
        return (
            np.array(self.tokens[start:], np.int32),
            np.array(self.logprobs[start:], np.float32),
            top,
        )


@dataclass
class Counts:
    """Counters of sampling since the start."""

    prompt_tokens: int = 0  # tokens to prefill before the first is drawn, cached ones included
    prompt_tokens_read: int = 0  # tokens that were prefilled
    tokens: int = 0  # tokens drawn and kept
    lane_steps: int = 0  # steps of all lanes, idle ones included


class KvCache:
    """The KV pages and the base model's weights by layer, which all rank classes share.

    Both are put on the device when first needed.
    """

    def __init__(
        self, programs: Programs, pages: int, snapshots: Snapshots, counts: Counts
    ) -> None:
        self.pool = KvPageAllocator(pages)
        self.snapshots = snapshots
        self.counts = counts
        self._programs = programs
        self._pages: Pages | None = None
        self._weights: tuple[Any, ...] | None = None

    @property
    def weights(self) -> tuple[Any, ...]:
        if self._weights is None:
            self._weights = self._programs.unstacked(())
        return self._weights

    def take(self) -> Pages:
        """Return the pages, for a program that consumes them; ``put`` takes the new ones back."""
        pages = self._pages
        self._pages = None
        return self._programs.empty_pages(()) if pages is None else pages

    def put(self, pages: Pages) -> None:
        self._pages = pages

    def copy(self, source: int, target: int) -> None:
        """Copy a page."""
        self.put(self._programs.copy((), self.take(), np.int32(source), np.int32(target)))


class DecodeBatch:
    """The lanes (decode slots) of one rank class."""

    def __init__(self, programs: Programs, cache: KvCache, *, lanes: int, rank_class: int) -> None:
        self._programs = programs
        self._cache = cache
        self._rank_class = rank_class
        self._drafts: list[DecodedSequence | None] = [None] * lanes
        self._adapted: list[str | None] = [None] * lanes  # snapshot of each lane's adapter slot
        self._reading: list[int] = []  # lanes in prefill, in the order of their arrival
        self._put_off = False  # whether a chunk was put off for one dispatch
        self._in_a_row = 0  # chunks prefilled since the last decoding
        self._bank: DecodeAdapters | None = None
        self._state = no_lanes(lanes, programs.table_width)

    @property
    def reading(self) -> int:
        """The number of sequences in prefill."""
        return len(self._reading)

    @property
    def writing(self) -> int:
        """The number of sequences that decode."""
        return len(self.drafts) - len(self._reading)

    @property
    def drafts(self) -> list[DecodedSequence]:
        """The sequences that have a lane."""
        return [draft for draft in self._drafts if draft is not None]

    @property
    def are_full(self) -> bool:
        return None not in self._drafts

    def enter(self, draft: DecodedSequence) -> bool:
        """Give the sequence a lane and pages. Returns False if there are too few."""
        lane = next((lane for lane, held in enumerate(self._drafts) if held is None), None)
        if lane is None:
            return False
        size, context = self._programs.block, draft.context
        scope = f"{draft.request.owner}/{draft.snapshot.name}"
        names = prefix_hashes(scope, draft.request.prompt[:context], size)
        last = context + draft.request.max_tokens - 1
        own = last // size - context // size + 1 if draft.request.max_tokens else 0
        reserved = self._cache.pool.reserve(names, own)
        if reserved is None:
            return False
        draft.parts, draft.own = reserved
        if draft.answers is None and draft.cache_hits is None:
            hits = sum(part.written for part in draft.parts)
            draft.cache_hits = min(hits * size, context)
        self._adopt(lane, draft.snapshot)
        self._drafts[lane] = draft
        self._state.table[lane] = 0
        self._state.table[lane, : len(draft.parts)] = [part.page for part in draft.parts]
        self._reading.append(lane)
        return True

    def leave(self, draft: DecodedSequence) -> None:
        """Take the sequence's lane and pages back, if it has them; it cannot continue."""
        lane = next((lane for lane, held in enumerate(self._drafts) if held is draft), None)
        if lane is not None:
            self._free(lane)

    def _adopt(self, lane: int, snapshot: Snapshot) -> None:
        if self._bank is not None and self._adapted[lane] == snapshot.name:
            return
        adapter = self._cache.snapshots.on_device(snapshot)
        if self._bank is None:
            self._bank = self._programs.empty_bank(self._rank_class, adapter.weights)
        self._bank = self._programs.adopt(self._rank_class, self._bank, np.int32(lane), adapter)
        self._adapted[lane] = snapshot.name

    # --- reading --------------------------------------------------------------------------------

    def advance(self) -> None:
        """Prefill a chunk of the prompts and decode a few tokens."""
        if self._should_read():
            self.read()
            self._in_a_row += 1
        if self._most_write or (self.writing and self._in_a_row >= _CHUNKS_IN_A_ROW):
            self.write()
            self._in_a_row = 0

    @property
    def _most_write(self) -> bool:
        """Whether most lanes decode. Before that, filling lanes is worth more than using a few."""
        return self.writing > 0 and self.writing >= _MOST * self.reading

    def _should_read(self) -> bool:
        """Return whether to prefill now.

        A chunk that would not be full waits for one dispatch of decoding: meanwhile other prompts
        may arrive to share it.
        """
        unread = [
            sum(not part.written or draft.answers is not None for part in draft.parts[draft.read :])
            for lane in self._reading
            if (draft := self._drafts[lane])
        ]
        is_full, begins = sum(unread) >= self._programs.blocks, 0 in unread
        self._put_off = self._most_write and not (is_full or begins or self._put_off)
        return bool(unread) and not self._put_off

    def read(self) -> None:
        """Prefill one chunk of the waiting prompts; sequences with a whole prompt then decode."""
        blocks = no_blocks(self._programs.blocks, self._programs.block, self._programs.table_width)
        chosen = []
        for number, (lane, draft) in enumerate(self._next_parts()):
            part = draft.request.prompt[: draft.context][draft.read * self._programs.block :]
            part = part[: self._programs.block]
            blocks.tokens[number, : len(part)] = part
            blocks.start[number] = draft.read * self._programs.block
            blocks.table[number] = self._state.table[lane]
            blocks.lane[number] = lane
            self._cache.counts.prompt_tokens_read += len(part)
            draft.read_tokens += len(part)
            chosen.append((draft, draft.read))
            draft.parts[draft.read].written = True
            draft.read += 1
        if chosen:
            pages, hidden = self._programs.prefill(
                self._rank_class, self._cache.take(), self._cache.weights, self._bank, blocks
            )
            self._cache.put(pages)
            self._score(chosen, hidden, blocks.lane)
        for lane in list(self._reading):
            held = self._drafts[lane]
            assert held is not None
            if held.read < len(held.parts):
                continue
            if held.request.max_tokens:
                self._reading.remove(lane)
                self._begin(lane, held)
            else:  # only the prompt was to be scored
                held.stop_reason = "length"
                self._free(lane)

    def _next_parts(self) -> Iterator[tuple[int, DecodedSequence]]:
        """Yield the lanes and sequences whose next part goes into this chunk.

        The caller must count a part as prefilled before it asks for the next. Parts that exist
        already are skipped, unless there are questions about them.
        """
        left = self._programs.blocks
        for lane in self._reading:
            draft = self._drafts[lane]
            assert draft is not None
            while draft.read < len(draft.parts):
                if draft.parts[draft.read].written and draft.answers is None:
                    draft.read += 1
                elif left:
                    left -= 1
                    yield lane, draft
                else:
                    break

    def _score(
        self, chosen: list[tuple[DecodedSequence, int]], hidden: Any, lane: AnyArray
    ) -> None:
        asking = [(number, *each) for number, each in enumerate(chosen) if each[0].answers]
        if not asking:
            return
        questions = no_questions(self._programs.blocks, self._programs.block)
        for number, draft, part in asking:
            assert draft.answers is not None
            draft.answers.ask(questions, number, part)
        scores = self._programs.score(self._rank_class, hidden, self._bank, lane, questions)
        for number, draft, part in asking:
            assert draft.answers is not None
            draft.answers.add(part, number, scores)

    def _begin(self, lane: int, draft: DecodedSequence) -> None:
        """Start decoding the sequence, into pages of its own."""
        size = self._programs.block
        if draft.context % size:
            self._cache.copy(draft.parts[-1].page, draft.own[0])
        first = draft.context // size
        self._state.table[lane, first : first + len(draft.own)] = draft.own
        _set_row(self._state.rows, lane, draft)
        self._state.tokens[lane] = draft.request.prompt[-1]
        self._state.positions[lane] = draft.context
        self._state.step[lane] = 0

    # --- writing --------------------------------------------------------------------------------

    def write(self) -> None:
        """Decode a few tokens of every sequence in one dispatch; drop those after its end."""
        writing = [
            (lane, draft)
            for lane, draft in enumerate(self._drafts)
            if draft is not None and lane not in self._reading
        ]
        top_asked = any(draft.request.topk_sample for _, draft in writing)
        state = self._state._replace(top=np.bool_(top_asked))
        decoded: Decoded = self._programs.decode(
            self._rank_class, self._cache.take(), self._cache.weights, self._bank, state
        )
        self._cache.put(decoded.pages)
        tokens, logprobs = jax.device_get((decoded.tokens, decoded.logprobs))
        top = jax.device_get(decoded.top) if top_asked else None
        counts = self._cache.counts
        counts.lane_steps += tokens.size
        for lane, draft in writing:
            for step in range(len(tokens)):
                counts.tokens += 1
                row = _best(top, step, lane, draft.request.topk_sample)
                if draft.push(int(tokens[step, lane]), float(logprobs[step, lane]), row):
                    self._free(lane)
                    break
            else:
                self._state.tokens[lane] = draft.tokens[-1]
                self._state.positions[lane] += len(tokens)
                self._state.step[lane] += len(tokens)

    def _free(self, lane: int) -> None:
        draft = self._drafts[lane]
        assert draft is not None
        self._cache.pool.release(draft.parts, draft.own)
        self._drafts[lane] = None
        if lane in self._reading:
            self._reading.remove(lane)
        self._state.positions[lane] = -1
        self._state.table[lane] = 0
        _set_row(self._state.rows, lane, None)


def _set_row(rows: RowParams, lane: int, draft: DecodedSequence | None) -> None:
    if draft is None:
        for values, idle in zip(rows, no_rows(1), strict=True):
            values[lane] = idle[0]
        return
    request = draft.request
    rows.seed[lane] = seed_halves(request.seed)
    rows.sample[lane] = draft.sample
    rows.temperature[lane] = request.temperature
    rows.top_k[lane] = request.top_k
    rows.top_p[lane] = request.top_p


def _best(top: TopTokens | None, step: int, lane: int, k: int) -> tuple[AnyArray, AnyArray] | None:
    """Return ids and logprobs [k] of one token, or None if they were not asked for."""
    if top is None or not k:
        return None
    # Copies: a view would keep the arrays of all lanes alive.
    return top.ids[step, lane, :k].copy(), top.logprobs[step, lane, :k].copy()
