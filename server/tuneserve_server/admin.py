"""The operator's API for keys, tenants and files, on a separate Unix socket.

The public application has none of these routes, so no key gives access to them: a user who may open
the socket's file may call all of them.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from tuneserve_engine.core.records import KeyRecord, Scope, TenantRecord, Update
from tuneserve_engine.process import unix_socket
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_server import errors
from tuneserve_server.access import auth
from tuneserve_server.access.audit_log import AuditLog
from tuneserve_server.access.tenant_names import TENANT_PATTERN
from tuneserve_server.cleanup.unused_files import UnusedFiles

logger = logging.getLogger(__name__)

router = APIRouter()

_DAY_S = 86_400.0
_STOP_S = 2
_MOST = 2**53  # the largest integer that Lua holds exactly

TenantName = Annotated[str, Field(pattern=f"^{TENANT_PATTERN}$")]
Limit = Annotated[int, Field(ge=0, le=_MOST)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewKey(_Body):
    tenant: TenantName
    name: str = Field(default="", max_length=128)
    scopes: list[Scope] = Field(default=[Scope.TRAIN, Scope.SAMPLE], min_length=1)
    expires_days: int | None = Field(default=None, ge=1, le=36_500)


class KeyShown(_Body):
    id: str
    tenant: str
    name: str
    scopes: list[Scope]
    created_s: float
    expires_s: float | None
    revoked_s: float | None
    state: str = Field(description="active, expired or revoked")


class KeyMade(KeyShown):
    key: str = Field(description="The key, shown only here: the store has only its HMAC.")


class TenantChange(_Body):
    """A change of the fields that are sent; None restores the value from the settings."""

    weight: float | None = Field(default=None, ge=0.001, le=1000)
    max_jobs: Limit | None = None
    max_models: Limit | None = None
    max_checkpoints: Limit | None = None
    max_checkpoint_bytes: Limit | None = None
    device_s_a_day: float | None = Field(default=None, ge=0, le=_MOST)


class TenantShown(TenantChange):
    tenant: str


class FilesAdopted(_Body):
    files: int
    named: int = Field(description="The number of these files that the store names.")


def create_admin_app(
    store: Store, pepper: bytes, unused: UnusedFiles, on_key: Callable[[], None] = lambda: None
) -> FastAPI:
    """Return the operator's API; it calls ``on_key`` when it has made a key."""
    app = FastAPI(title="tuneserve admin", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.store = store
    app.state.pepper = pepper
    app.state.unused = unused
    app.state.on_key = on_key
    app.state.audit = AuditLog(store)
    app.include_router(router)
    errors.install(app)
    return app


async def _store(request: Request) -> Store:
    store: Store = request.app.state.store
    return store


async def _audit(request: Request) -> AuditLog:
    audit: AuditLog = request.app.state.audit
    return audit


StoreDep = Annotated[Store, Depends(_store)]
AuditDep = Annotated[AuditLog, Depends(_audit)]

# --- keys ---------------------------------------------------------------------------------------


def _shown(key: KeyRecord) -> dict[str, Any]:
    state = "active" if key.is_valid(time.time()) else "expired"
    return {
        "id": key.key,
        "tenant": key.tenant,
        "name": key.name,
        "scopes": key.scopes,
        "created_s": key.created_s,
        "expires_s": key.expires_s,
        "revoked_s": key.revoked_s,
        "state": state if key.revoked_s is None else "revoked",
    }


@router.post("/keys")
async def create_key(new: NewKey, request: Request, store: StoreDep, audit: AuditDep) -> KeyMade:
    key_id, secret, now_s = auth.new_id(), auth.new_secret(), time.time()
    key = KeyRecord(
        key=key_id,
        tenant=new.tenant,
        parent=new.tenant,
        digest=auth.digest(request.app.state.pepper, key_id, secret),
        scopes=sorted(set(new.scopes)),
        created_s=now_s,
        name=new.name,
        expires_s=None if new.expires_days is None else now_s + new.expires_days * _DAY_S,
    )
    await audit.record_event(
        key.tenant, "key_create", made=key.key, scopes=" ".join(key.scopes), name=key.name
    )
    await store.put_new_record(TenantRecord(new.tenant, new.tenant, now_s))
    await store.put_record(key)
    request.app.state.on_key()
    logger.info("made key %s of tenant %s", key.key, key.tenant)
    return KeyMade(key=f"tml-{key_id}-{secret}", **_shown(key))


@router.get("/keys")
async def list_keys(store: StoreDep) -> list[KeyShown]:
    return [KeyShown(**_shown(key)) for key in (await store.page_of_records(KeyRecord)).items]


@router.post("/keys/{key_id}/revoke")
async def revoke_key(key_id: str, store: StoreDep, audit: AuditDep) -> KeyShown:
    key = await store.get_record(KeyRecord, key_id)
    if key is None:
        raise errors.UnknownResource(
            "no key has this id; the id is the middle part of tml-<id>-<secret>, and tuneserve "
            "keys list shows it"
        )
    if key.revoked_s is None:
        await audit.record_event(key.tenant, "key_revoke", revoked=key.key)
        await store.update_record(Update("key", key_id, {"revoked_s": time.time()}))
        logger.info("revoked key %s of tenant %s", key.key, key.tenant)
    return KeyShown(**_shown(await store.get_record(KeyRecord, key_id) or key))


# --- tenants ------------------------------------------------------------------------------------


def _tenant_shown(tenant: TenantRecord) -> TenantShown:
    own = {name: getattr(tenant, name) for name in TenantChange.model_fields}
    return TenantShown(tenant=tenant.key, **own)


@router.get("/tenants")
async def list_tenants(store: StoreDep) -> list[TenantShown]:
    found = sorted((await store.page_of_records(TenantRecord)).items, key=lambda each: each.key)
    return [_tenant_shown(tenant) for tenant in found]


@router.get("/tenants/{name}")
async def get_tenant(name: TenantName, store: StoreDep) -> TenantShown:
    tenant = await store.get_record(TenantRecord, name)
    if tenant is None:
        raise errors.UnknownResource(
            "no tenant of this name has a key, a weight or limits; tuneserve tenants list shows "
            "the tenants that have"
        )
    return _tenant_shown(tenant)


@router.patch("/tenants/{name}")
async def change_tenant(
    name: TenantName, change: TenantChange, store: StoreDep, audit: AuditDep
) -> TenantShown:
    changes = change.model_dump_json(exclude_unset=True)
    await audit.record_event(name, "tenant_set", changes=changes)
    await store.put_new_record(TenantRecord(name, name, time.time()))
    await store.update_record(Update("tenant", name, change.model_dump(exclude_unset=True)))
    return await get_tenant(name, store)


# --- files --------------------------------------------------------------------------------------


class FilesShown(_Body):
    files: int
    quarantine: dict[str, int] = Field(
        description="The number of quarantined files, by the time they were moved there."
    )
    kept: str | None = Field(description="The reason why unused files are kept, if they are.")


@router.get("/files")
async def get_files(request: Request) -> FilesShown:
    unused: UnusedFiles = request.app.state.unused
    return FilesShown(**await unused.status())


@router.post("/files/clean")
async def clean_files(request: Request) -> FilesShown:
    """Clean up now, even if more files than usual must be set aside."""
    unused: UnusedFiles = request.app.state.unused
    await unused.clean(allowed=True)
    return await get_files(request)


@router.post("/files/adopt")
async def adopt_files(request: Request) -> FilesAdopted:
    unused: UnusedFiles = request.app.state.unused
    try:
        return FilesAdopted(**(await unused.adopt())._asdict())
    except StoreUnusable as error:
        raise errors.BadRequest(str(error)) from error


# --- the socket ---------------------------------------------------------------------------------


class _AdminServer(uvicorn.Server):
    """A server that leaves the signals to the main server of this process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serve(app: FastAPI, path: Path) -> AsyncIterator[None]:
    """Serve ``app`` at the socket ``path`` while the context is open.

    Raises ``OSError`` or ``ValueError`` if the socket cannot be made.
    """
    listener = unix_socket.listen(path)
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_STOP_S,
    )
    server = _AdminServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
        server.should_exit = True
        await serving
