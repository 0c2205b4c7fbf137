"""The ASGI application: wiring only."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from fastapi import FastAPI

from tuneserve_engine.files import FileStore
from tuneserve_engine.queue import remote
from tuneserve_engine.queue.opening import OpenStore
from tuneserve_engine.tracing import Tracer
from tuneserve_server import errors, unnamed_saves
from tuneserve_server.archives import Archives
from tuneserve_server.auth import Door
from tuneserve_server.budgets import Budgets
from tuneserve_server.deps import Services
from tuneserve_server.hosts import AllowedHosts, CheckHost, names_of
from tuneserve_server.http_metrics import CountRequests, HttpMetrics, named
from tuneserve_server.imports import Imports
from tuneserve_server.incoming import BodyMemory
from tuneserve_server.last_seen import LastSeen
from tuneserve_server.limits import DiskGuard
from tuneserve_server.live import Live
from tuneserve_server.openai_text import Texts
from tuneserve_server.openapi import describe
from tuneserve_server.polls import Polls
from tuneserve_server.recent_errors import RecentErrors
from tuneserve_server.routes import (
    files,
    futures,
    imports,
    live,
    metrics,
    models,
    openai,
    page,
    rest,
    sampling,
    service,
    tokenizers,
    training,
    usage,
    weights,
)
from tuneserve_server.served import ServedModels
from tuneserve_server.settings import ApiSettings
from tuneserve_server.siblings import Siblings
from tuneserve_server.store_metrics import StoreMetrics
from tuneserve_server.sweeper import sweep_forever
from tuneserve_server.tracing import TraceRequests
from tuneserve_server.unused_files import UnusedFiles

ROUTERS = (
    *(service, models, training, weights, imports, sampling, futures, rest, usage, files),
    *(tokenizers, live),
)
PREFIX = "/api/v1"
AT_ROOT = (metrics, openai, page)
"""Where those who ask for them look by themselves; their paths are whole."""
OPEN_PATHS = ("/", "/metrics", f"{PREFIX}/healthz")
"""They are answered without a key, as are the page and signed links."""


def create_app(
    settings: ApiSettings,
    store: OpenStore,
    polls: Polls | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """The API on an open store; while it runs, workers reach a SQLite store through its socket.

    ``polls`` is passed in by a server that releases them when it stops, ``tracer`` by one that is
    traced.
    """

    counted = HttpMetrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        services = await _services(settings, store, polls or Polls(), counted)
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
                services.texts.stop()
                services.body_memory.stop()

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
    app.include_router(openai.router, prefix=errors.OPENAI_ALIAS, include_in_schema=False)
    errors.install(app)
    app.add_middleware(
        CheckHost,
        allowed=AllowedHosts(names_of(settings.host, settings.public_url, settings.allowed_hosts)),
        wants_keys=lambda scope: scope["app"].state.services.door.wants_keys(),
        open_paths=OPEN_PATHS,
        page=page.PREFIX,
    )
    if tracer is not None:
        app.add_middleware(TraceRequests, tracer=tracer, named=partial(named, prefix=PREFIX))
    app.add_middleware(
        CountRequests, metrics=counted, prefix=PREFIX, access_log=settings.access_log
    )
    return app


class _Api(FastAPI):
    """Describes itself as its routes declare, which read their bodies themselves."""

    def openapi(self) -> dict[str, Any]:
        return describe(self)


async def _services(
    settings: ApiSettings, store: OpenStore, polls: Polls, counted: HttpMetrics
) -> Services:
    files = FileStore(settings.files_dir, min_free_bytes=settings.min_free_bytes)
    disks = [settings.files_dir]
    if settings.store_kind == "sqlite":
        disks.append(settings.data_dir)
    secret = await store.secret()
    disk = DiskGuard(disks, settings.min_free_bytes)
    served = ServedModels(store, settings.served_name)
    door = Door(store, secret, require_keys=settings.require_keys)
    body_memory, texts = BodyMemory.of(settings), Texts(settings.text_memory_bytes)
    counted.tell("body_memory_used_bytes", lambda: body_memory.used)
    counted.tell("text_memory_used_bytes", lambda: texts.memory.held)
    await door.wants_keys()  # known from the start, should the store be away later
    unused = UnusedFiles(store, files, settings.unused_policy)
    await unused.prove()
    return Services(
        settings=settings,
        store=store,
        files=files,
        unused=unused,
        served=served,
        last_seen=LastSeen(store),
        disk=disk,
        polls=polls,
        body_memory=body_memory,
        texts=texts,
        budgets=Budgets(store, settings.tenant_budgets),
        imports=Imports(files, disk, polls, settings),
        archives=Archives(files),
        http_metrics=counted,
        store_metrics=StoreMetrics(store, tenants=settings.tenant_metrics),
        recent=RecentErrors(),
        live=Live(store, served),
        secret=secret,
        door=door,
    )
