"""Decoding in a fixed number of lanes: sequences join as others end, whoever they belong to.

Bits change with the number of rows and with the capacity of the cache, never with what the other
rows hold. So the number of lanes is fixed, and lanes exist per (capacity, rank class): both follow
from a request alone.

Dimension key: B lanes, V vocabulary, U steps per dispatch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from tuneserve_engine.backend.base import SampledSequence, SampleRequest, TopK
from tuneserve_engine.backend.jax.models.decoder import KVCache
from tuneserve_engine.backend.jax.sample_adapters import Adapter, LaneBank
from tuneserve_engine.backend.jax.sample_programs import (
    Choices,
    Decoded,
    Programs,
    no_lanes,
    no_rows,
)
from tuneserve_engine.backend.jax.sampling_math import AnyArray, RowParams, seed_halves
from tuneserve_engine.backend.jax.stops import StopReason, StopWatch


@dataclass
class Draft:
    """A sequence being written. ``prompt`` is its prompt's cache while it waits for a lane."""

    request: SampleRequest
    sample: int
    adapter: Adapter
    watch: StopWatch
    prompt: KVCache | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[AnyArray, AnyArray]] = field(default_factory=list)
    stop_reason: StopReason | None = None

    def push(self, token: int, logprob: float, top: tuple[AnyArray, AnyArray] | None) -> bool:
        """Takes the next token; True if it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.top.append(top)
        self.stop_reason = self.watch.push(token)
        return self.stop_reason is not None

    def result(self) -> SampledSequence:
        assert self.stop_reason is not None, "a sequence was left unfinished"
        top = None
        if self.top:
            ids, logprobs = zip(*self.top, strict=True)
            top = TopK(np.stack(ids), np.stack(logprobs))
        return SampledSequence(
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            self.stop_reason,
            top,
        )


def draw_first(
    programs: Programs, logits: Float[Array, "1 V"], drafts: Sequence[Draft], lanes: int
) -> None:
    """Gives every draft of one request its first token."""
    k = drafts[0].request.topk_sample
    for start in range(0, len(drafts), lanes):
        part = drafts[start : start + lanes]
        rows = no_rows(lanes)
        for lane, draft in enumerate(part):
            _set_row(rows, lane, draft)
        tokens, chosen, choices = jax.device_get(programs.first((), logits, rows))
        top = (choices.ids[0, :k], choices.logprobs[0, :k]) if k else None
        for lane, draft in enumerate(part):
            draft.push(int(tokens[lane]), float(chosen[lane]), top)


def _set_row(rows: RowParams, lane: int, draft: Draft | None) -> None:
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


class Lanes:
    """The decode lanes of one capacity and rank class."""

    def __init__(self, programs: Programs, *, lanes: int, capacity: int, rank_class: int) -> None:
        self._programs = programs
        self._capacity = capacity
        self._rank_class = rank_class
        self._drafts: list[Draft | None] = [None] * lanes
        self._adapters: list[Adapter | None] = [None] * lanes
        self._weights: tuple[Any, ...] = ()
        self._device: tuple[KVCache, LaneBank] | None = None
        self._state = no_lanes(lanes, capacity)

    def run(self, waiting: Iterator[Draft]) -> None:
        """Finishes every draft of the iterator, which is asked for one whenever a lane is free."""
        while True:
            for lane, held in enumerate(self._drafts):
                draft = next(waiting, None) if held is None else None
                if draft is not None:
                    self._enter(lane, draft)
            if not any(self._drafts):
                return
            self._advance()

    def _enter(self, lane: int, draft: Draft) -> None:
        assert draft.prompt is not None, "a sequence joins a lane once"
        index = np.int32(lane)
        if self._device is None:
            self._weights = self._programs.unstacked(())
            self._device = (
                self._programs.empty_cache(self._capacity, draft.prompt),
                self._programs.empty_bank(self._rank_class, draft.adapter.weights),
            )
        cache, bank = self._device
        cache = self._programs.join(self._capacity, cache, index, draft.prompt)
        if self._adapters[lane] is not draft.adapter:
            bank = self._programs.adopt(self._rank_class, bank, index, draft.adapter)
            self._adapters[lane] = draft.adapter
        self._device = cache, bank
        draft.prompt = None
        self._drafts[lane] = draft
        _set_row(self._state.rows, lane, draft)
        self._place(lane, draft)

    def _place(self, lane: int, draft: Draft) -> None:
        """What the lane decodes next: the last token, at its place in the sequence."""
        self._state.tokens[lane] = draft.tokens[-1]
        self._state.positions[lane] = len(draft.request.prompt) + len(draft.tokens) - 1
        self._state.step[lane] = len(draft.tokens)

    def _advance(self) -> None:
        """One dispatch: a few tokens for every lane; those past a sequence's end are dropped."""
        assert self._device is not None
        cache, bank = self._device
        top_asked = any(draft is not None and draft.request.topk_sample for draft in self._drafts)
        state = self._state._replace(top=np.bool_(top_asked))
        key = self._capacity, self._rank_class
        decoded: Decoded = self._programs.decode(key, cache, self._weights, bank, state)
        self._device = decoded.cache, bank
        tokens, logprobs = jax.device_get((decoded.tokens, decoded.logprobs))
        top = jax.device_get(decoded.top) if top_asked else None
        for lane, draft in enumerate(self._drafts):
            if draft is None:
                continue
            for step in range(len(tokens)):
                row = _best(top, step, lane, draft.request.topk_sample)
                if draft.push(int(tokens[step, lane]), float(logprobs[step, lane]), row):
                    self._leave(lane)
                    break
            else:
                self._place(lane, draft)

    def _leave(self, lane: int) -> None:
        self._drafts[lane] = None
        self._state.positions[lane] = self._capacity
        _set_row(self._state.rows, lane, None)


def _best(top: Choices | None, step: int, lane: int, k: int) -> tuple[AnyArray, AnyArray] | None:
    """Ids and logprobs [k] of one token, if it was asked for them."""
    if top is None or not k:
        return None
    return top.ids[step, lane, :k], top.logprobs[step, lane, :k]
