"""The sequences that decode together: each one's prompt is prefilled, then it decodes to its end.

A fixed number of decode slots of one rank bucket decode together. A free slot goes to the
next sequence, of any tenant. Prompts are prefilled in chunks of blocks that belong to any of the
decode slots; a part that has been prefilled already is not prefilled again.

Dimension key: B decode slots, n blocks of a chunk, S positions of a block, U steps per dispatch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tuneserve_engine.backend.jax.attention.paged import Pages
from tuneserve_engine.backend.jax.sampling.adapter_slot_table import AdapterSlotTable
from tuneserve_engine.backend.jax.sampling.adapter_slots import DecodeAdapters, scans_layers
from tuneserve_engine.backend.jax.sampling.decode_slots import DecodeSlots, Drawn
from tuneserve_engine.backend.jax.sampling.kv_pages import KvPageAllocator, prefix_hashes
from tuneserve_engine.backend.jax.sampling.logits import AnyArray
from tuneserve_engine.backend.jax.sampling.programs import (
    STEPS_PER_DISPATCH,
    Decoded,
    Programs,
    no_blocks,
    no_score_request,
)
from tuneserve_engine.backend.jax.sampling.sequence import DecodedSequence
from tuneserve_engine.backend.jax.sampling.snapshots import Snapshot, Snapshots

_DECODING_PER_PREFILL = 3
"""Decode slots that must decode for each slot in prefill before prefill gives way to decoding."""
_CHUNKS_IN_A_ROW = 4
"""Most chunks of prompts in a row before decoding continues, however few decode slots decode.

