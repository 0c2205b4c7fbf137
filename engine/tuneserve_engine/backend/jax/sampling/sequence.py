"""A sequence that is being sampled, from its prompt to its last token, and those of a request."""

from dataclasses import dataclass, field, replace

import numpy as np

from tuneserve_engine.backend.base import (
    PROMPT_TOKENS_PER_STEP,
    FloatArray,
    IntArray,
    SampledSequence,
    SampleResult,
    SamplingRequest,
    TokenDelta,
    TopK,
)
from tuneserve_engine.backend.jax.sampling.grammars import CompiledGrammar
from tuneserve_engine.backend.jax.sampling.kv_pages import PrefixPage
from tuneserve_engine.backend.jax.sampling.logits import AnyArray
from tuneserve_engine.backend.jax.sampling.prompt_logprobs import PromptLogprobs
from tuneserve_engine.backend.jax.sampling.snapshots import Snapshot
from tuneserve_engine.backend.jax.sampling.stop_criteria import StopCriteria, StopReason
from tuneserve_engine.core.errors import EngineError


@dataclass(eq=False)
class DecodedSequence:
    """A sequence being sampled.

    Its prompt except the last token is prefilled into ``prefix_pages``; what follows goes to its
    ``private_pages`` pages. ``prompt_logprobs`` collects what is asked about the prompt.
    """

    request: SamplingRequest
    sample: int
    snapshot: Snapshot
    stop_criteria: StopCriteria
    prompt_logprobs: PromptLogprobs | None = None
    grammar: CompiledGrammar | None = None
    prefix_pages: list[PrefixPage] = field(default_factory=list)
    private_pages: list[int] = field(default_factory=list)
    read: int = 0  # number of parts that are prefilled
    prefilled_tokens: int = 0  # tokens prefilled for this sequence
    cache_hits: int | None = None  # tokens in the cache when the sequence first got a decode slot
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[AnyArray, AnyArray]] = field(default_factory=list)
    reported: int = 0  # tokens that ``take_new_tokens`` has returned
    stop_reason: StopReason | None = None
    failure: EngineError | None = None  # why it cannot go on

    @property
    def has_ended(self) -> bool:
        return self.stop_reason is not None or self.failure is not None

    @property
    def context(self) -> int:
        """Tokens to prefill before the first is drawn: decoding begins with the last one."""
        return len(self.request.prompt) - 1

    def page_count(self, positions: int, size: int) -> int:
        """Return the pages of its own that it needs for the first ``positions`` drawn tokens.

        The prompt's last token takes the first of these positions.
        """
        positions = min(positions, self.request.max_tokens)
        last = self.context + positions - 1
        return last // size - self.context // size + 1 if positions else 0

    def grows(self, size: int) -> bool:
        """Whether it may need more pages of its own than it has."""
        return len(self.private_pages) < self.page_count(self.request.max_tokens, size)

    def push(self, token: int, logprob: float, top: tuple[AnyArray, AnyArray] | None) -> bool:
        """Append the next token. Returns True if it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.top.append(top)
        self.stop_reason = self.stop_criteria.push(token)
        return self.stop_reason is not None

    @property
    def work(self) -> float:
        """The work done for the sequence: see ``SampleProgress``."""
        return len(self.tokens) + self.prefilled_tokens / PROMPT_TOKENS_PER_STEP

    def result(self) -> SampledSequence:
        assert self.stop_reason is not None, "a sequence was left unfinished"
        tokens, logprobs, top = self._since(0)
        return SampledSequence(tokens, logprobs, self.stop_reason, top)

    def take_new_tokens(self) -> TokenDelta | None:
        """Return what was drawn since the previous call; None if nothing was."""
        start, self.reported = self.reported, len(self.tokens)
        return (
            TokenDelta(self.sample, start, *self._since(start)) if start < self.reported else None
        )

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
class RunningRequest:
    """A request that has not ended."""

    sequences: list[DecodedSequence]
    lost: float = 0.0  # work on sequences that were restarted

    @property
    def remaining(self) -> int:
        """The number of sequences that have not ended."""
        return sum(sequence.stop_reason is None for sequence in self.sequences)

    @property
    def failure(self) -> EngineError | None:
        """The reason for which a sequence cannot go on, if there is one."""
        return next((each.failure for each in self.sequences if each.failure), None)

    @property
    def work(self) -> float:
        return self.lost + sum(sequence.work for sequence in self.sequences)

    def take_new_tokens(self) -> list[TokenDelta]:
        """Return what was drawn since the previous call."""
        found = [sequence.take_new_tokens() for sequence in self.sequences]
        return [each for each in found if each is not None]

    def restart(self, sequence: DecodedSequence, anew: DecodedSequence) -> None:
        self.lost += sequence.work
        self.sequences[self.sequences.index(sequence)] = anew

    def result(self) -> SampleResult:
        first = self.sequences[0]
        scores = (
            SampleResult(()) if first.prompt_logprobs is None else first.prompt_logprobs.result()
        )
        return replace(
            scores,
            sequences=tuple(sequence.result() for sequence in self.sequences),
            prompt_cache_hit_tokens=first.cache_hits or 0,
        )
