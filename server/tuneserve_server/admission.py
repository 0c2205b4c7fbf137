"""The admission of requests: every request whose key is readable becomes a job.

The job uses up the request's sequence number. A request that cannot be carried out becomes a job
with a rejection, so that later requests of the model do not wait for it and the client reads the
reason through its future.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import (
    CreateModel,
    Job,
    JobKind,
    LoadWeights,
    OptimStep,
    Rejection,
    SampleCommand,
    Saves,
    SaveWeights,
    encode,
)
from tuneserve_engine.core.records import ModelRecord, Record, SamplerRecord
from tuneserve_engine.store import refusals
from tuneserve_engine.telemetry import logs
from tuneserve_server.dependencies import Caller
from tuneserve_server.errors import BudgetUsedUp, StoreCorrupt
from tuneserve_server.http.tracing import traceparent

logger = logging.getLogger(__name__)

Command = CreateModel | OptimStep | SaveWeights | LoadWeights | SampleCommand


@dataclass(frozen=True)
class JobKey:
    """The key of a request, its base model and, if it is for a model, its position in the log."""

    kind: JobKind
    scope: str
    seq: int
    base_model: str
    model_id: str | None = None
    position: int | None = None

    @classmethod
    def after(cls, kind: JobKind, model: ModelRecord, seq: int) -> "JobKey":
        """Return the key of request ``seq`` to a model that exists."""
        return cls(kind, model.key, seq, model.base_model, model.key, seq)


async def submit_rejection(caller: Caller, place: JobKey, error: UserError) -> str:
    """Submit a rejected job and return the request id under which the client reads the reason."""
    return await submit_job(caller, place, b"", rejection=Rejection.from_error(error))


async def submit_command(
    caller: Caller, place: JobKey, build: Callable[[], Awaitable[Command]]
) -> str:
    """Admit the command that ``build`` returns, or reject it with the ``UserError`` it raises.

    Returns the request id.
    """
    try:
        command = await build()
    except UserError as error:
        return await submit_rejection(caller, place, error)
    saves, sessions = None, list[SamplerRecord]()
    if isinstance(command, SaveWeights) and (record := command.checkpoint or command.sampler):
        saves = Saves(record.key, record.size_bytes)
        sessions = _inflight_sessions(command)
    return await submit_job(caller, place, encode(command), *sessions, saves=saves)


def _inflight_sessions(save: SaveWeights) -> list[SamplerRecord]:
    """Return the sampling session of an inflight save; other saves have none before they end.

    The client learns of it with the result.
    """
    target = save.sampler
    if target is None or not save.session_key:
        return []
    unheld = replace(target, file_id=None, size_bytes=0, used_s=0.0)
    return [replace(unheld, key=save.session_key, target=target.key)]


async def submit_job(
    caller: Caller,
    place: JobKey,
    payload: bytes,
    *records: Record,
    rejection: Rejection | None = None,
    saves: Saves | None = None,
) -> str:
    """Submit the request as a job and return its request id, once the job is durable."""
    if caller.store.soundness.state == "damaged":
        raise StoreCorrupt
    caller.disk.admit(len(payload))
    job = Job(
        tenant=caller.tenant,
        kind=place.kind,
        scope=place.scope,
        seq=place.seq,
        payload=payload,
        base_model=place.base_model,
        model_id=place.model_id,
        position=place.position,
        rejection=rejection,
        trace=traceparent.get(),
        saves=saves,
    )
    if rejection is None:
        try:
            await caller.budgets.check(job.tenant, job.kind)
        except BudgetUsedUp:  # a request that was accepted before gets its request id again
            if await caller.store.job_key(refusals.request_id(caller.secret, job)) is None:
                raise
    logs.add_fields(model_id=job.model_id)
    submitted = await caller.store.submit(job, *records)
    logs.add_fields(request_id=submitted.request_id)
    if submitted.waits:
        logger.warning(
            "model %s waits for room: tenant %s is at its limit of models in use "
            "(max_tenant_models), and too few of them are idle",
            *(job.model_id, job.tenant),
        )
    return submitted.request_id
