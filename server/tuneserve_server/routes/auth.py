"""The routes of the caller's own key: a token for it, its description, its revocation."""

import time

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from tuneserve_client.wire import account_types as types
from tuneserve_engine.core.records import KeyRecord, Update
from tuneserve_server.access import tokens
from tuneserve_server.dependencies import Caller, CallerDep, reply
from tuneserve_server.errors import BadRequest
from tuneserve_server.http.openapi import fails

router = APIRouter()

_OPEN_NAME = "open mode"
_OPEN_NOTE = "this server has no keys: any text that begins like a key names a tenant"


@router.post("/auth/token", response_model=types.AuthTokenResponse)
async def auth_token(caller: CallerDep) -> Response:
    """Return a token that stands for the caller's key for an hour.

    A token can be exchanged too, but for one that expires when it does.
    """
    now_s = time.time()
    expires_s = caller.until_s or now_s + tokens.TTL_S
    claims = tokens.TokenClaims(caller.tenant, caller.key_id, expires_s)
    return reply(types.AuthTokenResponse(jwt=tokens.new_token(caller.secret, claims, now_s)))


@router.get("/auth/apikey/me", response_model=types.OwnKeyResponse)
async def get_own_key(caller: CallerDep) -> Response:
    """Return the public facts about the caller's key."""
    key = await _own_key(caller)
    name = _OPEN_NAME if key is None else key.name or key.key
    number = 0 if key is None else int(key.key, 36)
    details = types.KeyDetails(
        org_details=types.KeyOrganization(name=caller.tenant),
        user_details=types.KeyUser(email=name),
    )
    note = _OPEN_NOTE if key is None else f"scopes: {', '.join(key.scopes)}"
    return reply(types.OwnKeyResponse(key_id=number, name=name, note=note, details=details))


@router.delete("/auth/apikey/me", responses=fails(BadRequest))
async def revoke_own_key(caller: CallerDep) -> Response:
    """Revoke the caller's key and no other; it is refused within five seconds."""
    if caller.until_s is not None:
        raise BadRequest("a token cannot revoke its key; send the key itself in X-API-Key")
    key = await _own_key(caller)
    if key is None:
        raise BadRequest(
            "this server has no keys, so there is none to revoke; the operator makes the first "
            "with: tuneserve keys create"
        )
    await caller.record_event("key_revoke", revoked=key.key)
    await caller.store.update_record(Update("key", key.key, {"revoked_s": time.time()}))
    return JSONResponse({})


async def _own_key(caller: Caller) -> KeyRecord | None:
    """Return the caller's key; None in open mode."""
    return await caller.store.get_record(KeyRecord, caller.key_id) if caller.key_id else None
