"""Request bodies: their deadlines and strict parsing. ``incoming`` bounds their memory."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request as HttpRequest
from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from tuneserve_client.wire.body import Request, UnknownField
from tuneserve_engine.core.errors import UserError, shown
from tuneserve_engine.core.misspelt import meant
from tuneserve_server.errors import BodyTooLarge, BodyTooSlow, Malformed

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Request)
K = TypeVar("K", bound=Request)

SLOWEST_BYTES_S = 16 * 1024
PRESSED_BYTES_S = 256 * 1024  # the minimum while another tenant waits for the body's memory
_MAX_DEPTH = 32
_MAX_MARKS = 2**20  # far more than any request needs; bounds the time and memory of parsing
_MARKS = b'[]{},"'
_MAX_PARTS = 2**14  # lists and objects; an object may become a pydantic model, the most costly
_MAX_FIELDS = 2**16
_CHARACTER_BYTES = 6  # 1 as sent, 1 as read, 4 in a str with one character outside the BMP
_MARK_BYTES = 48  # {"": 0} takes the most, 40
_PART_BYTES = 700  # an object that becomes a model with an unknown field takes up to 690
_PIECE_BYTES = 256 * 1024  # scanned in one step; other threads run between the steps
_STRUCTURE = b"[]{}:"
_NOT_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_ALIKE = bytes.maketrans(b"{}", b"[]")
_SHOWN_PROBLEMS = 5
_noticed: set[str] = set()
_MOST_NOTICED = 1000  # field names come from clients; the set must not grow with them
_MOST_COMPARED = 32  # unknown fields of a body; comparing one takes up to 0.2 ms


class BodyTruncated(BodyTooLarge):
    """A body over the limit; ``start`` is its beginning, for reading the request's key."""

    def __init__(self, message: str, start: bytes) -> None:
        super().__init__(message)
        self.start = start


