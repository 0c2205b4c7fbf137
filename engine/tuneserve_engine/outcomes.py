"""How jobs end: results and failures as outcomes."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tuneserve_engine import logs
from tuneserve_engine.backend.base import DeviceFailed, OutOfMemory
from tuneserve_engine.errors import EngineError, ServerError, UserError
from tuneserve_engine.jobs import PROTOBUF, Job, JobKind, Outcome, Part, Rejection
from tuneserve_engine.records import ModelStatus, Update
from tuneserve_engine.usage import CurvePoint

logger = logging.getLogger(__name__)

Answer = Callable[[], Outcome]
"""Gives a job's outcome. Work for the host, which touches no model: may be called in any thread."""

MAX_BODY_BYTES = 80 * 2**20
"""Largest result: it passes to the store in one message. More than any ``forward_backward`` that
``training_wire`` accepts gives, so that none is refused after its gradient was added."""


@dataclass(frozen=True)
class Executed:
    """A unit that has run: those of its jobs that have ended, their answers, in order, and the
    seconds that the backend had it, save those in which it waited for adapters.

    The others are samples on their way: ``left`` has how many sequences each has still to end.
    ``work`` is what was done for each sample; see ``Sampled``. ``parts``: see ``Progress``.
    ``shares`` are of those seconds, by request id; the rest was for nobody; ``began_s`` is when
    they began: see ``Reading``.
    """

    jobs: Sequence[Job]
    answers: Sequence[Answer]
    device_s: float
    left: Mapping[str, int] = field(default_factory=dict)
    work: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, Sequence[Part]] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    began_s: float = 0.0

    def outcomes(self) -> list[Outcome]:
        """One per job that has ended, in order. May be called from another thread."""
        return [answer() for answer in self.answers]


def attempt(job: Job, run: Callable[[Job], Outcome]) -> Outcome:
    """What ``run`` gives, or how it failed. Raises nothing but ``DeviceFailed``."""
    try:
        return run(job)
    except Exception as error:
        return failure(job, error)


def failure(job: Job, error: Exception) -> Outcome:
    """The outcome of a job that this ended. Raises it if it is ``DeviceFailed``, which is no job's
    fault."""
    if isinstance(error, DeviceFailed):
        raise error
    if isinstance(error, EngineError):
        return rejected(job, error)
    name = job.model_id or job.scope
    if isinstance(error, OutOfMemory):
        logger.warning("no room for %s of %s: %s", job.kind, name, error, extra=logs.of(job))
        return rejected(job, _no_room(job.kind))
    logger.error("%s of %s failed", job.kind, name, exc_info=error, extra=logs.of(job))
    return rejected(job, ServerError(f"internal error while running {job.kind}; see the log"))


def failed_together(unit: Sequence[Job], error: Exception) -> None:
    """Notes in the log that this ended a pass, whose jobs will run one by one."""
    if isinstance(error, OutOfMemory):
        logger.warning("no room for a unit of %d jobs, running each: %s", len(unit), error)
    else:
        message = "a unit of %d jobs failed; running them one by one"
        logger.error(message, len(unit), exc_info=error)


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
    """The failure; a model whose first job failed has failed itself."""
    updates = (status(job, ModelStatus.FAILED),) if job.position == 0 else ()
    return Outcome(job.request_id, rejection=Rejection.of(error), updates=updates)


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
    """Of a model's ``step``-th step of its optimizer; raises it if it failed."""
    if isinstance(result, Exception):
        raise result
    # JSON has no other numbers, and a step that was taken must not be reported as failed.
    finite = {name: value for name, value in result.items() if math.isfinite(value)}
    point = None
    if job.position is not None:
        norm = finite.get("grad_norm")
        point = CurvePoint(
            "optim_step", job.position, step=step, learning_rate=learning_rate, grad_norm=norm
        )
    return replace(in_json(job, {"metrics": finite}), changed=True, point=point)


def created(job: Job, body: dict[str, Any]) -> Outcome:
    """Of a job that made its model."""
    return replace(in_json(job, body), updates=(status(job, ModelStatus.READY),), changed=True)


def status(job: Job, of_model: ModelStatus) -> Update:
    return Update("model", job.model_id or "", {"status": of_model.value})
