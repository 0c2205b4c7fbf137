"""``forward_backward`` requests on a backend, in as few passes as possible; more if one fails."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from tuneserve_engine.backend.base import (
    Backend,
    DeviceFailed,
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
    failed_together,
    protobuf,
)
from tuneserve_engine.worker.execution.packing import PackedBatch, PackingRequest, pack, unpack
from tuneserve_engine.worker.scheduling.pace import Pace

logger = logging.getLogger(__name__)

MAX_HALVINGS = 3
"""The number of times that a request's micro-batches are halved, if that shortens them, before the
request fails for lack of device memory."""


class GradientRequest(NamedTuple):
    """A job, and the request in its payload."""

    job: Job
    request: PackingRequest


Results = dict[str, DeferredOutcome | Exception]
"""By request id: the answer of a job, or the error because of which it accumulated nothing."""


class FinishedPass(NamedTuple):
    """The finished pass of a request, and its number ``member`` in the pass."""

    packed: PackedBatch
    result: TrainResult
    member: int
    halvings: int
    parameters: int  # of the base model


Passes = dict[str, FinishedPass | Exception]
"""By request id: its finished pass, or the error because of which it accumulated nothing."""


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
    ) -> Results:
        """Return every request's result; see ``run_passes``."""
        passes = self.run_passes(requests, on_micro_batch_done, halvings)
        results: Results = {}
        for job, request in requests:
            finished = passes[job.request_id]
            if not isinstance(finished, Exception):
                results[job.request_id] = deferred(finished, request.data, job)
            else:
                results[job.request_id] = finished
        return results

    def run_passes(
        self,
        requests: Sequence[GradientRequest],
        on_micro_batch_done: Callable[[], None],
        halvings: int,
        full: _OutOfRoom | None = None,
    ) -> Passes:
        """Return every request's finished pass.

        A pass that fails as a whole has accumulated nothing, so its requests run again; requests of
        other passes must not.
        """
        try:
            to_pack = [each.request for each in requests]
            shapes, at_once = self.backend.static_shapes, self.backend.micro_batches_at_once
            passes = pack(to_pack, shapes, halvings, self.pace.tokens, at_once)
        except Exception as error:
            return self._run_alone(requests, on_micro_batch_done, halvings, error)
        results: Passes = {}
        for packed in passes:
            members = [requests[i] for i in packed.members]
            if full is not None and packed.length == full.tokens:  # halving shortened nothing
                return {requests[0].job.request_id: full.error}
            parts = {
                each.job.request_id: computed
                for each, computed in zip(members, packed.computed, strict=True)
            }
            started_s = self.timer.now_s()
            try:
                with self.timer.charge(parts):
                    result = self.backend.forward_backward(packed.batch, on_micro_batch_done)
            except DeviceFailed:
                raise
            except Exception as error:
                results |= self._run_alone(
                    members, on_micro_batch_done, halvings, error, packed.length
                )
                continue
            seconds = self.timer.now_s() - started_s
            tokens = packed.paced_tokens
            self.pace.learn(packed.batch.forward_only, packed.datum_tokens, tokens, seconds)

            parameters = self.backend.info.parameters
            for i, (job, _) in enumerate(members):
                if result.finite[i]:
                    finished = FinishedPass(packed, result, i, halvings, parameters)
                    results[job.request_id] = finished
                else:
                    results[job.request_id] = UserError(
                        "the loss or its gradient is not finite; nothing was accumulated; check "
                        "the learning rate, advantages and logprobs, or load an earlier checkpoint"
                    )
        return results

    def _run_alone(
        self,
        requests: Sequence[GradientRequest],
        on_micro_batch_done: Callable[[], None],
        halvings: int,
        error: Exception,
        tokens: int = 0,
    ) -> Passes:
        """Run each request of a failed pass alone.

        A request that was alone runs in shorter micro-batches if the device had no room for it.
        """
        if len(requests) > 1:
            failed_together([each.job for each in requests], error)
            results: Passes = {}
            for each in requests:
                results |= self.run_passes([each], on_micro_batch_done, halvings)
            return results
        job = requests[0].job
        if isinstance(error, OutOfMemory) and halvings < MAX_HALVINGS:
            message = "no room for %s, halved %d times: %s"
            logger.warning(message, job.kind, halvings, error, extra=logs.job_fields(job))
            full = _OutOfRoom(error, tokens)
            return self.run_passes(requests, on_micro_batch_done, halvings + 1, full)
        return {job.request_id: error}


def deferred(finished: FinishedPass, data: TrainingData, job: Job) -> DeferredOutcome:
    """Return the answer of a request whose pass has finished, to be made later."""
    return partial(encode_result, finished, data, job)


def encode_result(finished: FinishedPass, data: TrainingData, job: Job) -> Outcome:
    """Return the outcome of a request whose pass has finished: its logprobs, loss and metrics."""
    packed, member = finished.packed, finished.member
    logprobs, loss = unpack(packed, finished.result.outputs, member, data)
    metrics: dict[str, float] = {}
    if data.loss == provenance.LOSS:
        inputs = [datum.per_token for datum in data.data]
        metrics = provenance.metrics(
            zip(logprobs, inputs, strict=True), data.config["clip_high_threshold"]
        )
    flops = FORWARD_FLOPS + (0 if data.forward_only else BACKWARD_FLOPS)  # per parameter and token
    weight = float(sum(datum.weights.sum(dtype="f8") for datum in data.data))
    if data.computed is not None:  # the weights are a gradient, and a forward pass came before
        loss, metrics, weight = data.computed.loss, data.computed.metrics, 0.0
        flops += 0 if data.forward_only else FORWARD_FLOPS
    outcome = protobuf(job, training.encode_output(logprobs, loss, metrics))

    tokens = sum(len(datum.tokens) for datum in data.data)
    usage = Usage(
        trained_tokens=tokens,
        padded_tokens=max(round(packed.computed[member]) - tokens, 0),
        flops=float(flops * finished.parameters * tokens),
    )
    point = None
    if job.position is not None:
        point = CurvePoint(
            "forward" if data.forward_only else "forward_backward",
            job.position,
            loss_sum=loss,
            tokens=tokens,
            weight=weight,
        )
    return replace(
        outcome,
        changed=not data.forward_only,
        halvings=finished.halvings,
        usage=usage,
        point=point,
    )
