"""What requests give back."""

from dataclasses import dataclass, field
from typing import Literal

from tuneserve_client.data import Array

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TrainOutput:
    """Of ``forward_backward`` and ``forward``."""

    logprobs: list[Array] = field(repr=False)
    """Of each datum, shaped like its targets."""
    metrics: dict[str, float]

    @property
    def loss(self) -> float:
        """The sum over all tokens of all datums."""
        return self.metrics["loss:sum"]


@dataclass(frozen=True)
class StepOutput:
    """Of ``optim_step``."""

    metrics: dict[str, float]


@dataclass(frozen=True)
class Top:
    """The likeliest tokens of each position, best first; a row without an answer has token 0 with
    logprob -99999."""

    tokens: Array
    logprobs: Array


@dataclass(frozen=True)
class Sample:
    """One continuation. What stopped it is in ``tokens``, and left out of ``text``."""

    tokens: list[int]
    logprobs: Array = field(repr=False)
    stop_reason: StopReason
    top_logprobs: Top | None = field(default=None, repr=False)
    text: str | None = None
    """If the prompt was given as text."""


@dataclass(frozen=True)
class SampleOutput:
    """Of ``sample``: as many samples as were asked for, and scores of the prompt if any were."""

    samples: list[Sample]
    prompt_logprobs: Array | None = None
    """One for each token of the prompt, NaN where there is none, as for the first."""
    top_prompt_logprobs: Top | None = field(default=None, repr=False)
    target_logprobs: Array | None = field(default=None, repr=False)
    prompt_alternatives: Top | None = field(default=None, repr=False)
    cached_tokens: int = 0
    """Tokens of the prompt that were not read again."""

    @property
    def text(self) -> str | None:
        """Of the first sample."""
        return self.samples[0].text

    @property
    def tokens(self) -> list[int]:
        """Of the first sample."""
        return self.samples[0].tokens
