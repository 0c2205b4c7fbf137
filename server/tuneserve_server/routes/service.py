"""Sessions, capabilities, health, and the calls with which the SDK introduces itself."""

import hashlib
import hmac
import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Header, Response
from fastapi.responses import JSONResponse

from tuneserve_client import types
from tuneserve_engine.records import Session, Update
from tuneserve_server import body, commands
from tuneserve_server.deps import Caller, CallerDep, RawBody, ServicesDep, reply

router = APIRouter()


@router.post("/client/config")
@router.post("/client/dynamic_config")
async def client_config(_: CallerDep) -> Response:
    """Every feature flag of the SDK at its default."""
    return JSONResponse({})


@router.post("/create_session")
async def create_session(
    caller: CallerDep, raw: RawBody, x_idempotency_key: Annotated[str | None, Header()] = None
) -> Response:
    """A new session; a retry under the same idempotency key gets the same one."""
    request = body.parse(types.CreateSessionRequest, raw)
    now_s = time.time()
    session = await caller.store.put_new(
        Session(
            key=_session_id(caller, x_idempotency_key),
            tenant=caller.tenant,
            created_s=now_s,
            last_seen_s=now_s,
            display_name=request.display_name,
            project_id=request.project_id,
            tags=request.tags,
            user_metadata=commands.metadata(request.user_metadata),
            sdk_version=request.sdk_version,
        )
    )
    return reply(types.CreateSessionResponse(session_id=session.key))


def _session_id(caller: Caller, idempotency_key: str | None) -> str:
    if idempotency_key is None:
        return f"s-{uuid.uuid4().hex}"
    text = f"session|{caller.tenant}|{idempotency_key}"
    return "s-" + hmac.new(caller.secret, text.encode(), hashlib.sha256).hexdigest()[:32]


@router.post("/session_heartbeat")
async def session_heartbeat(caller: CallerDep, raw: RawBody) -> Response:
    """Keeps the session alive; 410 once it has ended, on which clients stop for good."""
    request = body.parse(types.SessionHeartbeatRequest, raw)
    session = await caller.open_session(request.session_id)
    await caller.store.update(Update("session", session.key, {"last_seen_s": time.time()}))
    return reply(types.SessionHeartbeatResponse())


@router.post("/sessions/{session_id}/finish")
async def finish_session(session_id: str, caller: CallerDep, raw: RawBody) -> Response:
    """Ends the session. Repeating it changes nothing: the first reason wins."""
    request = body.parse(types.FinishSessionRequest, raw)
    session = await caller.owned(Session, session_id)
    await caller.store.end_session(session.key, request.reason.type)
    return JSONResponse({})


@router.post("/telemetry")
async def telemetry(_: RawBody) -> Response:
    """Dropped unread: the SDK's error reports can contain the API key."""
    return reply(types.TelemetryResponse())


@router.get("/get_server_capabilities")
async def get_server_capabilities(caller: CallerDep) -> Response:
    """The one base model."""
    info = await caller.base_model()
    model = types.SupportedModel(
        model_name=info.name if info else caller.settings.served_name,
        max_context_length=info.context_length if info else None,
    )
    return reply(types.ServerCapabilitiesResponse(supported_models=[model]))


@router.get("/healthz")
async def healthz(services: ServicesDep) -> Response:
    """The process answers; and whether a worker does."""
    info = services.watch.info
    facts: dict[str, Any] = {}
    if info is not None:
        facts = {
            "architecture": info.architecture,
            "context_length": info.context_length,
            "max_rank": info.max_rank,
        }
    present = info is not None and services.watch.is_present
    return reply(
        types.HealthResponse(
            worker="ready" if present else "absent",
            base_model=info.name if info else services.settings.served_name,
            **facts,
        )
    )
