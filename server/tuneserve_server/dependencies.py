"""The dependencies of every route: the caller and the services of the process."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, TypeVar

from fastapi import Depends, Request, Security
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader

from tuneserve_client.wire.body import Request as Body
from tuneserve_client.wire.body import Response
from tuneserve_engine.core.records import (
    RECORD_NAME,
    CheckpointRecord,
    Record,
    SamplerRecord,
    Scope,
    SessionRecord,
)
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_engine.store.files_base import Files
from tuneserve_engine.store.open import OpenStore
from tuneserve_engine.telemetry import logs
from tuneserve_server.access import scopes
from tuneserve_server.access.audit_log import AuditLog
from tuneserve_server.access.auth import Authenticator
from tuneserve_server.access.budgets import Budgets
from tuneserve_server.access.limits import DiskGuard
from tuneserve_server.base_model_text import TokenizerPool
from tuneserve_server.base_models import BaseModels
from tuneserve_server.cleanup.unused_files import UnusedFiles
from tuneserve_server.dashboard.recent_errors import RecentErrors
from tuneserve_server.dashboard.views import Dashboard
from tuneserve_server.errors import (
    SessionClosed,
    StoreCorrupt,
    StoreUnavailable,
    UnknownResource,
    is_openai,
)
from tuneserve_server.heartbeats import Heartbeats
from tuneserve_server.http import body
from tuneserve_server.http.incoming import FREE_BYTES, BodyMemory, Incoming, SentJson
from tuneserve_server.http.long_polls import LongPolls
from tuneserve_server.http.metrics import HttpMetrics
from tuneserve_server.runs.overview import RunOverview
from tuneserve_server.settings import ApiSettings
from tuneserve_server.store_metrics import StoreMetrics
from tuneserve_server.transfer.peft_download import Archives
from tuneserve_server.transfer.peft_upload import PeftUploads

R = TypeVar("R", bound=Record)
B = TypeVar("B", bound=Body)
T = TypeVar("T")

Access = Literal["owned", "accessible"]
"""The wanted things of a list: the caller's, or those of all whose things it may see."""

_AWAY_S = 1.0  # the delay of a 503: a client whose poll gets one polls again at once
_LONGEST_BODY_S = 86_400.0  # never reached: the deadline of the body itself is shorter


@dataclass(frozen=True)
class Services:
    """The services that live as long as the process."""

    settings: ApiSettings
    store: OpenStore
    files: Files
    unused: UnusedFiles
    served: BaseModels
    last_seen: Heartbeats
    disk: DiskGuard
    polls: LongPolls
    body_memory: BodyMemory
    tokenizers: TokenizerPool
    budgets: Budgets
    imports: PeftUploads
    archives: Archives
    http_metrics: HttpMetrics
    store_metrics: StoreMetrics
    recent: RecentErrors
    live: Dashboard
    runs: RunOverview
    secret: bytes
    authenticator: Authenticator
    audit: AuditLog

    def check_store(self) -> None:
        """Raise ``StoreCorrupt`` if the store is damaged, and ``DiskFull`` if its disk is full."""
        if self.store.soundness.state == "damaged":
            raise StoreCorrupt
        self.disk.check()


