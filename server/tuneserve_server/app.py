"""The ASGI application: wiring only."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from fastapi import FastAPI

from tuneserve_client.wire import (
    account_types,
    checkpoint_types,
    custom_loss_types,
    run_types,
    types,
)
from tuneserve_engine.store import remote
from tuneserve_engine.store.files_mount import new_files
from tuneserve_engine.store.open import OpenStore
from tuneserve_engine.telemetry.tracing import Tracer
from tuneserve_server import errors
from tuneserve_server.access.audit_log import AuditLog
from tuneserve_server.access.auth import Authenticator
from tuneserve_server.access.budgets import Budgets
from tuneserve_server.access.hosts import AllowedHosts, CheckHost, names_of
from tuneserve_server.access.limits import DiskGuard
from tuneserve_server.base_model_text import TokenizerPool
from tuneserve_server.base_models import BaseModels
from tuneserve_server.cleanup import unnamed_saves
from tuneserve_server.cleanup.siblings import Siblings
from tuneserve_server.cleanup.sweeper import sweep_forever
from tuneserve_server.cleanup.unused_files import UnusedFiles
from tuneserve_server.dashboard.recent_errors import RecentErrors
from tuneserve_server.dashboard.views import Dashboard
from tuneserve_server.dependencies import Services
from tuneserve_server.error_shapes import ANTHROPIC_ALIAS
from tuneserve_server.heartbeats import Heartbeats
from tuneserve_server.http.incoming import BodyMemory
from tuneserve_server.http.long_polls import LongPolls
from tuneserve_server.http.metrics import CountRequests, HttpMetrics, named
from tuneserve_server.http.openapi import describe, requests_of
from tuneserve_server.http.tracing import TraceRequests
from tuneserve_server.openai import routes as openai
from tuneserve_server.openai import types as openai_types
from tuneserve_server.openai.messages_api import routes as messages_api
from tuneserve_server.openai.messages_api import types as messages_types
from tuneserve_server.openai.responses_api import routes as responses_api
from tuneserve_server.openai.responses_api import types as responses_types
from tuneserve_server.routes import (
    audit,
    auth,
    billing,
    checkpoint_search,
    checkpoints,
    copies,
    custom_losses,
    dashboard,
    dashboard_events,
    documentation,
    downloads,
    external_uploads,
    futures,
    listings,
    metrics,
    models,
    runs,
    sampling,
    session_search,
    sessions,
    tokenizers,
    training,
    uploads,
    usage,
)
from tuneserve_server.runs.overview import RunOverview
from tuneserve_server.settings import ApiSettings
from tuneserve_server.store_metrics import StoreMetrics
from tuneserve_server.transfer.peft_download import Archives
from tuneserve_server.transfer.peft_upload import PeftUploads

ROUTERS = (
    *(
        sessions,
        models,
        training,
        custom_losses,
        checkpoints,
        uploads,
        external_uploads,
        copies,
        checkpoint_search,
        sampling,
        futures,
        session_search,
        listings,
        runs,
        usage,
        downloads,
    ),
    *(tokenizers, dashboard_events, auth, audit, billing),
)
PREFIX = "/api/v1"
AT_ROOT = (metrics, openai, responses_api, messages_api, dashboard, documentation)
"""Routers without the prefix: clients look for these paths at the root."""
OPEN_PATHS = ("/", "/metrics", f"{PREFIX}/healthz")
"""Paths that are answered without a key, as are dashboard, documentation and signed links."""


def create_app(
    settings: ApiSettings,
    store: OpenStore,
    polls: LongPolls | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """Return the API on an open store; while it runs, workers reach a SQLite store by its socket.

    A server that releases the waiting polls when it stops passes ``polls``; a traced server passes
    ``tracer``.
    """

    counted = HttpMetrics()
    lifespan = partial(_lifespan, settings, store, polls or LongPolls(), counted)
    app = _Api(
        title="tuneserve",
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for module in ROUTERS:
        app.include_router(module.router, prefix=PREFIX)
    for module in AT_ROOT:
        app.include_router(module.router)
    for module in (openai, responses_api):
        app.include_router(module.router, prefix=errors.OPENAI_ALIAS, include_in_schema=False)
    app.include_router(messages_api.router, prefix=ANTHROPIC_ALIAS, include_in_schema=False)
    errors.install(app)
    app.add_middleware(
        CheckHost,
        allowed=AllowedHosts(names_of(settings.host, settings.public_url, settings.allowed_hosts)),
        wants_keys=lambda scope: scope["app"].state.services.authenticator.wants_keys(),
        open_paths=OPEN_PATHS,
        page=(dashboard.PREFIX, documentation.PREFIX),
    )
    if tracer is not None:
        app.add_middleware(TraceRequests, tracer=tracer, named=partial(named, prefix=PREFIX))
    app.add_middleware(
        CountRequests, metrics=counted, prefix=PREFIX, access_log=settings.access_log
    )
    return app


@asynccontextmanager
async def _lifespan(
    settings: ApiSettings,
    store: OpenStore,
    polls: LongPolls,
    counted: HttpMetrics,
    app: FastAPI,
) -> AsyncIterator[None]:
    """Run what lives as long as the application: its services, the sweeper, the workers' socket."""
    services = await _services(settings, store, polls, counted)
    app.state.services = services
    sqlite = settings.store_kind == "sqlite"
    siblings = None if sqlite else Siblings(store, settings.sweep_s)
    async with remote.serve(store, settings.store_socket) if sqlite else nullcontext():
        sweeping = asyncio.create_task(
            sweep_forever(
                *(store, services.unused, settings.sweep_policy, settings.sweep_s),
                siblings=siblings,
                first=partial(unnamed_saves.adopt, store, services.files),
            )
        )
        try:
            yield
        finally:
            sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await sweeping
            if siblings is not None:
                await siblings.leave()
            services.imports.stop()
            services.archives.stop()
            services.tokenizers.stop()
            services.body_memory.stop()


