"""The API process: opens the store, serves HTTP, stops without leaving anybody waiting."""

import logging
import resource
import signal
import socket
import sys
from pathlib import Path

import uvicorn
import uvloop

from tuneserve_engine.config import REFUSED
from tuneserve_engine.queue.schema import StoreUnusable
from tuneserve_engine.queue.sqlite import SqliteStore
from tuneserve_server.app import create_app
from tuneserve_server.polls import Polls
from tuneserve_server.settings import ApiSettings

logger = logging.getLogger(__name__)

_BACKLOG = 4096  # SDKs open hundreds of connections at once
_OPEN_FILES = 65_536
_GRACE_S = 10


class _Server(uvicorn.Server):
    """A server that lets go of parked polls when it stops."""

    def __init__(self, config: uvicorn.Config, polls: Polls) -> None:
        super().__init__(config)
        self._polls = polls

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._polls.release()
        await super().shutdown(sockets)


def run(settings: ApiSettings) -> int:
    """Serves until SIGTERM or SIGINT; the exit status of the process."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s api %(levelname)s %(message)s"
    )
    # uvicorn stops on these signals and then raises them again, for whom it replaced: nobody.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    _allow_many_sockets()
    try:
        return uvloop.run(_serve(settings))
    except (_CannotListen, StoreUnusable, FileExistsError) as error:
        print(f"tuneserve api: {error}", file=sys.stderr)
        return REFUSED


class _CannotListen(Exception):
    pass


async def _serve(settings: ApiSettings) -> int:
    listener = _listen(settings)
    with listener:
        store = await SqliteStore.open(store_path(settings))
        try:
            polls = Polls()
            app = create_app(settings, store, polls)
            config = uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=settings.keep_alive_s,
                timeout_graceful_shutdown=_GRACE_S,
            )
            server = _Server(config, polls)
            await server.serve(sockets=[listener])
            return 0 if server.started else 1
        finally:
            await store.close()


def store_path(settings: ApiSettings) -> Path:
    return settings.data_dir / "store.db"


def _listen(settings: ApiSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise _CannotListen(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; stop what "
            "uses the port, or choose another with --port"
        ) from error
    return listener


def _allow_many_sockets() -> None:
    """Raises the limit of open files as far as this user may: one per parked poll."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
