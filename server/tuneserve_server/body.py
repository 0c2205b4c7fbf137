"""Request bodies: read within limits, decompressed, parsed strictly."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import zstandard
from fastapi import Request as HttpRequest
from pydantic import ValidationError
from pydantic_core import from_json

from tuneserve_client.body import Request
from tuneserve_engine.errors import UserError
from tuneserve_server.errors import BodyTooLarge, BodyTooSlow, Malformed, UnknownEncoding

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Request)
K = TypeVar("K", bound=Request)

_ZSTD_WINDOW = 2**26
_START_BYTES = 4096  # of a body that is too large: enough to read its key
_SLOWEST_BYTES_S = 16 * 1024
_MAX_DEPTH = 32
_MAX_MARKS = 2**20  # no request has nearly as many; bounds the time that looking at them takes
_MARKS = b'[]{}"'
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ALIKE = bytes.maketrans(b"{}", b"[]")
_SHOWN_PROBLEMS = 5
_noticed: set[str] = set()
_MOST_NOTICED = 1000  # field names come from clients; the set must not grow with them


class Cut(BodyTooLarge):
    """The body is over the limit; ``start`` is what had arrived by then."""

    def __init__(self, message: str, start: bytes) -> None:
        super().__init__(message)
        self.start = start


async def read(request: HttpRequest, *, limit_bytes: int, timeout_s: float) -> bytes:
    """The body as sent. Raises ``Cut`` as soon as it exceeds the limit, ``BodyTooSlow``.

    ``timeout_s`` is for the smallest body; one that arrives steadily has longer.
    """
    body = bytearray()

    async def keep(piece: bytes) -> None:
        nonlocal body
        body += piece
        if len(body) > limit_bytes:
            raise Cut(
                f"the request body is larger than {limit_bytes} bytes, the limit of this server; "
                "send less at once",
                bytes(body),
            )

    await receive(request, keep, timeout_s=timeout_s)
    return bytes(body)


async def receive(
    request: HttpRequest, take: Callable[[bytes], Awaitable[None]], *, timeout_s: float
) -> None:
    """Gives the body to ``take`` as it arrives. Raises ``BodyTooSlow`` like ``read``."""
    size = 0
    try:
        async with asyncio.timeout(timeout_s) as limit:
            deadline_s = limit.when() or 0.0
            async for piece in request.stream():
                size += len(piece)
                await take(piece)
                limit.reschedule(deadline_s + size / _SLOWEST_BYTES_S)
    except TimeoutError:
        raise BodyTooSlow(
            f"only {size} bytes of the request body arrived within {timeout_s:g} s and a second "
            f"for each {_SLOWEST_BYTES_S}; send it again"
        ) from None


def decompress(body: bytes, encoding: str | None, *, limit_bytes: int) -> bytes:
    """The body as it was before its ``Content-Encoding``. Raises ``Cut`` above the limit."""
    if encoding is None or encoding == "identity":
        return body
    if encoding != "zstd":
        raise UnknownEncoding("the only Content-Encoding understood here is zstd")
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    try:
        if zstandard.frame_content_size(body) <= limit_bytes:
            return decoder.decompress(body, max_output_size=limit_bytes, allow_extra_data=False)
        start = decoder.stream_reader(body).read(_START_BYTES)
    except (zstandard.ZstdError, MemoryError):
        raise Malformed("the request body is not one complete zstd frame") from None
    raise Cut(
        f"the request body is larger than {limit_bytes} bytes after decompression, the limit of "
        "this server; send less at once",
        start,
    )


def parse(body_type: type[B], raw: bytes) -> B:
    """The body, or ``Malformed`` with the fields at fault."""
    body = read_json(body_type, raw)
    _notice_unknown(body)
    return body


def parse_keyed(raw: bytes, key_type: type[K], body_type: type[B]) -> tuple[K, B | UserError]:
    """The request's key, and the body or what is wrong with it.

    Raises ``Malformed`` only if not even the key can be read. With the key, the problem can be
    reported through the request's future, and its sequence number is spent.
    """
    try:
        body = parse(body_type, raw)
    except Malformed as error:
        return read_json(key_type, raw, finite=False), UserError(str(error))
    key: Request = body
    assert isinstance(key, key_type), f"{body_type} does not extend {key_type}"
    return key, body


def read_json(body_type: type[B], raw: bytes, *, finite: bool = True) -> B:
    """As ``parse``, without a word about the fields that nobody knows."""
    _check_structure(raw)
    try:
        body = body_type.model_validate_json(raw)
        if finite and (b"NaN" in raw or b"Infinity" in raw):
            from_json(raw, allow_inf_nan=False)  # also in fields that nobody reads
        return body
    except ValidationError as error:
        raise Malformed(describe(error)) from None
    except ValueError:
        raise Malformed("the body is no JSON: all its numbers must be finite") from None


def _check_structure(raw: bytes) -> None:
    """Raises ``Malformed`` for what nests too deep, before anything is made of it."""
    if raw.count(b"[") + raw.count(b"{") <= _MAX_DEPTH:
        return
    marks = sum(raw.count(mark) for mark in _MARKS)
    if marks > _MAX_MARKS:
        raise Malformed(
            f"the body has {marks} brackets and quotes; a request takes up to {_MAX_MARKS}; send "
            "less at once"
        )
    brackets = _STRING.sub(b"", raw).translate(_ALIKE, _NOT_BRACKETS)
    for _ in range(_MAX_DEPTH):  # each round removes the innermost
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise Malformed(
            f"the body nests deeper than {_MAX_DEPTH} levels, or its brackets do not match"
        )


def accepted(body: B | UserError) -> B:
    """The body; raises what is wrong with it."""
    if isinstance(body, UserError):
        raise body
    return body


def describe(error: ValidationError) -> str:
    """What is wrong, field by field, without repeating the input."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    parts = [f"{'.'.join(map(str, p['loc'])) or 'body'}: {p['msg']}" for p in problems]
    more = len(parts) - _SHOWN_PROBLEMS
    tail = f"; and {more} more" if more > 0 else ""
    return ("; ".join(parts[:_SHOWN_PROBLEMS]) + tail)[:1000]


def _notice_unknown(body: Request) -> None:
    """Logs each field that is ignored once: a newer SDK may mean something by it."""
    for name in body.unknown_fields():
        label = f"{type(body).__name__}.{name}"[:128]
        if label not in _noticed and len(_noticed) < _MOST_NOTICED:
            _noticed.add(label)
            logger.info("ignoring %r, a field this server does not know", label)
