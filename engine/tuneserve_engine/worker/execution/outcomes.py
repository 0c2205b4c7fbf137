"""The outcomes of jobs, from results and failures."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tuneserve_engine.backend.base import DeviceFailed, OutOfMemory
from tuneserve_engine.core.errors import EngineError, ServerError, UserError
from tuneserve_engine.core.jobs import (
    MAX_BODY_BYTES,
    PROTOBUF,
    EncodedTokenDelta,
    Job,
    JobKind,
    Outcome,
    Rejection,
)
from tuneserve_engine.core.records import ModelStatus, Update
from tuneserve_engine.core.usage import CurvePoint
from tuneserve_engine.telemetry import logs

logger = logging.getLogger(__name__)

DeferredOutcome = Callable[[], Outcome]
"""A function that makes a job's outcome: host work that touches no model, safe in any thread. An
error that it raises is the job's failure."""


@dataclass(frozen=True)
class BatchResult:
    """A batch that has run: its ended ``jobs`` and their deferred outcomes, ``answers``, in order.

    The other jobs are running samples: ``remaining`` is the number of sequences that each has still
    to end. ``work`` is the work done for each sample; see ``SampleProgress``. ``new_tokens`` are
    the tokens drawn for streamed jobs that have not ended, by stream name.

    ``device_s`` excludes the time in which the backend waited for adapters. ``shares`` divides it
    by request id; the rest belongs to no request. ``began_s`` is the time at which the device
    began: see ``DeviceTime``.
    """

    jobs: Sequence[Job]
    answers: Sequence[DeferredOutcome]
    remaining: Mapping[str, int] = field(default_factory=dict)
    work: Mapping[str, float] = field(default_factory=dict)
    new_tokens: Mapping[str, Sequence[EncodedTokenDelta]] = field(default_factory=dict)
    device_s: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)
    began_s: float = 0.0

    def outcomes(self) -> list[Outcome]:
        """Return one outcome per ended job, in order. Any thread may call it.

        Raises nothing but ``DeviceFailed``.
        """
        outcomes = []
        for job, answer in zip(self.jobs, self.answers, strict=True):
            try:
                outcomes.append(answer())
            except Exception as error:
                outcomes.append(failure(job, error))
        return outcomes


def attempt(job: Job, run: Callable[[Job], Outcome]) -> Outcome:
    """Return the outcome of ``run``, or its failure. Raises nothing but ``DeviceFailed``."""
    try:
        return run(job)
    except Exception as error:
        return failure(job, error)


def failure(job: Job, error: Exception) -> Outcome:
    """Return the outcome of a job that ended with this error.

    Raises the error if it is ``DeviceFailed``, which is not the job's fault.
    """
    if isinstance(error, DeviceFailed):
        raise error
    if isinstance(error, EngineError):
        return rejected(job, error)
    name = job.model_id or job.scope
    if isinstance(error, OutOfMemory):
        logger.warning(
            "no room for %s of %s: %s", job.kind, name, error, extra=logs.job_fields(job)
        )
        return rejected(job, _no_room(job.kind))
    logger.error("%s of %s failed", job.kind, name, exc_info=error, extra=logs.job_fields(job))
    return rejected(job, ServerError(f"internal error while running {job.kind}; see the log"))


def failed_together(batch: Sequence[Job], error: Exception) -> None:
    """Log that this error ended a pass, whose jobs will run one by one."""
    if isinstance(error, OutOfMemory):
        logger.warning("no room for a unit of %d jobs, running each: %s", len(batch), error)
    else:
        message = "a unit of %d jobs failed; running them one by one"
        logger.error(message, len(batch), exc_info=error)


def _no_room(kind: JobKind) -> EngineError:
    error: EngineError
    if kind in {JobKind.FORWARD_BACKWARD, JobKind.SAMPLE}:
        error = UserError(
            f"the device has no memory for this {kind}, even alone and in small parts; nothing was "
            "changed; send shorter sequences, or fewer at once"
        )
    else:
        error = ServerError(f"the device has no memory for {kind}; nothing was changed; retry")
    error.no_room = True
    return error


def rejected(job: Job, error: EngineError) -> Outcome:
    """Return the failure as an outcome; a model whose first job failed is marked failed."""
    updates = (status(job, ModelStatus.FAILED),) if job.position == 0 else ()
    return Outcome(job.request_id, rejection=Rejection.from_error(error), updates=updates)


def protobuf(job: Job, body: bytes) -> Outcome:
    if len(body) > MAX_BODY_BYTES:
        return rejected(
            job,
            UserError(
                f"the result has {len(body)} bytes; the limit is {MAX_BODY_BYTES}; ask for fewer "
                "samples, tokens or top-k entries"
            ),
        )
    return Outcome(job.request_id, body, PROTOBUF)


def in_json(job: Job, body: dict[str, Any]) -> Outcome:
    return Outcome(job.request_id, json.dumps(body, allow_nan=False).encode())


def stepped(
    result: Mapping[str, float] | Exception, step: int, learning_rate: float, job: Job
) -> Outcome:
    """Return the outcome of a model's ``step``-th optimizer step; raise its error if it failed."""
    if isinstance(result, Exception):
        raise result
    # JSON has finite numbers only, and a step that was taken must not be reported as failed.
    finite = {name: value for name, value in result.items() if math.isfinite(value)}
    point = None
    if job.position is not None:
        norm = finite.get("grad_norm")
        point = CurvePoint(
            "optim_step", job.position, step=step, learning_rate=learning_rate, grad_norm=norm
        )
    return replace(in_json(job, {"metrics": finite}), changed=True, point=point)


def loaded_body(job: Job, path: str, *, has_optimizer: bool) -> dict[str, str | None]:
    """Return the result of a load. A file without an optimizer is said to start a fresh one."""
    body = {"path": path, "model_id": job.model_id, "type": "load_weights"}
    if has_optimizer:
        return body
    logger.info(
        "%s goes on from the weights of %s, with a fresh optimizer",
        *(job.model_id, path),
        extra=logs.job_fields(job),
    )
    return body | {"optimizer": "fresh"}


def created(job: Job, body: dict[str, Any]) -> Outcome:
    """Return the outcome of a job that created its model."""
    return replace(in_json(job, body), updates=(status(job, ModelStatus.READY),), changed=True)


def status(job: Job, of_model: ModelStatus) -> Update:
    return Update("model", job.model_id or "", {"status": of_model.value})