@dataclass(frozen=True)
class Caller(Services):
    """The services on behalf of one tenant, with what ``access.auth.Identity`` says of its key."""

    tenant: str
    scopes: frozenset[Scope]
    key_id: str = ""
    until_s: float | None = None

    async def owned(self, record_type: type[R], key: str, *, anyones: bool = False) -> R:
        """Return the caller's record, or that of any tenant with ``anyones``.

        Raises the same ``UnknownResource`` for a record that is missing, expired or another
        tenant's.
        """
        record = await self.store.get_record(record_type, key)
        expired = isinstance(record, CheckpointRecord) and record.has_expired(time.time())
        if record is None or expired or not (anyones or record.tenant == self.tenant):
            raise self._unknown(record_type, key)
        return record

    @property
    def watched(self) -> str | None:
        """The tenant whose things the caller may see: None, for all, with the admin scope.

        In open mode, where every text names a tenant, no caller has the scope from the operator.
        """
        return None if Scope.ADMIN in self.scopes and self.key_id else self.tenant

    def seen(self, access: Access) -> str | None:
        """Return the tenant whose things a list shows; None is all."""
        return self.watched if access == "accessible" else self.tenant

    async def record_event(self, event: str, **details: str) -> None:
        """Store an event of the audit log, which this caller is about to cause."""
        await self.audit.record_event(self.tenant, event, key_id=self.key_id, **details)

    async def readable(self, path: str) -> CheckpointRecord:
        """Return a checkpoint of the caller, or one that its owner has published.

        Raises ``UnknownResource`` as ``owned`` does. Use ``owned`` to change a checkpoint.
        """
        checkpoint = await self.owned(CheckpointRecord, path, anyones=True)
        if checkpoint.tenant != self.tenant and not checkpoint.public:
            raise self._unknown(CheckpointRecord, path)
        return checkpoint

    def _unknown(self, record_type: type[R], key: str) -> UnknownResource:
        return UnknownResource(
            f"this {_WORDS[record_type]} does not exist, or it was deleted, or it is not "
            f"yours: {key[:256]} (your tenant: {self.tenant})"
        )

    async def open_session(self, key: str) -> SessionRecord:
        """Return the caller's session. Raises ``SessionClosed`` if the session has ended."""
        session = await self.owned(SessionRecord, key)
        if session.ended:
            raise SessionClosed(
                f"session {key} has ended ({session.ended}); create a new session and continue "
                "from your last checkpoint"
            )
        return session

    async def weights_of(self, sampler: SamplerRecord) -> SamplerRecord:
        """Return the record with the weights that the sampling session samples now, noted as used.

        It is the session itself or, for an inflight session, the newest inflight save of its model.
        Raises ``UnknownResource`` if that was deleted.
        """
        weights = sampler
        if sampler.target:
            found = await self.store.get_record(SamplerRecord, sampler.target)
            if found is None:
                raise UnknownResource(
                    "the inflight weights of this sampling session were deleted, because newer "
                    "saves needed their room while they were not in use; save the model again"
                )
            weights = found
        if weights.model_id:
            await self.last_seen.record_sign("sampler", weights.key)
        return weights

    async def sampler(self, key: str) -> SamplerRecord:
        """Return the caller's sampling session.

        Samplers are deleted with their session: raises ``SessionClosed`` if the session has ended,
        else ``UnknownResource``.
        """
        try:
            found = await self.owned(SamplerRecord, key)
            if found.is_target:
                raise self._unknown(SamplerRecord, key)
            return found
        except UnknownResource:
            session = await self.store.get_record(SessionRecord, key.rpartition(":sample:")[0])
            if session is not None and session.tenant == self.tenant:
                await self.open_session(session.key)
                raise UnknownResource(
                    f"this sampling session does not exist: {key[:256]}; if it was an unnamed "
                    "save, newer saves of its model have replaced it while it was not in use; to "
                    "keep weights, save them under a name"
                ) from None
            raise


_WORDS: dict[type, str] = {**RECORD_NAME, SamplerRecord: "sampling session"}


# Coroutines, because FastAPI runs plain functions in threads: two thread hops for each request.
async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


_API_KEY = APIKeyHeader(name="X-API-Key", auto_error=False, description="tml-...")


async def _caller(request: Request, api_key: Annotated[str | None, Security(_API_KEY)]) -> Caller:
    services: Services = request.app.state.services
    if "Authorization" in request.headers and is_openai(request):
        scheme, _, token = request.headers["Authorization"].partition(" ")
        if scheme.lower() == "bearer":
            api_key = token.strip()
    address = request.client.host if request.client else ""
    try:
        login = await services.authenticator.authenticate(api_key, address)
    except (StoreFailed, ConnectionError):
        await services.polls.pause(_AWAY_S)
        raise
    logs.add_fields(tenant=login.tenant)
    request.state.tenant = login.tenant  # the error handlers note failures under it
    route = f"{request.method} {request.scope['route'].path_format}"
    scopes.need(scopes.SCOPES[route], login.scopes)
    return Caller(**vars(services), **vars(login))


@asynccontextmanager
async def incoming(
    request: Request, caller: "Caller", read: Callable[[Incoming], Awaitable[T]]
) -> AsyncIterator[T]:
    """Yield the request's body, as ``read``, a method of ``Incoming``, returns it.

    Its share of the memory for bodies is released after the block. Raises what ``read`` raises, and
    ``StoreUnavailable`` if the process stops before the body has arrived.
    """
    async with AsyncExitStack() as stack:
        arriving = Incoming(request, caller.settings, caller.body_memory, caller.tenant, stack)
        found = await caller.polls.hold(read(arriving), _LONGEST_BODY_S)
        if found is None:
            raise StoreUnavailable(
                "the server is stopping; nothing was changed; send the request again"
            )
        yield found


async def _sent_json(request: Request, caller: "CallerDep") -> AsyncIterator[SentJson]:
    """Yield the JSON body; its memory stays counted until the answer is sent."""
    async with incoming(request, caller, Incoming.json) as sent:
        yield sent


async def short(request: Request, caller: "Caller", body_type: type[B]) -> B:
    """Return the JSON body of a route whose bodies are short: its memory is not counted.

    Such a body never waits for memory. Raises ``BodyTruncated`` above ``FREE_BYTES``.
    """
    async with incoming(request, caller, partial(Incoming.json, most=FREE_BYTES)) as sent:
        return body.parse(body_type, b"".join(sent.pieces))


ServicesDep = Annotated[Services, Depends(_services)]
CallerDep = Annotated[Caller, Depends(_caller)]
SentJsonDep = Annotated[SentJson, Depends(_sent_json)]


def reply(response: Response) -> JSONResponse:
    """Return 200 with the body, without None: the client tests whether some keys are present."""
    return JSONResponse(response.model_dump(mode="json", exclude_none=True))
