"""The routes of sessions, capabilities and health, and the SDK's first calls."""

import hashlib
import hmac
import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse

from tuneserve_client.wire import account_types, types
from tuneserve_engine.core.records import ModelRecord, Scope, SessionRecord, Update
from tuneserve_engine.core.usage import DAY_S
from tuneserve_server import session_trace
from tuneserve_server.access import scopes
from tuneserve_server.base_models import failing, warming
from tuneserve_server.commands import common as commands
from tuneserve_server.dependencies import Caller, CallerDep, SentJsonDep, ServicesDep, reply, short
from tuneserve_server.errors import (
    BadRequest,
    DiskFull,
    SessionClosed,
    TooManyRequests,
    UnknownResource,
)
from tuneserve_server.http.openapi import fails, takes
from tuneserve_server.routes.downloads import signed_url
from tuneserve_server.session_notices import notices

router = APIRouter()


@router.post("/client/config")
async def client_config(caller: CallerDep) -> Response:
    """Return the SDK's feature flags that differ from the defaults; a client fetches them once."""
    flags: dict[str, bool | int] = {
        "sample_join_sampling_session": True,
        "proto_compress_fwdbwd": True,
        "custom_loss_server_side": True,
        # A run whose budget is used up pauses until the next day; an operator may raise the budget
        # at any time.
        "billing_exception_max_pause_duration_sec": 2 * DAY_S,
    }
    if caller.settings.token_auth:
        flags["pjwt_auth_enabled"] = True
    if caller.settings.retrieve_futures:
        flags["sample_use_retrieve_futures"] = True
    return JSONResponse(flags)


@router.post("/client/dynamic_config")
async def client_dynamic_config(_: CallerDep) -> Response:
    """Return the feature flags that running clients fetch repeatedly."""
    return JSONResponse({"sample_cancel_enabled": True})


@router.post(
    "/create_session",
    response_model=types.CreateSessionResponse,
    openapi_extra=takes(types.CreateSessionRequest),
    responses=fails(BadRequest, TooManyRequests, DiskFull),
)
async def create_session(
    caller: CallerDep, sent: SentJsonDep, x_idempotency_key: Annotated[str | None, Header()] = None
) -> Response:
    """Create a session; a retry with the same idempotency key returns the same session."""
    request = await sent.parsed(types.CreateSessionRequest)
    commands.check_session_metadata(request, caller.settings.max_session_metadata_bytes)
    caller.check_store()
    told, warned = await notices(caller)
    now_s = time.time()
    session = await caller.store.put_new_record(
        SessionRecord(
            key=_session_id(caller, x_idempotency_key),
            tenant=caller.tenant,
            created_s=now_s,
            last_seen_s=now_s,
            display_name=request.display_name,
            project_id=request.project_id,
            tags=request.tags,
            user_metadata=request.user_metadata or {},
            sdk_version=request.sdk_version,
        )
    )
    return reply(
        types.CreateSessionResponse(
            session_id=session.key, info_message=told, warning_message=warned
        )
    )


def _session_id(caller: Caller, idempotency_key: str | None) -> str:
    if idempotency_key is None:
        return f"s-{uuid.uuid4().hex}"
    text = f"session|{caller.tenant}|{idempotency_key}"
    return "s-" + hmac.new(caller.secret, text.encode(), hashlib.sha256).hexdigest()[:32]


@router.post(
    "/session_heartbeat",
    response_model=types.SessionHeartbeatResponse,
    openapi_extra=takes(types.SessionHeartbeatRequest),
    responses=fails(UnknownResource, SessionClosed),
)
async def session_heartbeat(http: Request, caller: CallerDep) -> Response:
    """Keep the session alive. Answers 410 once the session has ended, and clients stop then."""
    request = await short(http, caller, types.SessionHeartbeatRequest)
    session = await caller.open_session(request.session_id)
    await caller.store.update_record(Update("session", session.key, {"last_seen_s": time.time()}))
    return reply(types.SessionHeartbeatResponse())


@router.post(
    "/sessions/{session_id}/finish",
    openapi_extra=takes(types.FinishSessionRequest),
    responses=fails(UnknownResource),
)
async def finish_session(session_id: str, caller: CallerDep, sent: SentJsonDep) -> Response:
    """End the session. Repeated calls change nothing: the first reason is kept."""
    request = await sent.parsed(types.FinishSessionRequest)
    session = await caller.owned(SessionRecord, session_id)
    if Scope.TRAIN not in caller.scopes:
        await _check_without_models(caller, session)
    await caller.store.end_session(session.key, request.reason.type)
    return JSONResponse({})


