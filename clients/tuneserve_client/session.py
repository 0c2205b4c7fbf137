"""The session of a client on a server: its id, its heartbeats, and the requests sent in it."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from tuneserve_client.catalog import Catalog, has_failed
from tuneserve_client.errors import NotFound, SessionEnded, TuneserveError
from tuneserve_client.futures import AsyncFuture
from tuneserve_client.transport import API, Answer, Transport
from tuneserve_client.wire import types

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Session:
    """The session of a client; models and samplers send through it.

    The first request that needs the session opens it, and heartbeats keep it alive until ``close``.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        name: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        heartbeat_s: float = 10.0,
    ) -> None:
        self.catalog = catalog
        self._name = name
        self._user_metadata = dict(user_metadata or {})
        self._heartbeat_s = heartbeat_s
        self._opening: asyncio.Task[str] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[list[str]]] = set()
        self._models = self._samplers = 0

    @property
    def transport(self) -> Transport:
        """The connection to the server."""
        return self.catalog.transport

    async def close(self, *, errored: bool = False) -> None:
        """Wait until every request is accepted (not if ``errored``), and end the session."""
        for task in self._sending if errored else ():
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        if self._beating is not None:
            self._beating.cancel()
        if self._opening is not None and errored and not self._opening.done():
            self._opening.cancel()
        elif self._opening is not None and not self._opening.cancelled():
            reason = types.FinishReason(type="errored" if errored else "success")
            body = types.FinishSessionRequest(reason=reason)
            with suppress(TuneserveError):  # without it, the session ends when heartbeats stop
                path = f"{API}/sessions/{await self._opening}/finish"
                await self.transport.call("POST", path, body=body, once=True)
        self._opening = None

    async def id(self) -> str:
        """Return the session's id; the first call opens the session."""
        if self._opening is None or has_failed(self._opening):
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> str:
        body = types.CreateSessionRequest(
            user_metadata=self._user_metadata,
            display_name=self._name,
            sdk_version="tuneserve",
        )
        opened = await self.transport.ask(
            types.CreateSessionResponse,
            "POST",
            "/create_session",
            body=body,
            headers={"X-Idempotency-Key": uuid.uuid4().hex},
        )
        if opened.info_message:
            logger.info("the server says: %s", opened.info_message)
        if opened.warning_message:
            logger.warning("the server says: %s", opened.warning_message)
        self._beating = asyncio.create_task(self._beat(opened.session_id))
        return opened.session_id

    async def _beat(self, session_id: str) -> None:
        """Send heartbeats until the session has ended."""
        body = types.SessionHeartbeatRequest(session_id=session_id)
        while True:
            await asyncio.sleep(self._heartbeat_s)
            try:
                await self.transport.call("POST", f"{API}/session_heartbeat", body=body, once=True)
            except (SessionEnded, NotFound):
                return
            except TuneserveError as error:
                logger.info("a heartbeat was not received: %s", error)

    def next_model(self) -> int:
        """Return the number of the session's next model."""
        self._models += 1
        return self._models - 1

    def next_sampler(self) -> int:
        """Return the number of the session's next sampler."""
        self._samplers += 1
        return self._samplers - 1

    def submit(
        self, sending: Coroutine[Any, Any, list[str]], read: Callable[[Sequence[Answer]], T]
    ) -> AsyncFuture[T]:
        """Return the future of a request; ``sending`` sends it, and ``read`` reads its answers."""
        future = AsyncFuture(self.transport, sending, read)
        self._sending.add(future.sending)
        future.sending.add_done_callback(self._sending.discard)
        return future
