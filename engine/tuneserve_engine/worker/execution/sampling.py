"""``sample`` requests on a backend: all at once, in time slices, and one by one after a failure.

Clients that stream a sample get its tokens part by part.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from tuneserve_engine.backend.base import (
    DeviceFailed,
    SampledSequence,
    SampleProgress,
    SampleResult,
    SamplingRequest,
    TokenDelta,
)
from tuneserve_engine.core import jobs, recordings
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import EncodedTokenDelta, Job, Outcome
from tuneserve_engine.core.usage import FORWARD_FLOPS, Usage
from tuneserve_engine.worker.codecs import sampling
from tuneserve_engine.worker.execution.outcomes import (
    DeferredOutcome,
    attempt,
    failed_together,
    failure,
    protobuf,
)

logger = logging.getLogger(__name__)


def never() -> bool:
    return False


class Progress(NamedTuple):
    """The progress of a batch of samples after a slice.

    ``answers`` are those of the jobs that have ended, by request id; ``left`` and ``work`` are as
    in ``SampleProgress``; ``parts`` are the tokens drawn for streamed jobs that have not ended, by
    stream name.
    """

    answers: Mapping[str, DeferredOutcome]
    left: Mapping[str, int]
    work: Mapping[str, float]
    parts: Mapping[str, Sequence[EncodedTokenDelta]]


class RunningSamples:
    """The running samples of a backend.

    ``sample_for`` runs them, and ``ensure_snapshot`` loads the snapshot of a request. The only
    exception that escapes is ``DeviceFailed``.
    """

    def __init__(
        self,
        info: BaseModelInfo,
        sample_for: Callable[[Mapping[str, SamplingRequest], Callable[[], bool]], SampleProgress],
        ensure_snapshot: Callable[[str, str | None], None],
    ) -> None:
        self._info = info
        self._sample_for = sample_for
        self._ensure_snapshot = ensure_snapshot
        self._under_way: dict[str, _Sampling] = {}
        self._apart: list[str] = []  # requests of a failed pass, which run one by one
        self.have_listeners = False  # whether a client streams a running sample

    def go_on(self, unit: Sequence[Job], is_over: Callable[[], bool]) -> Progress:
        """Continue the jobs that are under way, and begin the others, until ``is_over``.

        Samples that are under way and not in the batch are given up. Samples of a pass that failed
        as a whole continue alone, one after the other.
        """
        before, self._under_way = self._under_way, {}
        answers: dict[str, DeferredOutcome] = {}
        for job in unit:
            try:
                self._under_way[job.request_id] = before.get(job.request_id) or self._begun(job)
            except Exception as error:
                answers[job.request_id] = partial(failure, job, error)
        self.have_listeners = any(each.request.stream for each in self._under_way.values())
        left: Mapping[str, int] = dict.fromkeys(self._under_way, 0)
        work: Counter[str] = Counter()
        parts: dict[str, list[EncodedTokenDelta]] = {}
        while left:
            given = self._pass({name: self._under_way[name].request for name in left}, is_over)
            for name, result in given.ended.items():
                answers[name] = self._under_way.pop(name).answer(result)
            left = given.left
            work.update(given.work)
            for name, drawn in given.drawn.items():
                if all(_is_finite(each) for each in drawn):  # the others fail: see ``_sampled``
                    heard = parts.setdefault(self._under_way[name].command.stream, [])
                    heard += [sampling.encode_part(each) for each in drawn]
            if not self._apart or is_over():
                break
        return Progress(answers, left, dict(work), parts)

    def _pass(
        self, asked: Mapping[str, SamplingRequest], is_over: Callable[[], bool]
    ) -> SampleProgress:
        """Run a pass of all requests, or of one while requests of a failed pass remain."""
        self._apart = [name for name in self._apart if name in asked]
        chosen = dict(asked) if not self._apart else {self._apart[0]: asked[self._apart[0]]}
        try:
            for name, request in chosen.items():  # another pass may have evicted the snapshot
                self._ensure_snapshot(name, request.snapshot_id)
            given = self._sample_for(chosen, is_over)
        except DeviceFailed:
            raise
        except Exception as error:
            if len(chosen) > 1:
                failed_together([self._under_way[name].job for name in chosen], error)
                self._apart = list(chosen)
                chosen = {}
            given = SampleProgress(dict.fromkeys(chosen, error), {}, {})
        waiting = {name: each.num_samples for name, each in asked.items() if name not in chosen}
        return replace(given, left={**waiting, **given.left})

    def _begun(self, job: Job) -> "_Sampling":
        command = jobs.decode(job.payload, jobs.SampleCommand)
        request = sampling.to_request(command, self._info)
        self._ensure_snapshot(job.request_id, request.snapshot_id)
        parameters = self._info.parameters
        return _Sampling(job, command, replace(request, owner=job.tenant), parameters)


@dataclass(frozen=True)
class _Sampling:
    """A running sample."""

    job: Job
    command: jobs.SampleCommand
    request: SamplingRequest
    parameters: int  # of the base model

    def answer(self, result: SampleResult | Exception) -> DeferredOutcome:
        if isinstance(result, Exception):
            return partial(failure, self.job, result)
        return partial(attempt, self.job, partial(self._sampled, result))

    def _sampled(self, result: SampleResult, job: Job) -> Outcome:
        usage = _usage(self.request, result, self.parameters)
        return replace(_sampled(self.command, result, job), usage=usage)


def _sampled(command: jobs.SampleCommand, result: SampleResult, job: Job) -> Outcome:
    if not all(_is_finite(each) for each in result.sequences):
        raise UserError(
            "the sampler's weights give logits that are not finite, so no token can be drawn; "
            "sample from a checkpoint saved before the training diverged"
        )
    outcome = protobuf(job, sampling.encode_response(command, result))
    if command.record and outcome.rejection is None:
        drawn = [(each.tokens, each.logprobs) for each in result.sequences]
        outcome = replace(outcome, recording=recordings.encode(len(command.prompt), drawn))
    return outcome


def _usage(request: SamplingRequest, result: SampleResult, parameters: int) -> Usage:
    prompt, drawn = len(request.prompt), sum(len(each.tokens) for each in result.sequences)
    read = prompt - result.prompt_cache_hit_tokens
    return Usage(
        prompt_tokens=prompt,
        sampled_tokens=drawn,
        flops=float(FORWARD_FLOPS * parameters * (read + drawn)),
    )


def _is_finite(drawn: TokenDelta | SampledSequence) -> bool:
    return bool(np.isfinite(drawn.logprobs).all())
