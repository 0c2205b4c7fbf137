"""The API process: it opens the store, serves HTTP and releases waiting polls when it stops."""

import asyncio
import logging
import resource
import signal
import socket
from contextlib import AsyncExitStack

import uvicorn
import uvloop

from tuneserve_engine.core.errors import REFUSED
from tuneserve_engine.process import pauses
from tuneserve_engine.store.errors import StoreDamaged, StoreUnusable
from tuneserve_engine.store.open import open_store, settle_permissions
from tuneserve_engine.telemetry import logs
from tuneserve_engine.telemetry.tracing import open_tracer
from tuneserve_server import admin
from tuneserve_server.access.auth import has_keys
from tuneserve_server.app import create_app
from tuneserve_server.dependencies import Services
from tuneserve_server.http.connection import bounded
from tuneserve_server.http.long_polls import LongPolls
from tuneserve_server.listening import CannotStart, listen
from tuneserve_server.settings import ApiSettings

logger = logging.getLogger(__name__)

_BACKLOG = 4096  # SDKs open hundreds of connections at once
_OPEN_FILES = 65_536
_GRACE_S = 4  # after a worker's 25 s, so that `tuneserve up` ends within 30 s


class _ApiServer(uvicorn.Server):
    """A server that releases waiting polls when it stops."""

    def __init__(self, config: uvicorn.Config, polls: LongPolls) -> None:
        super().__init__(config)
        self._polls = polls

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._polls.release()
        await super().shutdown(sockets)


def serve_api(settings: ApiSettings) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status of the process."""
    logs.start("api", settings)
    settle_permissions(settings)
    # uvicorn takes these signals over while it serves, and raises them again afterwards.
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    _allow_many_sockets()
    try:
        return uvloop.run(_serve(settings, stopped))
    except CannotStart as error:
        logs.last_word("api", error)
        return REFUSED


async def _serve(settings: ApiSettings, stopped: asyncio.Event) -> int:
    async with AsyncExitStack() as stack:
        polls = LongPolls()
        try:
            listener = stack.enter_context(listen(settings))
            store = await open_store(settings, stopped)
            stack.push_async_callback(store.close)
            is_keyed = settings.require_keys or await has_keys(store)
            _check_reach(settings, is_keyed)
            tracer = open_tracer("api", settings)
            if tracer is not None:
                stack.callback(tracer.close)
            app = create_app(settings, store, polls, tracer)
            # Started here, because uvicorn would hide why the startup failed.
            await stack.enter_async_context(app.router.lifespan_context(app))
            await _open_admin(settings, app.state.services, stack)
        except (StoreUnusable, StoreDamaged, OSError, ValueError) as error:
            raise CannotStart(str(error)) from error
        config = uvicorn.Config(
            app,
            http=bounded(
                header_timeout_s=settings.header_timeout_s, linger_s=settings.body_timeout_s
            ),
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=settings.trusted_proxies,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=settings.keep_alive_s,
            timeout_graceful_shutdown=_GRACE_S,
        )
        logger.info(
            "listening on %s, store %s, files in %s",
            settings.url,
            settings.store_shown,
            settings.files_url or settings.files_dir.resolve(),
        )
        _say_who_gets_in(settings, is_keyed)
        if not stopped.is_set():
            pauses.shorten()
            await _ApiServer(config, polls).serve(sockets=[listener])
        return 0


def _check_reach(settings: ApiSettings, is_keyed: bool) -> None:
    """Raise ``CannotStart`` if strangers could use this server as any tenant."""
    if not is_keyed and not settings.may_be_open:
        raise CannotStart(
            f"host {settings.host!r} is not a loopback address, but without API keys this server "
            "accepts any key, so other machines must not be able to reach it: set "
            "require_keys = true and make keys with tuneserve keys create; or use 127.0.0.1, with "
            "an SSH tunnel for other machines. If something else keeps strangers away from this "
            "address, set trusted_network = true"
        )


def _say_who_gets_in(settings: ApiSettings, is_keyed: bool) -> None:
    if is_keyed:
        logger.info("only API keys of this server are accepted: tuneserve keys list")
    elif settings.trusted_network:
        logger.warning(
            "any API key is accepted: the operator vouches that strangers cannot reach %s "
            "(trusted_network)",
            settings.url,
        )
    if not settings.is_loopback and (notice := settings.local_tokenizer):
        logger.warning("%s", notice)


async def _open_admin(settings: ApiSettings, services: Services, stack: AsyncExitStack) -> None:
    """Serve the operator's socket until the stack is left.

    With Redis, another API process may share the data directory and hold the socket in it. One
    socket is enough, so a failure is only logged.
    """
    app = admin.create_admin_app(
        services.store, services.secret, services.unused, services.authenticator.require_keys
    )
    try:
        await stack.enter_async_context(admin.serve(app, settings.admin_socket))
    except (OSError, ValueError) as error:
        if settings.store_kind == "sqlite":
            raise
        logger.warning("the command tuneserve keys cannot reach this process: %s", error)


def _allow_many_sockets() -> None:
    """Raise the limit of open files as far as this user may: each waiting poll needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
