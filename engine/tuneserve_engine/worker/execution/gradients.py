"""``forward_backward`` requests on a backend, in as few passes as possible; more if one fails."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from tuneserve_engine.backend.base import (
    Backend,
    DeviceFailed,
    FloatArray,
    OutOfMemory,
    TrainResult,
)
from tuneserve_engine.core import provenance
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import Job, Outcome
from tuneserve_engine.core.usage import BACKWARD_FLOPS, FORWARD_FLOPS, CurvePoint, Usage
from tuneserve_engine.telemetry import logs
from tuneserve_engine.worker.codecs import training
from tuneserve_engine.worker.codecs.training import TrainingData
from tuneserve_engine.worker.execution.device_timer import DeviceTimer
from tuneserve_engine.worker.execution.outcomes import (
    DeferredOutcome,
    attempt,
    failed_together,
    protobuf,
)
from tuneserve_engine.worker.execution.packing import PackedBatch, PackingRequest, pack, unpack
from tuneserve_engine.worker.scheduling.pace import Pace

logger = logging.getLogger(__name__)

MAX_HALVINGS = 3
"""The number of times that a request's micro-batches are halved, if that shortens them, before the
request fails for lack of device memory."""


@dataclass(frozen=True)
class GradientRequest:
    """A job, and the request in its payload."""

    job: Job
    request: PackingRequest


Results = dict[str, DeferredOutcome | Exception]
"""By request id: the answer of a job, or the error because of which it accumulated nothing."""


class _OutOfRoom(NamedTuple):
    """The error of a request that ran alone, and the micro-batch length that had no room."""

    error: Exception
    tokens: int


@dataclass(frozen=True)
class GradientRunner:
    """A runner of ``forward_backward`` requests on a backend.

    The only exception that escapes is ``DeviceFailed``. ``pace`` says how long a micro-batch may
    be, and learns from every pass.
    """

    backend: Backend
    timer: DeviceTimer
    pace: Pace

    def run_requests(
        self,
        requests: Sequence[GradientRequest],
        on_micro_batch_done: Callable[[], None],
        halvings: int,
        full: _OutOfRoom | None = None,
    ) -> Results:
        """Return every request's result.

        A pass that fails as a whole has accumulated nothing, so its requests run again; requests of
        other passes must not.
        """
        try:
            to_pack = [each.request for each in requests]
            passes = pack(to_pack, self.backend.static_shapes, halvings, self.pace.tokens.get)
        except Exception as error:
            return self._run_alone(requests, on_micro_batch_done, halvings, error)
        results: Results = {}
        for packed in passes:
            members = [requests[i] for i in packed.members]
            tokens = packed.batch.micro_batches[0].tokens.size
            if full is not None and tokens == full.tokens:  # halving did not shorten anything
                return {requests[0].job.request_id: full.error}
            computed = dict(zip(_ids(members), packed.computed, strict=True))
            started_s = self.timer.now_s()
            try:
                with self.timer.charge(computed):
                    result = self.backend.forward_backward(packed.batch, on_micro_batch_done)
            except DeviceFailed:
                raise
            except Exception as error:
                results |= self._run_alone(members, on_micro_batch_done, halvings, error, tokens)
                continue
            seconds = self.timer.now_s() - started_s
            self.pace.learn(packed.batch.forward_only, sum(packed.computed), seconds)
            for i, each in enumerate(members):
                usage = self._usage(each.request.data, packed.computed[i])
                finished = _FinishedPass(packed, result, i, halvings, usage)
                results[each.job.request_id] = _deferred_outcome(each, finished)
        return results

    def _usage(self, data: TrainingData, computed: float) -> Usage:
        tokens = _tokens(data)
        per_token = FORWARD_FLOPS + (0 if data.forward_only else BACKWARD_FLOPS)
        return Usage(
            trained_tokens=tokens,
            padded_tokens=max(round(computed) - tokens, 0),
            flops=float(per_token * self.backend.info.parameters * tokens),
        )

    def _run_alone(
        self,
        requests: Sequence[GradientRequest],
        on_micro_batch_done: Callable[[], None],
        halvings: int,
        error: Exception,
        tokens: int = 0,
    ) -> Results:
        """Run each request of a failed pass alone.

        A request that was alone runs in shorter micro-batches if the device had no room for it.
        """
        if len(requests) > 1:
            failed_together([each.job for each in requests], error)
            results: Results = {}
            for each in requests:
                results |= self.run_requests([each], on_micro_batch_done, halvings)
            return results
        job = requests[0].job
        if isinstance(error, OutOfMemory) and halvings < MAX_HALVINGS:
            message = "no room for %s, halved %d times: %s"
            logger.warning(message, job.kind, halvings, error, extra=logs.job_fields(job))
            full = _OutOfRoom(error, tokens)
            return self.run_requests(requests, on_micro_batch_done, halvings + 1, full)
        return {job.request_id: error}


class _FinishedPass(NamedTuple):
    """The finished pass of a request, its number ``member`` in the pass, and its usage."""

    packed: PackedBatch
    result: TrainResult
    member: int
    halvings: int
    usage: Usage


def _ids(requests: Sequence[GradientRequest]) -> list[str]:
    return [each.job.request_id for each in requests]


def _tokens(data: TrainingData) -> int:
    return sum(len(datum.tokens) for datum in data.data)


def _deferred_outcome(
    asked: GradientRequest, finished: _FinishedPass
) -> DeferredOutcome | Exception:
    if not finished.result.finite[finished.member]:
        return UserError(
            "the loss or its gradient is not finite; nothing was accumulated; check the learning "
            "rate, advantages and logprobs, or load an earlier checkpoint"
        )

    return partial(attempt, asked.job, partial(encode_result, finished, asked.request.data))


def encode_result(finished: _FinishedPass, data: TrainingData, job: Job) -> Outcome:
    """Return the outcome of a request whose pass has finished: its logprobs, loss and metrics."""
    logprobs, loss = unpack(finished.packed, finished.result.outputs, finished.member, data)
    outcome = protobuf(job, training.encode_output(logprobs, loss, _metrics(data, logprobs)))
    return replace(
        outcome,
        changed=not data.forward_only,
        halvings=finished.halvings,
        usage=finished.usage,
        point=_point(job, data, loss),
    )


def _metrics(data: TrainingData, logprobs: Sequence[FloatArray]) -> dict[str, float]:
    """Return the metrics of the loss besides its sum."""
    if data.loss != provenance.LOSS:
        return {}
    inputs = [datum.per_token for datum in data.data]
    return provenance.metrics(
        zip(logprobs, inputs, strict=True), data.config["clip_high_threshold"]
    )


def _point(job: Job, data: TrainingData, loss: float) -> CurvePoint | None:
    if job.position is None:
        return None
    return CurvePoint(
        "forward" if data.forward_only else "forward_backward",
        job.position,
        loss_sum=loss,
        tokens=_tokens(data),
        weight=float(sum(datum.weights.sum(dtype="f8") for datum in data.data)),
    )