class _Api(FastAPI):
    """A FastAPI app whose OpenAPI document comes from what its routes declare.

    The routes read their bodies themselves, so FastAPI cannot infer the bodies.
    """

    def openapi(self) -> dict[str, Any]:
        modules = (
            *(types, run_types, account_types, checkpoint_types, custom_loss_types),
            *(openai_types, messages_types, responses_types),
        )
        return describe(self, [each for module in modules for each in requests_of(module)])


async def _services(
    settings: ApiSettings, store: OpenStore, polls: LongPolls, counted: HttpMetrics
) -> Services:
    files = await asyncio.to_thread(new_files, settings)
    disks = [settings.files_dir]
    if settings.store_kind == "sqlite":
        disks.append(settings.data_dir)
    secret = await store.secret()
    disk = DiskGuard(disks, settings.min_free_bytes)
    served = BaseModels(store, settings.served_name)
    authenticator = Authenticator(store, secret, require_keys=settings.require_keys)
    body_memory = BodyMemory.from_settings(settings)
    pool = TokenizerPool(settings.text_memory_bytes)
    counted.record_request("body_memory_used_bytes", lambda: body_memory.used)
    counted.record_request("text_memory_used_bytes", lambda: pool.memory.held)
    await authenticator.wants_keys()  # cached now, in case the store is unreachable later
    live = Dashboard(store, served)
    unused = UnusedFiles(store, files, settings.unused_policy)
    await unused.prove()
    return Services(
        settings=settings,
        store=store,
        files=files,
        unused=unused,
        served=served,
        last_seen=Heartbeats(store),
        disk=disk,
        polls=polls,
        body_memory=body_memory,
        tokenizers=pool,
        budgets=Budgets(store, settings.tenant_budgets),
        imports=PeftUploads(files, disk, polls, settings),
        archives=Archives(files),
        http_metrics=counted,
        store_metrics=StoreMetrics(store, tenants=settings.tenant_metrics),
        recent=RecentErrors(),
        live=live,
        runs=RunOverview(store, live.stats),
        secret=secret,
        authenticator=authenticator,
        audit=AuditLog(store),
    )
