"""Request bodies: read within limits, decompressed, parsed strictly."""

import asyncio
import logging
from typing import TypeVar

import zstandard
from fastapi import Request as HttpRequest
from pydantic import ValidationError

from tuneserve_client.body import Request
from tuneserve_engine.errors import UserError
from tuneserve_server.errors import BodyTooLarge, BodyTooSlow, Malformed, UnknownEncoding

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Request)
K = TypeVar("K", bound=Request)

_ZSTD_WINDOW = 2**26
_START_BYTES = 4096  # of a body that is too large: enough to read its key
_SHOWN_PROBLEMS = 5
_noticed: set[str] = set()
_MOST_NOTICED = 1000  # field names come from clients; the set must not grow with them


class Cut(BodyTooLarge):
    """The body is over the limit; ``start`` is what had arrived by then."""

    def __init__(self, message: str, start: bytes) -> None:
        super().__init__(message)
        self.start = start


async def read(request: HttpRequest, *, limit_bytes: int, timeout_s: float) -> bytes:
    """The body as sent. Raises ``Cut`` as soon as it exceeds the limit, ``BodyTooSlow``."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > limit_bytes:
                    raise Cut(
                        f"the request body is larger than {limit_bytes} bytes, the limit of this "
                        "server; send less at once",
                        bytes(body),
                    )
    except TimeoutError:
        raise BodyTooSlow(
            f"the request body did not arrive within {timeout_s:g} s; send it again"
        ) from None
    return bytes(body)


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
    body = _read_json(body_type, raw)
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
        return _read_json(key_type, raw), UserError(str(error))
    key: Request = body
    assert isinstance(key, key_type), f"{body_type} does not extend {key_type}"
    return key, body


def _read_json(body_type: type[B], raw: bytes) -> B:
    try:
        return body_type.model_validate_json(raw)
    except ValidationError as error:
        raise Malformed(describe(error)) from None


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
