"""``sample`` requests on a backend: all at once, in time slices, and one by one after a failure.

Clients that stream a sample get its tokens part by part.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tuneserve_engine.backend.base import (
    Backend,
    DeviceFailed,
    SampledSequence,
    SampleProgress,
    SampleResult,
    SamplingRequest,
    TokenDelta,
)
from tuneserve_engine.core import jobs, recordings
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import EncodedTokenDelta, Job, Outcome
from tuneserve_engine.core.usage import FORWARD_FLOPS, Usage
from tuneserve_engine.worker.codecs import sampling
from tuneserve_engine.worker.execution.device_timer import DeviceTimer
from tuneserve_engine.worker.execution.outcomes import (
    BatchResult,
    DeferredOutcome,
    failed_together,
    failure,
    protobuf,
)
from tuneserve_engine.worker.execution.read_ahead import ReadSnapshots, snapshot_of
from tuneserve_engine.worker.execution.rescoring import Rescoring

logger = logging.getLogger(__name__)


def never() -> bool:
    return False


class RunningSamples:
    """The running samples of a backend.

    ``snapshots`` has, or reads, the states of the snapshots. With ``rescoring``, the results carry
    the logprobs of training. The only exception that escapes is ``DeviceFailed``.
    """

    def __init__(
        self,
        backend: Backend,
        timer: DeviceTimer,
        snapshots: ReadSnapshots,
        rescoring: Rescoring | None,
    ) -> None:
        self._backend = backend
        self._timer = timer
        self._snapshots = snapshots
        self._rescoring = rescoring
        self._running: dict[str, _Sampling] = {}
        self._one_by_one: list[str] = []  # requests of a failed pass, which run one by one
        self.has_streams = False  # whether a client streams a running sample

    def advance(self, batch: Sequence[Job], should_yield: Callable[[], bool]) -> BatchResult:
        """Continue the running jobs, and begin the others, until ``should_yield``.

        Running samples that are not in the batch are given up. Samples of a pass that failed as a
        whole continue alone, one after the other.
        """
        before, self._running = self._running, {}
        answers: dict[str, DeferredOutcome] = {}
        for job in batch:
            try:
                self._running[job.request_id] = before.get(job.request_id) or self._begun(job)
            except Exception as error:
                answers[job.request_id] = partial(failure, job, error)
        self.has_streams = any(each.request.stream for each in self._running.values())
        remaining: Mapping[str, int] = dict.fromkeys(self._running, 0)
        work: Counter[str] = Counter()
        new_tokens: dict[str, list[EncodedTokenDelta]] = {}
        while remaining:
            requests = {name: self._running[name].request for name in remaining}
            progress = self._run_pass(requests, should_yield)
            for name, result in progress.finished.items():
                answers[name] = self._running.pop(name).answer(result)
            remaining = progress.remaining
            work.update(progress.work)
            for name, deltas in progress.new_tokens.items():
                if all(_is_finite(each) for each in deltas):  # the others fail: see ``_sampled``
                    stream = new_tokens.setdefault(self._running[name].command.stream, [])
                    stream += [sampling.encode_part(each) for each in deltas]
            if not self._one_by_one or should_yield():
                break
        if self._rescoring is not None:  # the tokens so far have other logprobs than the result
            new_tokens = {}
        ended = [job for job in batch if job.request_id in answers]
        ready = [answers[job.request_id] for job in ended]
        return BatchResult(ended, ready, remaining, dict(work), new_tokens)

    def _run_pass(
        self, asked: Mapping[str, SamplingRequest], should_yield: Callable[[], bool]
    ) -> SampleProgress:
        """Run a pass of all requests, or of one while requests of a failed pass remain."""
        self._one_by_one = [name for name in self._one_by_one if name in asked]
        chosen = dict(asked)
        if self._one_by_one:
            chosen = {self._one_by_one[0]: asked[self._one_by_one[0]]}
        try:
            for name, request in chosen.items():  # another pass may have evicted the snapshot
                self._ensure_snapshot(name, request.snapshot_id)
            with self._timer.charge() as parts:
                progress = self._backend.sample_until(chosen, should_yield)
                parts.update(progress.work)
            if self._rescoring is not None:
                rescored = self._rescoring.rescore(chosen, progress.finished)
                progress = replace(progress, finished=rescored)
        except DeviceFailed:
            raise
        except Exception as error:
            if len(chosen) > 1:
                failed_together([self._running[name].job for name in chosen], error)
                self._one_by_one = list(chosen)
                chosen = {}
            progress = SampleProgress(dict.fromkeys(chosen, error), {}, {})
        waiting = {name: each.num_samples for name, each in asked.items() if name not in chosen}
        return replace(progress, remaining={**waiting, **progress.remaining})

    def _ensure_snapshot(self, request_id: str, snapshot_id: str | None) -> None:
        if snapshot_id is not None and not self._backend.has_snapshot(snapshot_id):
            state = self._snapshots.take_state(snapshot_id)
            with self._timer.charge({request_id: 1.0}):
                # The arrays of a training checkpoint are those of its own adapter kind.
                self._backend.load_snapshot(snapshot_id, self._backend.exported(state))

    def _begun(self, job: Job) -> "_Sampling":
        is_loaded = False
        try:
            command = jobs.decode(job.payload, jobs.SampleCommand)
            request = sampling.to_request(command, self._backend.info)
            self._ensure_snapshot(job.request_id, request.snapshot_id)
            is_loaded = True
        finally:
            file_id = snapshot_of(job)
            if file_id is not None:
                self._snapshots.note_begun(job.request_id, file_id, is_loaded=is_loaded)
        parameters = self._backend.info.parameters
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
        return partial(self._sampled, result)

    def _sampled(self, result: SampleResult) -> Outcome:
        usage = _usage(self.request, result, self.parameters)
        return replace(_sampled(self.command, result, self.job), usage=usage)


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