async def _check_without_models(caller: Caller, session: SessionRecord) -> None:
    """Raise ``ScopeMissing`` if the session has models: they would end with it."""
    if (await caller.store.page_of_records(ModelRecord, parent=session.key, limit=0)).total:
        scopes.need(frozenset({Scope.TRAIN}), caller.scopes)


@router.put(
    "/sessions/{session_id}/project",
    openapi_extra=takes(account_types.SessionProjectRequest),
    responses=fails(BadRequest, UnknownResource),
)
async def set_session_project(session_id: str, caller: CallerDep, sent: SentJsonDep) -> Response:
    """File the session and its models under a project; a new name makes a project."""
    session = await caller.owned(SessionRecord, session_id)
    request = await sent.parsed(account_types.SessionProjectRequest)
    models = await caller.store.page_of_records(ModelRecord, parent=session.key)
    changes = {"project_id": request.project_id}
    await caller.record_event(
        "project_session_set", session_id=session.key, project_id=request.project_id
    )
    await caller.store.update_record(
        Update("session", session.key, changes),
        *(Update("model", model.key, changes) for model in models.items),
    )
    return JSONResponse({})


@router.get(
    "/sessions/{session_id}/trace_export",
    response_model=account_types.TraceExportResponse,
    responses=fails(UnknownResource),
)
async def export_session_trace(request: Request, session_id: str, caller: CallerDep) -> Response:
    """Return a signed link to the session's timeline, a trace that Perfetto reads.

    Anyone with the link can download the trace until the link expires.
    """
    session = await caller.owned(SessionRecord, session_id)
    base_url = caller.settings.public_url or str(request.base_url)
    expires_s = int(time.time()) + caller.settings.download_ttl_s
    url = signed_url(caller, base_url, session.key, session_trace.NAME, expires_s)
    return reply(account_types.TraceExportResponse(url=url))


@router.post("/telemetry", response_model=types.TelemetryResponse, openapi_extra=takes())
async def telemetry(_: SentJsonDep) -> Response:
    """Accept the SDK's error reports and drop them unread: they can contain the API key."""
    return reply(types.TelemetryResponse())


@router.get("/get_server_capabilities", response_model=types.ServerCapabilitiesResponse)
async def get_server_capabilities(caller: CallerDep) -> Response:
    """Return the base models that workers serve."""
    models = [
        types.SupportedModel(model_name=each.info.name, max_context_length=each.info.context_length)
        for each in await caller.served.offered()
    ] or [types.SupportedModel(model_name=caller.settings.served_name)]
    return reply(types.ServerCapabilitiesResponse(supported_models=models))


@router.get("/healthz", response_model=types.HealthResponse)
async def healthz(services: ServicesDep) -> Response:
    """Return the health of this process and its store, and the workers of each base model."""
    settings, problem = services.settings, services.unused.problem
    offered = await services.served.offered()
    # The base model of this process's settings comes first: `tuneserve up` reports it.
    offered = sorted(offered, key=lambda each: each.info.name != settings.served_name)
    models = [
        types.ServedBaseModel(
            name=each.info.name,
            revision=each.info.revision or None,
            workers=each.workers,
            samplers=each.samplers or None,
            warming=warming(each),
            failing=failing(each),
            architecture=each.info.architecture,
            context_length=each.info.context_length,
            max_rank=each.info.max_rank,
        )
        for each in offered
    ]
    soundness = services.store.soundness
    first: dict[str, Any] = {}
    if models:
        first = models[0].model_dump(
            include={"architecture", "context_length", "max_rank", "warming", "failing"}
        )
    return reply(
        types.HealthResponse(
            worker="ready" if any(each.trainers for each in offered) else "absent",
            base_model=models[0].name if models else settings.served_name,
            **first,
            base_models=models,
            store=settings.store_kind,
            durability=services.store.durability,
            store_check=soundness.state,
            store_damage=soundness.detail if soundness.state == "damaged" else None,
            disk="full" if services.disk.refusal() else "ok",
            files="ok" if problem is None else "kept",
            files_kept=None if problem is None else problem.text,
            keys_required=await services.authenticator.wants_keys(),
        )
    )
