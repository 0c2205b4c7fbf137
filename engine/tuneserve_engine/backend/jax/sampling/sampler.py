"""Sampling from frozen adapters and the base model: requests in, results out."""

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import (
    OutOfMemory,
    SampleProgress,
    SampleResult,
    SamplingRequest,
)
from tuneserve_engine.backend.jax.adapters.arrays import target_shapes
from tuneserve_engine.backend.jax.device_errors import translate_device_errors
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.sampling.decode_batch import Counts, DecodeBatch, KvCache
from tuneserve_engine.backend.jax.sampling.grammars import CompiledGrammar, GrammarCompiler
from tuneserve_engine.backend.jax.sampling.kv_pages import least_pages, most_pages
from tuneserve_engine.backend.jax.sampling.programs import STEPS_PER_DISPATCH, Programs
from tuneserve_engine.backend.jax.sampling.prompt_logprobs import PromptLogprobs
from tuneserve_engine.backend.jax.sampling.request_limits import within_limits
from tuneserve_engine.backend.jax.sampling.sequence import DecodedSequence, RunningRequest
from tuneserve_engine.backend.jax.sampling.snapshots import Snapshot, Snapshots
from tuneserve_engine.backend.jax.sampling.stop_criteria import StopCriteria, TextDecoder
from tuneserve_engine.core.errors import EngineError, ServerError
from tuneserve_engine.core.shapes import StaticShapes


