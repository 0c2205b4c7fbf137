"""The deadlines and limits of a connection, which uvicorn does not have.

A client cannot hold a connection with a request head that never ends, with the rest of a body that
is already answered, or with an answer that it does not read. ``body`` has the deadlines of bodies.
"""

import asyncio
import json
from asyncio.events import TimerHandle
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tuneserve_client.wire.types import Failure
from tuneserve_server.errors import ApiError, BadRequest, HeadersTooLarge, HeadersTooSlow

MAX_HEAD_BYTES = 32 * 1024
"""The limit on the size of a request's address and headers; signed links are the longest."""

_STALLED_S = 30.0  # a client that reads nothing of its answer for this long is gone


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 on one connection, with a time limit for each part of a request.

    Subclasses set the times, because uvicorn constructs the protocol without our arguments.
    """

    header_timeout_s: float
    linger_s: float  # for the rest of a body that was answered early

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: TimerHandle | None = None
        self._write_check: TimerHandle | None = None
        self._in_body = False
        self._unparsed = 0  # bytes since the last complete head or piece of body
        self._problem: ApiError | None = None
        self._refused = False

    # --- requests: the head in time, and what follows an early answer too -----------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(self.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._met()
        self._unset_keepalive_if_required()
        self.resume_writing()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Treat a client that has closed its side as gone: nothing more is written to it."""
        if self.cycle is not None:
            self.cycle.disconnected = True

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        if not self._in_body:
            self._expect(self.header_timeout_s)
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEAD_BYTES:
            self._refuse(_too_large())

    def on_message_begin(self) -> None:
        self._expect(self.header_timeout_s)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # trailers are not read, and must not pile up
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._problem = _too_large()
            raise ValueError("too large")  # ends the parser, which calls send_400_response
        self._met()
        self._in_body = True
        self._unparsed = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._met()
        self._in_body = False
        self._unparsed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refused:
            self.transport.close()
        if self.transport.is_closing():
            self._watch_writing()
        elif self._in_body:  # answered early; the client still sends
            self._expect(self.linger_s)

    def _expect(self, within_s: float) -> None:
        """Start the deadline, unless one is running."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(within_s, self._late)

    def _met(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.flow.read_paused:  # by the server: the missing bytes may be in the socket
            self._expect(self.header_timeout_s)
        elif self._in_body or self._refused or not (self._unparsed or self._is_answering):
            self.transport.abort()
        else:
            self._refuse(
                HeadersTooSlow(
                    "the headers of the request did not arrive within "
                    f"{self.header_timeout_s:g} s; send the request again"
                )
            )

    # --- answers below the application ----------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            self._problem
            or BadRequest("this is not an HTTP/1.1 request, and the server speaks nothing else")
        )

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """End the connection with this answer, or after the answer that is under way.

        Bytes that the client still sends are dropped for a while: closing with unread bytes would
        lose the answer.
        """
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._met()
        if self._is_answering and (self.pipeline or not self._in_body):
            self.pipeline.clear()
            return
        if self._is_answering:  # the answer is to the request whose body is at fault
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        body = json.dumps(Failure(detail=str(error), code=error.code).model_dump()).encode()
        head = (
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self._expect(self.header_timeout_s)
        self.transport.write(STATUS_LINE[error.status] + head.encode() + body)
        self.transport.write_eof()

    # --- answers that are not read --------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        if self._write_check is not None:
            self._write_check.cancel()
            self._write_check = None
        super().resume_writing()

    def _watch_writing(self) -> None:
        """End the connection if the write buffer does not shrink for ``_STALLED_S`` seconds."""
        if self._write_check is None:
            size = self.transport.get_write_buffer_size()
            self._write_check = self.loop.call_later(_STALLED_S, self._check_writing, size)

    def _check_writing(self, before: int) -> None:
        self._write_check = None
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_writing()

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # closing would wait until the client has read the answer


def _too_large() -> HeadersTooLarge:
    return HeadersTooLarge(
        f"the address and headers of the request are larger than {MAX_HEAD_BYTES} bytes, the limit "
        "of this server; send less"
    )


def bounded(*, header_timeout_s: float, linger_s: float) -> type[asyncio.Protocol]:
    """Return the protocol with these times, for ``uvicorn.Config``."""
    times = {"header_timeout_s": header_timeout_s, "linger_s": linger_s}
    return type("Protocol", (BoundedProtocol,), times)