@dataclass(eq=False)
class BodyDeadline:
    """The deadline of a body: ``receive`` ends with ``BodyTooSlow`` once the body is late.

    A body may pause for ``grace_s`` seconds, or fall behind ``SLOWEST_BYTES_S`` by as much. A body
    that arrived faster before earns no further delay.
    """

    grace_s: float
    _size: int = field(default=0, init=False)
    _began_s: float = field(default=0.0, init=False)
    _limit: asyncio.Timeout | None = field(default=None, init=False)

    async def receive(self, request: HttpRequest, take: Callable[[bytes], Awaitable[None]]) -> None:
        """Pass the body to ``take`` as it arrives. Raises ``BodyTooSlow``."""
        loop = asyncio.get_running_loop()
        self._began_s = loop.time()
        try:
            async with asyncio.timeout(self.grace_s) as self._limit:
                async for piece in request.stream():
                    size = len(piece)
                    self._size += size
                    if (deadline_s := self._limit.when()) is not None:
                        latest_s = loop.time() + self.grace_s
                        self._limit.reschedule(min(deadline_s + size / SLOWEST_BYTES_S, latest_s))
                    await take(piece)
        except TimeoutError:
            raise BodyTooSlow(
                f"{self._size} bytes of the request body arrived, and then fewer than "
                f"{SLOWEST_BYTES_S} a second for {self.grace_s:g} s, or fewer than "
                f"{PRESSED_BYTES_S} a second while others waited for the memory; send it again"
            ) from None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the deadline during the block, in which the server does not read the body."""
        assert self._limit is not None
        self._limit.reschedule(None)
        began_s = asyncio.get_running_loop().time()
        yield
        now_s = asyncio.get_running_loop().time()
        self._began_s += now_s - began_s
        self._limit.reschedule(now_s + self.grace_s)

    def give_way(self) -> bool:
        """End the body now if it is slow, for others that wait; return whether it is slow."""
        assert self._limit is not None
        now_s = asyncio.get_running_loop().time()
        age_s = now_s - self._began_s
        if age_s < self.grace_s or self._size >= age_s * PRESSED_BYTES_S:
            return False
        if not self._limit.expired():
            self._limit.reschedule(now_s)
        return True


def parse(
    body_type: type[B], raw: bytes, *, finite: bool = True, notices_unknown: bool = True
) -> B:
    """Return the parsed body. Raises ``Malformed`` with the fields at fault.

    All numbers must be ``finite``. Each ignored field is logged once: a newer SDK may mean
    something by it. A field that seems to be misspelt is at fault.
    """
    if len(raw) > _MAX_MARKS:  # a shorter body cannot have too many
        _check_marks(sum(map(_marks, _pieces(raw))))
    if sum(map(raw.count, (b"[", b"{", b":"))) > _MAX_DEPTH:  # else it is within the limits
        _check_structure(raw)

    try:
        # Not validated from the JSON text: each problem would then copy the value at fault.
        body = body_type.model_validate(from_json(raw, allow_inf_nan=True))
        if finite and (b"NaN" in raw or b"Infinity" in raw):
            from_json(raw, allow_inf_nan=False)  # also in fields that are not read
    except ValidationError as error:
        raise Malformed(describe(error)) from None
    except ValueError as error:
        problem = f"the body is not JSON: {error}; all its numbers must be finite"
        raise Malformed(problem) from None

    unknown = body.unknown_fields() if notices_unknown else []
    _check_misspelt(unknown)
    for each in unknown:
        label = f"{body_type.__name__}.{each.place}{each.name}"[:128]
        if label not in _noticed and len(_noticed) < _MOST_NOTICED:
            _noticed.add(label)
            logger.info("ignoring %r, a field that this server does not know", label)
    return body


def _check_misspelt(unknown: Sequence[UnknownField]) -> None:
    """Raise ``Malformed`` for a field that seems to be a misspelt one, which would be ignored."""
    for place, name, absent in unknown[:_MOST_COMPARED]:
        if close := meant(name, absent):
            raise Malformed(
                f"{shown(place + name)} is not a field of this request; did you mean "
                f"{place}{close}? Rename the field, or leave it out"
            )


def parse_keyed(raw: bytes, key_type: type[K], body_type: type[B]) -> tuple[K, B | UserError]:
    """Return the request's key, and the body or the ``UserError`` with its problems.

    Raises ``Malformed`` only if not even the key can be read. With the key, the problem can be
    reported through the request's future, and the request's sequence number is used up.
    """
    try:
        body = parse(body_type, raw)
    except Malformed as error:
        only_key = parse(key_type, raw, finite=False, notices_unknown=False)
        return only_key, UserError(str(error))
    key: Request = body
    assert isinstance(key, key_type), f"{body_type} does not extend {key_type}"
    return key, body


def _check_structure(raw: bytes) -> None:
    """Raise ``Malformed`` for a body that nests too deep or has too many parts."""
    structure = _structure(raw)
    parts, fields = structure.count(b"[") + structure.count(b"{"), structure.count(b":")
    if parts > _MAX_PARTS or fields > _MAX_FIELDS:
        raise Malformed(
            f"the body has {parts} lists and objects with {fields} fields; the limits are "
            f"{_MAX_PARTS} and {_MAX_FIELDS}; send less at once"
        )
    brackets = structure.translate(_ALIKE, b":")
    for _ in range(_MAX_DEPTH):  # each round removes the innermost pairs
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise Malformed(
            f"the body nests deeper than {_MAX_DEPTH} levels, or its brackets do not match; send "
            "flatter, well-formed JSON"
        )


def _structure(raw: bytes) -> bytes:
    """Return the brackets and colons outside strings.

    The body is scanned in pieces, because one long step of Python holds up all other threads.
    """
    found = []
    at, in_text = 0, False
    while at < len(raw):
        piece = raw[at : at + _PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # it ends inside an escape
            piece = raw[at : at + _PIECE_BYTES + 1]
        at += len(piece)
        runs = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        found += [run.translate(None, _NOT_STRUCTURE) for run in runs[in_text::2]]
        in_text ^= len(runs) % 2 == 0
    return b"".join(found)


def _pieces(raw: bytes) -> Iterator[bytes]:
    for at in range(0, len(raw), _PIECE_BYTES):
        yield raw[at : at + _PIECE_BYTES]


def parsed_bytes(pieces: Iterable[bytes]) -> int:
    """Return an upper bound, by measured constants, of the memory to parse or refuse the body.

    Raises ``Malformed`` for a body with too many marks, which ``parse`` refuses too.
    """
    size = objects = marks = 0
    for piece in pieces:
        size += len(piece)
        objects += piece.count(b"{")
        marks += _marks(piece)
    _check_marks(marks)
    objects = min(objects, _MAX_PARTS)
    return _CHARACTER_BYTES * size + _MARK_BYTES * marks + _PART_BYTES * objects


def _marks(piece: bytes) -> int:
    return len(piece) - len(piece.translate(None, _MARKS))  # one pass for all marks


def _check_marks(marks: int) -> None:
    if marks > _MAX_MARKS:
        raise Malformed(
            f"the body has {marks} brackets, commas and quotes; the limit is {_MAX_MARKS}; send "
            "less at once"
        )


def accepted(body: B | UserError) -> B:
    """Return the body, or raise the ``UserError`` that stands in its place."""
    if isinstance(body, UserError):
        raise body
    return body


def describe(error: ValidationError) -> str:
    """Describe the problems field by field, without repeating the input.

    There are few problems, however large the body is: of a list only the first is reported
    (``tuneserve_client.wire.body.Request``).
    """
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    parts = [f"{'.'.join(map(str, p['loc'])) or 'body'}: {_problem(p)}" for p in problems]
    more = len(parts) - _SHOWN_PROBLEMS
    tail = f"; and {more} more" if more > 0 else ""
    return ("; ".join(parts[:_SHOWN_PROBLEMS]) + tail)[:1000]


def _problem(problem: ErrorDetails) -> str:
    """Return the problem in words that do not name internal types."""
    return "Input should be an object" if problem["type"] == "model_type" else problem["msg"]