class JaxSampler:
    """Owns the snapshots and runs sampling requests on them.

    At most ``snapshot_bytes`` of the snapshots, or one of them, are on the device. A request's
    tokens and logprobs have the same bits alone and beside any other requests: all products have
    one shape, and a sequence attends to its own pages only. All programs are declared at
    construction; no call compiles anything else. ``slots`` is the number of decode slots, and
    ``pages`` that of KV pages: by default, as many as suffice for every slot. With fewer, a
    sequence may have to start anew, with the same tokens.
    """

    def __init__(  # noqa: PLR0913
        self,
        programs: ProgramRegistry,
        model: Decoder,
        static_shapes: StaticShapes,
        tokenizer: TextDecoder | None,
        *,
        slots: int,
        snapshot_bytes: int,
        snapshot_host_bytes: int = sys.maxsize,
        pages: int | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._static_shapes = static_shapes
        self._tokenizer = tokenizer
        self.grammars = grammars or GrammarCompiler(_no_text, model.config.vocab_size, ())
        self._slot_count = slots
        self._vocab_size = model.config.vocab_size
        self._pages = most_pages(static_shapes, slots) if pages is None else pages
        if self._pages < (least := least_pages(static_shapes)):
            raise ValueError(f"pages is {pages}; a sequence as long as the context needs {least}")
        self._programs = Programs(programs, model, static_shapes, slots=slots, pages=self._pages)
        self.snapshots = Snapshots(
            target_shapes(model.config),
            static_shapes,
            device_bytes=snapshot_bytes,
            host_bytes=snapshot_host_bytes,
            put=programs.mesh.put,
        )
        self.counts = Counts()
        self._can_retry = programs.mesh.is_of_one_process
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
        self.snapshots.register(snapshot_id, state)

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SampleResult]:
        """Return one result per request, in order. Nothing runs if one of them cannot begin."""
        self._drop_all_but({})
        for request in requests:
            self._new_request(request)
        asked = {str(number): request for number, request in enumerate(requests)}
        finished = self.sample_until(asked, _never).finished
        return [_sampled(finished[name]) for name in asked]

    def sample_until(
        self, asked: Mapping[str, SamplingRequest], should_yield: Callable[[], bool]
    ) -> SampleProgress:
        """See ``Backend.sample_until``.

        If the device has no room, evict all snapshots from it and try once more from the start:
        not in one of several processes, because the others would not.
        """
        try:
            return translate_device_errors(self._sample_until, asked, should_yield)
        except OutOfMemory:
            if not self._can_retry or not self.snapshots.leave_device():
                raise
        return self._sample_until(asked, should_yield)

    def _sample_until(
        self, asked: Mapping[str, SamplingRequest], should_yield: Callable[[], bool]
    ) -> SampleProgress:
        finished: dict[str, SampleResult | EngineError] = {}
        self._drop_all_but(asked)
        new: dict[str, RunningRequest] = {}
        for name in [name for name in asked if name not in self._running]:
            try:
                new[name] = self._new_request(asked[name])
            except EngineError as error:
                finished[name] = error
        self._running |= new
        self.counts.prompt_tokens += sum(run.sequences[0].context for run in new.values())
        # The longest of the new requests first: otherwise it would run alone in the end.
        sequences = [sequence for run in new.values() for sequence in run.sequences]
        for sequence in sorted(sequences, key=lambda sequence: -sequence.request.max_tokens):
            self._waiting.setdefault(_queue_key(sequence), deque()).append(sequence)
        self._held = {
            sequence.snapshot.name: sequence.snapshot
            for run in self._running.values()
            for sequence in run.sequences
        }
        self.snapshots.release_pins()
        runs = dict(self._running)
        before = {name: run.work for name, run in runs.items()}
        while self._running:
            self._advance()
            finished |= self._take_ended()
            if should_yield():
                break
        remaining = {name: run.remaining for name, run in self._running.items()}
        work = {name: run.work - before[name] for name, run in runs.items()}
        new_tokens = {
            name: run.take_new_tokens() for name, run in self._running.items() if asked[name].stream
        }
        return SampleProgress(
            finished, remaining, work, {name: each for name, each in new_tokens.items() if each}
        )

    def _take_ended(self) -> dict[str, SampleResult | EngineError]:
        """Return the results of running requests that have ended, or why they failed."""
        failed = {name: run.failure for name, run in self._running.items() if run.failure}
        for name in failed:
            self._drop(name)
        done = [name for name, run in self._running.items() if not run.remaining]
        return {**failed, **{name: self._running.pop(name).result() for name in done}}

    def _drop_all_but(self, asked: Collection[str]) -> None:
        """Drop running requests that are not in ``asked``."""
        # In order, so that pages are free in the same order in every process.
        for name in [name for name in self._running if name not in asked]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        for sequence in self._running.pop(name).sequences:
            queue = self._waiting.get(_queue_key(sequence), ())
            if sequence in queue:
                self._remove_waiting(_queue_key(sequence), sequence)
            else:
                self._batch_for(sequence.snapshot.rank_bucket).evict(sequence)

    def _advance(self) -> None:
        """Prefill a chunk of the prompts and decode a few tokens, for every rank bucket."""
        try:
            self._admit()
            for batch in self._decode_batches.values():
                while not batch.find_pages():
                    self._preempt(least=1)
                batch.advance()
        except BaseException:  # pages may be consumed: their content is lost
            self._forget_all()
            raise

    def _forget_all(self) -> None:
        """Drop all running requests and everything that the device holds for them."""
        self._cache = KvCache(self._programs, self._pages, self.snapshots, self.counts)
        self._decode_batches: dict[int, DecodeBatch] = {}
        self._waiting: dict[tuple[int, str], deque[DecodedSequence]] = {}
        self._running: dict[str, RunningRequest] = {}

    def _admit(self) -> None:
        """Give decode slots to waiting sequences.

        Owners without a decode slot are first. Within a rank bucket, the owner with the fewest
        decode slots is next, then first come, first served. An owner without a decode slot gets
        one, and the pages, from the owner with the most. If there are still too few pages for a
        sequence, all wait until there are. If there is no adapter slot for it, its owner waits: see
        ``_displace_adapter`` and ``_adapters_to_end``.
        """
        full: set[int] = set()
        blocked: set[tuple[int, str]] = set()  # owners whose next adapter finds no adapter slot
        ending: set[str] = set()
        while keys := [key for key in self._waiting if key[0] not in full and key not in blocked]:
            held = Counter(
                _queue_key(each)
                for batch in self._decode_batches.values()
                for each in batch.sequences
            )
            decoding = {owner for _, owner in held}
            key = min(keys, key=lambda key: (key[1] in decoding, held[key]))
            batch, sequence = self._batch_for(key[0]), self._waiting[key][0]
            if not batch.has_adapter_slot(sequence) and not held[key]:
                self._displace_adapter(batch)
                if not batch.has_adapter_slot(sequence):
                    ending |= self._adapters_to_end(batch)
            if not batch.has_adapter_slot(sequence) or sequence.snapshot.name in ending:
                blocked.add(key)
                continue
            if batch.is_full and not held[key]:
                self._displace(batch)
            is_admitted = batch.admit(sequence, self._growing)
            # This ends: each owner gets its first decode slot once, and no other loses its last.
            can_preempt = key[1] not in decoding and self._can_make_room(batch, sequence)
            while not is_admitted and can_preempt and self._preempt(least=2):
                is_admitted = batch.admit(sequence, self._growing)
            if is_admitted:
                self._remove_waiting(key, sequence)
                if key in self._waiting:  # among owners with equally many decode slots, rotate
                    self._waiting[key] = self._waiting.pop(key)
            elif batch.is_full:
                full.add(key[0])
            else:
                return

    @property
    def _growing(self) -> int:
        """The sequences, of all rank buckets, that may need another page: it is to be free."""
        size = self._static_shapes.block
        batches = self._decode_batches.values()
        return sum(each.grows(size) for batch in batches for each in batch.sequences)

    def _can_make_room(self, batch: DecodeBatch, sequence: DecodedSequence) -> bool:
        """Return whether a decode slot is free, and pages would suffice if every owner kept one
        sequence. Pages that sequences share count for each of them.
        """
        owners: dict[str, list[DecodedSequence]] = defaultdict(list)
        for each in self._decode_batches.values():
            for held in each.sequences:
                owners[held.request.owner].append(held)
        of_others = [
            len(held.prefix_pages) + len(held.private_pages)
            for mine in owners.values()
            for held in sorted(mine, key=lambda held: held.work)[:-1]
        ]
        size = self._static_shapes.block
        first = -(-sequence.context // size) + sequence.page_count(STEPS_PER_DISPATCH, size)
        needed = first + len(owners)  # each of which may need another page
        return not batch.is_full and needed <= self._cache.pool.room + sum(of_others)

    def _adapters_to_end(self, batch: DecodeBatch) -> set[str]:
        """Return a quarter of the adapters: those in use for the longest.

        An owner waits for an adapter slot, so no more sequences of these adapters start until one
        has ended. All others continue to fill the decode slots.
        """
        names = batch.adapters_in_use
        return set(names[: max(len(names) // 4, 1)])

    def _remove_waiting(self, key: tuple[int, str], sequence: DecodedSequence) -> None:
        """Remove the sequence from the waiting ones."""
        self._waiting[key].remove(sequence)
        if not self._waiting[key]:
            del self._waiting[key]

    def _preempt(self, *, least: int) -> bool:
        """Take the pages of the sequence with the least work done; it starts anew later.

        It is one of the owner with the most decode slots. Returns False if that owner has fewer
        than ``least``. Of several sequences, the one with the most work done is never chosen, and
        pages suffice for one, so every sequence ends.
        """
        running = [
            (batch, sequence)
            for batch in self._decode_batches.values()
            for sequence in batch.sequences
        ]
        owners = Counter(sequence.request.owner for _, sequence in running)
        ((owner, count),) = owners.most_common(1) or [("", 0)]
        if count < least:
            return False
        chosen = [each for each in running if count == 1 or each[1].request.owner == owner]
        self._restart(*min(chosen, key=lambda each: each[1].work))
        self.counts.preempted += 1
        return True

    def _displace(self, batch: DecodeBatch) -> None:
        """Take a decode slot from the owner with the most decode slots, if it has more than one.

        The owner's sequence with the least work done is restarted when its turn comes; its tokens
        will be the same.
        """
        owners = Counter(sequence.request.owner for sequence in batch.sequences)
        owner, count = owners.most_common(1)[0]
        if count == 1:
            return
        mine = [sequence for sequence in batch.sequences if sequence.request.owner == owner]
        self._restart(batch, min(mine, key=lambda sequence: sequence.work))

    def _displace_adapter(self, batch: DecodeBatch) -> None:
        """Take an adapter slot from the owner that alone uses the most, if it uses more than one.

        The sequences of its adapter with the least work done are restarted.
        """
        users = defaultdict(list)
        for sequence in batch.sequences:
            users[sequence.snapshot.name].append(sequence)
        alone: dict[str, list[list[DecodedSequence]]] = defaultdict(list)
        for sequences in users.values():
            owners = {sequence.request.owner for sequence in sequences}
            if len(owners) == 1:
                alone[owners.pop()].append(sequences)
        of_one = max(alone.values(), key=len, default=[])
        if len(of_one) < 2:
            return
        for loser in min(of_one, key=lambda each: sum(sequence.work for sequence in each)):
            self._restart(batch, loser)

    def _restart(self, batch: DecodeBatch, loser: DecodedSequence) -> None:
        """Take the sequence's place in the batch; it starts anew when its turn comes."""
        batch.evict(loser)
        anew = self._new_sequence(loser.request, loser.snapshot, loser.grammar, loser.sample)
        anew.cache_hits = loser.cache_hits
        for run in self._running.values():
            if loser in run.sequences:
                run.restart(loser, anew)
        self._waiting.setdefault(_queue_key(anew), deque()).appendleft(anew)

    def _batch_for(self, rank_bucket: int) -> DecodeBatch:
        if rank_bucket not in self._decode_batches:
            self._decode_batches[rank_bucket] = DecodeBatch(
                self._programs, self._cache, slots=self._slot_count, rank_bucket=rank_bucket
            )
        return self._decode_batches[rank_bucket]

    def _new_request(self, request: SamplingRequest) -> RunningRequest:
        request = within_limits(request, self._vocab_size)
        grammar = None if request.grammar is None else self.grammars.compiled(request.grammar)
        snapshot, count = self._snapshot(request.snapshot_id), request.num_samples
        new = partial(self._new_sequence, request, snapshot, grammar)
        return RunningRequest([new(sample) for sample in range(count)])

    def _new_sequence(
        self,
        request: SamplingRequest,
        snapshot: Snapshot,
        grammar: CompiledGrammar | None,
        sample: int,
    ) -> DecodedSequence:
        asks = sample == 0 and PromptLogprobs.are_requested(request)
        prompt_logprobs = PromptLogprobs(request, self._static_shapes.block) if asks else None
        return DecodedSequence(
            request, sample, snapshot, self._stop_criteria(request), prompt_logprobs, grammar
        )

    def _snapshot(self, snapshot_id: str | None) -> Snapshot:
        if snapshot_id is None:
            return self.snapshots.base_model
        snapshot = self.snapshots.get(snapshot_id) or self._held.get(snapshot_id)
        if snapshot is None:
            raise ServerError(f"snapshot {snapshot_id!r} is not loaded; load it again, then sample")
        return snapshot

    def _stop_criteria(self, request: SamplingRequest) -> StopCriteria:
        return StopCriteria(
            max_tokens=request.max_tokens,
            stop_tokens=request.stop_tokens,
            stop_strings=request.stop_strings,
            tokenizer=self._tokenizer,
        )


def _never() -> bool:
    return False


def _queue_key(sequence: DecodedSequence) -> tuple[int, str]:
    """Return the rank bucket and the owner of the sequence."""
    return sequence.snapshot.rank_bucket, sequence.request.owner


def _sampled(result: SampleResult | Exception) -> SampleResult:
    if isinstance(result, Exception):
        raise result
    return result


def _no_text() -> None:
    return None