Without this limit, a tenant that keeps sending long prompts would stall all decoding.
"""


@dataclass
class Counts:
    """Counters of sampling since the start."""

    prompt_tokens: int = 0  # tokens to prefill before the first is drawn, cached ones included
    prompt_tokens_prefilled: int = 0  # tokens that were prefilled
    tokens: int = 0  # tokens drawn and kept
    slot_steps: int = 0  # steps of all decode slots, idle ones included
    preempted: int = 0  # sequences that lost their pages and started anew


class KvCache:
    """The KV pages and, on a CPU, the base model's weights by layer. All rank buckets share both.

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
        """Each layer's own weights; empty if the programs loop over the layers."""
        if self._weights is None:
            layers = self._programs.layers
            self._weights = () if layers is None else layers(())
        return self._weights

    def take_pages(self) -> Pages:
        """Return the pages, for a program that consumes them; ``put`` takes the new ones back."""
        pages = self._pages
        self._pages = None
        return self._programs.empty_pages(()) if pages is None else pages

    def put_pages(self, pages: Pages) -> None:
        self._pages = pages

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page."""
        self.put_pages(
            self._programs.copy((), self.take_pages(), np.int32(source), np.int32(target))
        )


class DecodeBatch:
    """The decode slots of one rank bucket."""

    def __init__(self, programs: Programs, cache: KvCache, *, slots: int, rank_bucket: int) -> None:
        self._programs = programs
        self._cache = cache
        self._rank_bucket = rank_bucket
        self._sequences: list[DecodedSequence | None] = [None] * slots
        self._adapter_slots = AdapterSlotTable(programs.adapter_slots, is_shared=scans_layers())
        self._prefilling: list[int] = []  # decode slots in prefill, in the order of their arrival
        self._put_off = False  # whether a chunk was put off for one dispatch
        self._in_a_row = 0  # chunks prefilled since the last decoding
        self._adapters: DecodeAdapters | None = None
        self._slots = DecodeSlots(programs, slots)

    @property
    def prefilling(self) -> int:
        """The number of sequences in prefill."""
        return len(self._prefilling)

    @property
    def decoding(self) -> int:
        """The number of sequences that decode."""
        return len(self.sequences) - len(self._prefilling)

    @property
    def sequences(self) -> list[DecodedSequence]:
        """The sequences that have a decode slot."""
        return [sequence for sequence in self._sequences if sequence is not None]

    @property
    def is_full(self) -> bool:
        return None not in self._sequences

    @property
    def adapters_in_use(self) -> list[str]:
        """The snapshots in adapter slots that are in use, those in use for the longest first."""
        return self._adapter_slots.in_use

    def has_adapter_slot(self, sequence: DecodedSequence) -> bool:
        """Return whether an adapter slot has the sequence's snapshot, or could take it."""
        return self._adapter_slots.find(sequence.snapshot.name, 0) is not None

    def admit(self, sequence: DecodedSequence, spare: int) -> bool:
        """Give the sequence a slot, an adapter slot, and pages for its prompt and first tokens.

        Returns False if there are too few; ``spare`` pages stay free.
        """
        slot = next((slot for slot, held in enumerate(self._sequences) if held is None), None)
        if slot is None:
            return False
        adapter_slot = self._adapter_slots.find(sequence.snapshot.name, slot)
        if adapter_slot is None:
            return False
        size, context = self._programs.block, sequence.context
        scope = f"{sequence.request.owner}/{sequence.snapshot.name}"
        names = prefix_hashes(scope, sequence.request.prompt[:context], size)
        first = sequence.page_count(STEPS_PER_DISPATCH, size)
        reserved = self._cache.pool.reserve(names, first, spare=spare)
        if reserved is None:
            return False
        sequence.prefix_pages, sequence.private_pages = reserved
        if sequence.prompt_logprobs is None and sequence.cache_hits is None:
            hits = sum(part.written for part in sequence.prefix_pages)
            sequence.cache_hits = min(hits * size, context)
        self._use_adapter(adapter_slot, sequence.snapshot)
        self._slots.adapter_slot[slot] = adapter_slot
        self._sequences[slot] = sequence
        self._slots.table[slot] = 0
        self._slots.table[slot, : len(sequence.prefix_pages)] = [
            part.page for part in sequence.prefix_pages
        ]
        self._prefilling.append(slot)
        return True

    def find_pages(self) -> bool:
        """Give every sequence that decodes the pages that its next tokens need.

        Returns False if there are too few; the sequences keep what they got.
        """
        size = self._programs.block
        for slot, sequence in enumerate(self._sequences):
            if sequence is None or slot in self._prefilling:
                continue
            needed = sequence.page_count(len(sequence.tokens) + STEPS_PER_DISPATCH, size)
            while len(sequence.private_pages) < needed:
                page = self._cache.pool.take_page()
                if page is None:
                    return False
                self._slots.table[slot, sequence.context // size + len(sequence.private_pages)] = (
                    page
                )
                sequence.private_pages.append(page)
        return True

    def evict(self, sequence: DecodedSequence) -> None:
        """Take the sequence's slot and pages back, if it has them; it cannot continue."""
        if sequence in self._sequences:
            self._free(self._sequences.index(sequence))

    def _use_adapter(self, adapter_slot: int, snapshot: Snapshot) -> None:
        if not self._adapter_slots.add_user(adapter_slot, snapshot.name):
            return
        adapter = self._cache.snapshots.on_device(snapshot)
        if self._adapters is None:
            self._adapters = self._programs.empty_adapters(self._rank_bucket, adapter.weights)
        self._adapters = self._programs.set_slot_adapter(
            self._rank_bucket, self._adapters, np.int32(adapter_slot), adapter
        )

    def advance(self) -> None:
        """Prefill a chunk of the prompts and decode a few tokens."""
        if self._should_prefill():
            self.prefill()
            self._in_a_row += 1
        if self._most_decode or (self.decoding and self._in_a_row >= _CHUNKS_IN_A_ROW):
            self.decode()
            self._in_a_row = 0

    @property
    def _most_decode(self) -> bool:
        """Whether most decode slots decode. Before that, filling decode slots is worth more than
        using a few.
        """
        return self.decoding > 0 and self.decoding >= _DECODING_PER_PREFILL * self.prefilling

    def _should_prefill(self) -> bool:
        """Return whether to prefill now.

        A chunk that would not be full waits for one dispatch of decoding: meanwhile other prompts
        may arrive to share it.
        """
        unread = [
            sum(
                not part.written or sequence.prompt_logprobs is not None
                for part in sequence.prefix_pages[sequence.read :]
            )
            for slot in self._prefilling
            if (sequence := self._sequences[slot])
        ]
        is_full, begins = sum(unread) >= self._programs.blocks, 0 in unread
        self._put_off = self._most_decode and not (is_full or begins or self._put_off)
        return bool(unread) and not self._put_off

    def prefill(self) -> None:
        """Prefill one chunk of the waiting prompts; sequences with a whole prompt then decode."""
        blocks = no_blocks(self._programs.blocks, self._programs.block, self._programs.table_width)
        chosen = []
        for number, (slot, sequence) in enumerate(self._next_pages_to_prefill()):
            part = sequence.request.prompt[: sequence.context][
                sequence.read * self._programs.block :
            ]
            part = part[: self._programs.block]
            blocks.tokens[number, : len(part)] = part
            blocks.start[number] = sequence.read * self._programs.block
            blocks.table[number] = self._slots.table[slot]
            blocks.slot[number] = self._slots.adapter_slot[slot]
            self._cache.counts.prompt_tokens_prefilled += len(part)
            sequence.prefilled_tokens += len(part)
            chosen.append((sequence, sequence.read))
            sequence.prefix_pages[sequence.read].written = True
            sequence.read += 1
        if chosen:
            pages, hidden = self._programs.prefill(
                self._rank_bucket,
                self._cache.take_pages(),
                self._cache.weights,
                self._adapters,
                blocks,
            )
            self._cache.put_pages(pages)
            self._score(chosen, hidden, blocks.slot)
        for slot in list(self._prefilling):
            held = self._sequences[slot]
            assert held is not None
            if held.read < len(held.prefix_pages):
                continue
            if held.request.max_tokens:
                self._prefilling.remove(slot)
                self._start_decoding(slot, held)
            else:  # only the prompt was to be scored
                held.stop_reason = "length"
                self._free(slot)

    def _next_pages_to_prefill(self) -> Iterator[tuple[int, DecodedSequence]]:
        """Yield the decode slots and sequences whose next part goes into this chunk.

        The caller must count a part as prefilled before it asks for the next. Parts that exist
        already are skipped, unless there are questions about them.
        """
        left = self._programs.blocks
        for slot in self._prefilling:
            sequence = self._sequences[slot]
            assert sequence is not None
            while sequence.read < len(sequence.prefix_pages):
                if (
                    sequence.prefix_pages[sequence.read].written
                    and sequence.prompt_logprobs is None
                ):
                    sequence.read += 1
                elif left:
                    left -= 1
                    yield slot, sequence
                else:
                    break

    def _score(
        self, chosen: list[tuple[DecodedSequence, int]], hidden: Any, slot: AnyArray
    ) -> None:
        asking = [(number, *each) for number, each in enumerate(chosen) if each[0].prompt_logprobs]
        if not asking:
            return
        score_request = no_score_request(self._programs.blocks, self._programs.block)
        for number, sequence, part in asking:
            assert sequence.prompt_logprobs is not None
            sequence.prompt_logprobs.request_scores(score_request, number, part)
        scores = self._programs.score(
            self._rank_bucket, hidden, self._adapters, slot, score_request
        )
        for number, sequence, part in asking:
            assert sequence.prompt_logprobs is not None
            sequence.prompt_logprobs.add_scores(part, number, scores)

    def _start_decoding(self, slot: int, sequence: DecodedSequence) -> None:
        """Start decoding the sequence, into pages of its own."""
        size = self._programs.block
        if sequence.context % size:
            self._cache.copy_page(sequence.prefix_pages[-1].page, sequence.private_pages[0])
        first = sequence.context // size
        self._slots.table[slot, first : first + len(sequence.private_pages)] = (
            sequence.private_pages
        )
        self._slots.start(slot, sequence)

    def decode(self) -> None:
        """Decode a few tokens of every sequence in one dispatch; drop those after its end."""
        decoding = [
            (slot, sequence)
            for slot, sequence in enumerate(self._sequences)
            if sequence is not None and slot not in self._prefilling
        ]
        top_asked = any(sequence.request.topk_sample for _, sequence in decoding)
        state = self._slots.before_dispatch([slot for slot, _ in decoding], top=top_asked)
        decoded: Decoded = self._programs.decode(
            self._rank_bucket, self._cache.take_pages(), self._cache.weights, self._adapters, state
        )
        self._cache.put_pages(decoded.pages)
        tokens, logprobs = jax.device_get((decoded.tokens, decoded.logprobs))
        top = jax.device_get(decoded.top) if top_asked else None
        drawn, steps, counts = Drawn(tokens, logprobs, top), int(state.steps), self._cache.counts
        counts.slot_steps += steps * len(self._sequences)
        for slot, sequence in decoding:
            counts.tokens += self._slots.add_tokens(slot, sequence, drawn, steps)
            if sequence.has_ended:
                self._free(slot)

    def _free(self, slot: int) -> None:
        sequence = self._sequences[slot]
        assert sequence is not None
        self._cache.pool.release(sequence.prefix_pages, sequence.private_pages)
        self._adapter_slots.remove_user(int(self._slots.adapter_slot[slot]))
        self._sequences[slot] = None
        if slot in self._prefilling:
            self._prefilling.remove(slot)
        self._slots.end(slot)
