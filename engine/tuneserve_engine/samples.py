"""``sample`` requests on a backend: all at once, in parts, and each alone where that fails. Who
listens to one is told of it part by part."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from tuneserve_engine import jobs, sampling_wire
from tuneserve_engine.adapters import BaseModelInfo
from tuneserve_engine.backend.base import (
    DeviceFailed,
    Drawn,
    Sampled,
    SampledSequence,
    SampleRequest,
    SampleResult,
)
from tuneserve_engine.errors import UserError
from tuneserve_engine.jobs import Job, Outcome, Part
from tuneserve_engine.outcomes import Answer, attempt, failed_together, failure, protobuf

logger = logging.getLogger(__name__)


def never() -> bool:
    return False


class Progress(NamedTuple):
    """``answers`` of the jobs that have ended, by request id; ``given`` is what the backend did;
    ``parts`` are for those who listen to the other jobs, by the names of their streams."""

    answers: Mapping[str, Answer]
    given: Sampled
    parts: Mapping[str, Sequence[Part]]


class Samples:
    """Those on their way on a backend, which runs them by ``sample_for``. Lets nothing escape but
    ``DeviceFailed``."""

    def __init__(
        self,
        info: BaseModelInfo,
        sample_for: Callable[[Mapping[str, SampleRequest], Callable[[], bool]], Sampled],
        ensure_snapshot: Callable[[str | None], None],
    ) -> None:
        self._info = info
        self._sample_for = sample_for
        self._ensure_snapshot = ensure_snapshot
        self._under_way: dict[str, _Sampling] = {}
        self.have_listeners = False  # whether anybody waits for tokens of those that go on

    def go_on(self, unit: Sequence[Job], is_over: Callable[[], bool]) -> Progress:
        """Goes on with those of the jobs that are under way, and begins the others, until
        ``is_over``; gives up those that are under way and not in the unit. If the pass fails as a
        whole, each runs alone, to its end."""
        before, self._under_way = self._under_way, {}
        answers: dict[str, Answer] = {}
        for job in unit:
            try:
                self._under_way[job.request_id] = before.get(job.request_id) or self._begun(job)
            except Exception as error:
                answers[job.request_id] = partial(failure, job, error)
        asked = {name: each.request for name, each in self._under_way.items()}
        self.have_listeners = any(request.stream for request in asked.values())
        try:
            given = self._sample_for(asked, is_over)
        except DeviceFailed:
            raise
        except Exception as error:
            given = self._alone(asked, error)
        for name, result in given.ended.items():
            answers[name] = self._under_way.pop(name).answer(result)
        parts = {
            self._under_way[name].command.stream: [
                sampling_wire.encode_part(each) for each in drawn
            ]
            for name, drawn in given.drawn.items()
            if all(_is_finite(each) for each in drawn)  # else it will fail: see ``_sampled``
        }
        return Progress(answers, given, parts)

    def _begun(self, job: Job) -> "_Sampling":
        command = jobs.decode(job.payload, jobs.Sample)
        request = sampling_wire.to_request(command, self._info)
        self._ensure_snapshot(request.snapshot_id)
        return _Sampling(job, command, replace(request, owner=job.tenant))

    def _alone(self, asked: Mapping[str, SampleRequest], error: Exception) -> Sampled:
        """What each gives by itself, after all together failed."""
        if len(asked) == 1:
            return Sampled(dict.fromkeys(asked, error), {}, {})
        failed_together([each.job for each in self._under_way.values()], error)
        ended: dict[str, SampleResult | Exception] = {}
        for name, request in asked.items():
            try:
                self._ensure_snapshot(request.snapshot_id)
                ended |= self._sample_for({name: request}, never).ended
            except DeviceFailed:
                raise
            except Exception as alone:
                ended[name] = alone
        return Sampled(ended, {}, {})


@dataclass(frozen=True)
class _Sampling:
    """A sample on its way."""

    job: Job
    command: jobs.Sample
    request: SampleRequest

    def answer(self, result: SampleResult | Exception) -> Answer:
        if isinstance(result, Exception):
            return partial(failure, self.job, result)
        return partial(attempt, self.job, partial(_sampled, self.command, result))


def _sampled(command: jobs.Sample, result: SampleResult, job: Job) -> Outcome:
    if not all(_is_finite(each) for each in result.sequences):
        raise UserError(
            "the sampler's weights give logits that are not finite, so no token can be drawn; "
            "sample from a checkpoint saved before the training diverged"
        )
    return protobuf(job, sampling_wire.encode_response(command, result))


def _is_finite(drawn: Drawn | SampledSequence) -> bool:
    return bool(np.isfinite(drawn.logprobs).all())
