"""The results of requests."""

from dataclasses import dataclass, field
from typing import Literal

from tuneserve_client.data import Array

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TrainOutput:
    """The result of ``forward_backward`` and ``forward``."""

    logprobs: list[Array] = field(repr=False)
    """The logprobs of each datum, shaped like its targets."""
    metrics: dict[str, float]

    @property
    def loss(self) -> float:
        """The sum of the loss over all tokens of all datums."""
        return self.metrics["loss:sum"]


@dataclass(frozen=True)
class StepOutput:
    """The result of ``optim_step``."""

    metrics: dict[str, float]


@dataclass(frozen=True)
class Top:
    """The likeliest tokens of each position, best first.

    A row without an answer has token 0 with logprob -99999.
    """

    tokens: Array
    logprobs: Array


@dataclass(frozen=True)
class Sample:
    """One continuation. The stop that ended it is in ``tokens``, and left out of ``text``."""

    tokens: list[int]
    logprobs: Array = field(repr=False)
    stop_reason: StopReason
    top_logprobs: Top | None = field(default=None, repr=False)
    text: str | None = None
    """The text of the continuation, if the prompt was text or a conversation; else None."""


@dataclass(frozen=True)
class SampleOutput:
    """The result of ``sample``: the samples, and scores of the prompt if they were asked for."""

    samples: list[Sample]
    prompt_logprobs: Array | None = None
    """The logprob of each prompt token; NaN for tokens without one, such as the first."""
    top_prompt_logprobs: Top | None = field(default=None, repr=False)
    target_logprobs: Array | None = field(default=None, repr=False)
    prompt_alternatives: Top | None = field(default=None, repr=False)
    cached_tokens: int = 0
    """The number of prompt tokens that came from the prompt cache."""

    @property
    def text(self) -> str | None:
        """The text of the first sample."""
        return self.samples[0].text

    @property
    def tokens(self) -> list[int]:
        """The tokens of the first sample."""
        return self.samples[0].tokens
