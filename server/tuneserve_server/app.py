"""The ASGI application: wiring only."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI

from tuneserve_engine.files import FileStore
from tuneserve_engine.queue import remote
from tuneserve_engine.queue.base import Store
from tuneserve_server import errors
from tuneserve_server.deps import Services
from tuneserve_server.polls import Polls
from tuneserve_server.routes import (
    files,
    futures,
    models,
    rest,
    sampling,
    service,
    training,
    weights,
)
from tuneserve_server.settings import ApiSettings
from tuneserve_server.sweeper import sweep_forever
from tuneserve_server.worker_watch import WorkerWatch

ROUTERS = (service, models, training, weights, sampling, futures, rest, files)
PREFIX = "/api/v1"


def create_app(settings: ApiSettings, store: Store, polls: Polls | None = None) -> FastAPI:
    """The API on an open store; while it runs, workers reach the store through its socket.

    ``polls`` is passed in by a server that releases them when it stops.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watch = WorkerWatch(store)
        services = Services(
            settings=settings,
            store=store,
            files=FileStore(settings.files_dir),
            watch=watch,
            polls=polls or Polls(),
            secret=await store.secret(),
        )
        app.state.services = services
        async with remote.serve(watch, settings.store_socket):
            sweeping = asyncio.create_task(
                sweep_forever(store, services.files, settings.sweep_policy, settings.sweep_s)
            )
            try:
                yield
            finally:
                sweeping.cancel()
                with suppress(asyncio.CancelledError):
                    await sweeping

    app = FastAPI(
        title="tuneserve",
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for module in ROUTERS:
        app.include_router(module.router, prefix=PREFIX)
    errors.install(app)
    return app
