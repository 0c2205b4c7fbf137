"""``forward_backward`` requests on a backend, in as few passes as possible; more if one fails."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from tuneserve_engine.backend.base import (
    DeviceFailed,
    FloatArray,
    Lattice,
    OutOfMemory,
    TrainBatch,
    TrainResult,
)
from tuneserve_engine.core import provenance
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import Job, Outcome
from tuneserve_engine.core.usage import BACKWARD_FLOPS, FORWARD_FLOPS, CurvePoint, Usage
from tuneserve_engine.telemetry import logs
from tuneserve_engine.worker.codecs import training
from tuneserve_engine.worker.codecs.training import TrainingData
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
"""The number of times that a request's streams are halved, if that shortens them, before the
request fails for lack of device memory."""


@dataclass(frozen=True)
class GradientRequest:
    """A job, and the request in its payload."""

    job: Job
    request: PackingRequest


Results = dict[str, DeferredOutcome | Exception]
"""By request id: the answer of a job, or the error because of which it accumulated nothing."""


class _OutOfRoom(NamedTuple):
    """The error of a request that ran alone, and the stream length that did not fit the memory."""

    error: Exception
    tokens: int


@dataclass(frozen=True)
class GradientRunner:
    """A runner of ``forward_backward`` requests.

    ``run`` runs a batch on the device, and gets the number of tokens computed for each request.
    The only exception that escapes is ``DeviceFailed``. ``parameters`` is the number of parameters
    of the base model; ``pace`` says how long a micro-batch may be.
    """

    run: Callable[[TrainBatch, Mapping[str, float]], TrainResult]
    lattice: Lattice
    parameters: int = 0
    pace: Pace = field(default_factory=Pace)

    def of(
        self, asked: Sequence[GradientRequest], halvings: int, full: _OutOfRoom | None = None
    ) -> Results:
        """Return every request's result.

        A pass that fails as a whole has accumulated nothing, so its requests run again; requests of
        other passes must not.
        """
        try:
            requests = [each.request for each in asked]
            passes = pack(requests, self.lattice, halvings, self.pace.tokens)
        except Exception as error:
            return self._again(asked, halvings, error)
        results: Results = {}
        for packed in passes:
            members = [asked[i] for i in packed.members]
            tokens = packed.unit.batches[0].tokens.size
            if full is not None and tokens == full.tokens:  # the streams did not get shorter
                return {asked[0].job.request_id: full.error}
            try:
                result = self.run(
                    packed.unit, dict(zip(_ids(members), packed.computed, strict=True))
                )
            except DeviceFailed:
                raise
            except Exception as error:
                results |= self._again(members, halvings, error, tokens)
            else:
                for i, each in enumerate(members):
                    usage = self._usage(each.request.data, packed.computed[i])
                    ran = _FinishedPass(packed, result, i, halvings, usage)
                    results[each.job.request_id] = _result(each, ran)
        return results

    def _usage(self, data: TrainingData, computed: float) -> Usage:
        tokens = _tokens(data)
        per_token = FORWARD_FLOPS + (0 if data.forward_only else BACKWARD_FLOPS)
        return Usage(
            trained_tokens=tokens,
            padded_tokens=max(round(computed) - tokens, 0),
            flops=float(per_token * self.parameters * tokens),
        )

    def _again(
        self, asked: Sequence[GradientRequest], halvings: int, error: Exception, tokens: int = 0
    ) -> Results:
        """Run each request alone.

        A request that was alone runs in shorter streams if the device had no room for it.
        """
        if len(asked) > 1:
            failed_together([each.job for each in asked], error)
            results: Results = {}
            for each in asked:
                results |= self.of([each], halvings)
            return results
        job = asked[0].job
        if isinstance(error, OutOfMemory) and halvings < MAX_HALVINGS:
            message = "no room for %s, halved %d times: %s"
            logger.warning(message, job.kind, halvings, error, extra=logs.of(job))
            return self.of(asked, halvings + 1, _OutOfRoom(error, tokens))
        return {job.request_id: error}


class _FinishedPass(NamedTuple):
    """The finished pass of a request, its number ``member`` in the pass, and its usage."""

    packed: PackedBatch
    result: TrainResult
    member: int
    halvings: int
    usage: Usage


def _ids(asked: Sequence[GradientRequest]) -> list[str]:
    return [each.job.request_id for each in asked]


def _tokens(data: TrainingData) -> int:
    return sum(len(datum.tokens) for datum in data.data)


def _result(asked: GradientRequest, ran: _FinishedPass) -> DeferredOutcome | Exception:
    if not ran.result.finite[ran.member]:
        return UserError(
            "the loss or its gradient is not finite; nothing was accumulated; check the learning "
            "rate, advantages and logprobs, or load an earlier checkpoint"
        )

    def trained(job: Job) -> Outcome:
        data = asked.request.data
        logprobs, loss = unpack(ran.packed, ran.result.outputs, ran.member, data)
        metrics = _metrics(data, logprobs)
        outcome = protobuf(job, training.encode_output(logprobs, loss, metrics))
        return replace(
            outcome,
            changed=not data.forward_only,
            halvings=ran.halvings,
            usage=ran.usage,
            point=_point(job, data, loss),
        )

    return partial(attempt, asked.job, trained)


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
