"""The transport, the only module that speaks HTTP: it sends, retries and raises errors.

A request is retried after a connection error, 402, 408, 429 or 5xx. Every attempt has the same key
and sequence number, so the server recognises it, and the request takes effect once. The retries end
``deadline_s`` after the first attempt. A 402 (the day's budget is spent) is retried without a
deadline.
"""

import asyncio
import json
import logging
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from tuneserve_client.errors import (
    BudgetSpent,
    Category,
    Refused,
    RequestFailed,
    TuneserveError,
    Unreachable,
    refusal,
)
from tuneserve_client.peft_archive import CONTENT_TYPE, AdapterArchive
from tuneserve_client.wire.body import Request, Response

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Response)

API = "/api/v1"
PROTOBUF = "application/x-protobuf"

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0
_POLL_S = 45.0  # the server holds a poll for 25 s, or up to 40
_LONG_ANSWER_S = 600.0
_SHORTEST_POLL_S = 0.5  # the shortest time between polls, for a server that does not hold them
_REMINDER_S = 60.0
_TELL_AFTER_S = 5.0  # a waiting user should learn the reason, but not of each lost packet
MOST_POLLS = 1024
_ABOUT_SERVER = {401, 403, 404}  # another server, or another key, may be meant
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def _most_polls() -> int:
    """Return the number of results to poll at once; further ones take turns.

    Each poll has a connection, and polls use at most half of the files that this process may open
    (macOS: 256 by default).
    """
    try:
        import resource
    except ImportError:  # not Unix
        return MOST_POLLS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_POLLS if soft == resource.RLIM_INFINITY else max(1, min(MOST_POLLS, soft // 2))


@dataclass(frozen=True)
class Answer:
    """A result as the server sent it."""

    content_type: str
    body: bytes

    @property
    def is_protobuf(self) -> bool:
        return PROTOBUF in self.content_type

    def json(self) -> Any:
        return json.loads(self.body)


class Transport:
    """The connection to one server, with one key.

    ``inner`` replaces the network, ``clock`` and ``sleep`` replace real time.
    """

    def __init__(  # noqa: PLR0913 - the last two are for tests
        self,
        base_url: str,
        api_key: str,
        *,
        deadline_s: float,
        inner: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"the address is {base_url!r}; it must begin with http:// or https://")
        # httpx quotes a header that it refuses, so the key would end up in logs.
        if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
            raise ValueError(
                "the API key has a space, a line break or another character that keys never have; "
                "check its source, for example a file with Windows line endings"
            )
        self._deadline_s = deadline_s
        self._clock = clock
        self._sleep = sleep
        # A proxy in the environment must not catch loopback traffic.
        trust_env = urlsplit(base_url).hostname not in _LOOPBACK
        # Polls have separate connections: hundreds of held polls would block all other calls.
        self._calls, self._polls = (
            httpx.AsyncClient(
                base_url=base_url.rstrip("/"),
                headers={"X-API-Key": api_key, "User-Agent": "tuneserve-client"},
                limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
                timeout=httpx.Timeout(60.0, connect=10.0, pool=None),
                transport=inner,
                trust_env=trust_env,
            )
            for most in (64, _most_polls())
        )

    async def close(self) -> None:
        await self._calls.aclose()
        await self._polls.aclose()

    async def call(  # noqa: PLR0913 - the parts of a request
        self,
        method: str,
        path: str,
        *,
        body: Request | bytes | AdapterArchive | None = None,
        headers: dict[str, str] | None = None,
        params: dict[str, Any] | None = None,
        once: bool = False,
        patient: bool = False,
    ) -> httpx.Response:
        """Send a request and return the 2xx answer (or 304). Raises ``TuneserveError``.

        With ``once`` the request is not retried. ``patient`` allows the server a long time to
        answer, for requests in which it first reads a whole adapter.
        """
        request = self._calls.build_request(
            method, path, content=_content(body), params=params, headers=_headers(body, headers)
        )
        request.headers.update({} if once else _current_span())
        if patient:
            request.extensions["timeout"]["read"] = _LONG_ANSWER_S
        return await self._insist(self._calls, request, once=once)

    async def ask(self, answer: type[R], method: str, path: str, **options: Any) -> R:
        """Return the answer to ``call``, read as ``answer``."""
        response = await self.call(method, f"{API}{path}", **options)
        return read_body(answer, response)

    async def result(self, request_id: str) -> Answer:
        """Return the result of an accepted request, however long it takes.

        Raises ``RequestFailed`` if the request ended in an error.
        """
        request = self._polls.build_request(
            "POST",
            f"{API}/retrieve_future",
            json={"request_id": request_id},
            headers={"Accept": f"{PROTOBUF}, application/json"},
            timeout=httpx.Timeout(_POLL_S, connect=10.0, pool=None),
        )
        told_s = self._clock()
        while True:
            asked_s = self._clock()
            response = await self._insist(self._polls, request, polls=True)
            if response.status_code != 408:
                return _ended(request_id, response)
            reason = _reason(response)
            if reason and self._clock() - told_s >= _REMINDER_S:
                logger.warning("request %s still waits: %s", request_id, reason)
                told_s = self._clock()
            await self._sleep(max(0.0, _SHORTEST_POLL_S - (self._clock() - asked_s)))

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        """Open an answer that is read as it comes.

        The request is retried until the answer begins. After that, a retry would be a new request.
        """
        timeout = httpx.Timeout(_POLL_S, connect=10.0, pool=None)  # a comment comes every 25 s
        request = self._polls.build_request("POST", path, json=body, timeout=timeout)
        response = await self._insist(self._polls, request, stream=True)
        try:
            yield response
        except httpx.TransportError as error:
            raise Unreachable(f"the stream broke off: {_said(error)}; try again") from error
        finally:
            await response.aclose()

    @asynccontextmanager
    async def download(self, url: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open the bytes behind a signed link, which carries its own permission."""
        request = self._calls.build_request("GET", url)
        del request.headers["X-API-Key"]
        request.extensions["timeout"]["read"] = _LONG_ANSWER_S  # the server checks the file first
        response = await self._insist(self._calls, request, stream=True)
        try:
            yield response.aiter_bytes()
        except httpx.TransportError as error:
            raise Unreachable(f"the download broke off: {_said(error)}; try again") from error
        finally:
            await response.aclose()

    async def _insist(
        self,
        client: httpx.AsyncClient,
        request: httpx.Request,
        *,
        once: bool = False,
        polls: bool = False,
        stream: bool = False,
    ) -> httpx.Response:
        """Send the request until it gets an answer that a retry would not change."""
        started_s = self._clock()
        until_s = started_s + (0.0 if once else self._deadline_s)
        attempt, tell_at_s = 0, started_s + _TELL_AFTER_S
        while True:
            try:
                response = await client.send(request, stream=stream)
                if response.is_success or response.status_code == 304:
                    return response
                await response.aread()
                if polls and response.status_code == 408 and "queue_state" in response.text:
                    return response
                problem: TuneserveError = error_of(response)
                if response.status_code in _ABOUT_SERVER:
                    problem.args = (f"{problem} (server: {_server(client.base_url)})",)
                if response.status_code not in (402, 408, 429) and response.status_code < 500:
                    raise problem
            except httpx.TransportError as error:
                problem = Unreachable(
                    f"{_server(request.url)} does not answer: {_said(error)}; check the address "
                    "and that the server runs"
                )
                problem.__cause__ = error
            wait_s = _wait_s(attempt, problem)
            attempt += 1
            waits_for_tomorrow = isinstance(problem, BudgetSpent) and not once
            if self._clock() + wait_s > until_s and not waits_for_tomorrow:
                raise problem
            level = logging.INFO
            if (until := self._clock() + wait_s) >= tell_at_s:
                level, tell_at_s = logging.WARNING, until + _REMINDER_S
            logger.log(level, "retrying in %.1f s: %s", wait_s, problem)
            await self._sleep(wait_s)


def _content(body: Request | bytes | AdapterArchive | None) -> bytes | AdapterArchive | None:
    if isinstance(body, Request):
        return body.model_dump_json(exclude_none=True).encode()
    return body


def _headers(
    body: Request | bytes | AdapterArchive | None, more: dict[str, str] | None
) -> dict[str, str]:
    kind = {"Content-Type": "application/json"} if isinstance(body, Request) else {}
    if isinstance(body, AdapterArchive):
        kind = {"Content-Type": CONTENT_TYPE, "Content-Length": str(body.size)}
    return {**kind, **(more or {})}


def _current_span() -> dict[str, str]:
    """Return the W3C header of the caller's span, if the program uses OpenTelemetry.

    Nothing is imported here: there can be a span only if the program itself has loaded the module.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return {}
    ids = f"{span.trace_id:032x}-{span.span_id:016x}"
    return {"traceparent": f"00-{ids}-{int(span.trace_flags):02x}"}


def _wait_s(attempt: int, problem: TuneserveError) -> float:
    """Return the wait that the server asked for, or an exponential backoff with random jitter."""
    if problem.retry_after_s is not None:
        return problem.retry_after_s
    longest: float = min(_FIRST_WAIT_S * 2.0**attempt, _LONGEST_WAIT_S)
    return longest * random.uniform(0.75, 1.0)


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def error_of(response: httpx.Response) -> Refused:
    """Return the error in an answer that is not 2xx, in this server's shape or in OpenAI's."""
    code, message = "http_error", f"the answer was HTTP {response.status_code}"
    try:
        found = response.json()
    except ValueError:  # a proxy's page
        found = None
    if isinstance(found, dict):
        said = found["error"] if isinstance(found.get("error"), dict) else found
        code = str(said.get("code", code))
        message = str(said.get("message") or said.get("detail") or message)
    try:
        retry_after_s = float(response.headers.get("retry-after", ""))
    except ValueError:
        retry_after_s = None
    return refusal(response.status_code, code, message, retry_after_s)


def _server(url: httpx.URL) -> str:
    """Return the address without what may be secret: a password, or a link's signature."""
    return str(url.copy_with(query=None, userinfo=b"")).rstrip("/")


def read_body(kind: type[R], response: httpx.Response) -> R:
    """Return the body as ``kind``. Raises ``Unreachable`` for the answer of another program."""
    try:
        return kind.model_validate_json(response.content)
    except ValidationError:
        url = _server(response.request.url)
        raise Unreachable(
            f"{url} answers, but is not a tuneserve server; check the address"
        ) from None


def _reason(response: httpx.Response) -> str | None:
    found = response.json()
    return found.get("queue_state_reason") if isinstance(found, dict) else None


def _ended(request_id: str, response: httpx.Response) -> Answer:
    answer = Answer(response.headers.get("content-type", ""), response.content)
    if not answer.is_protobuf:
        found = answer.json()
        if isinstance(found, dict) and "error" in found:
            category: Category = "user" if found.get("category") == "user" else "server"
            raise RequestFailed(str(found["error"]), category=category, request_id=request_id)
    return answer
