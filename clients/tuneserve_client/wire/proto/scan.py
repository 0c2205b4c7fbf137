"""A reader of the key and the sizes of a ``ForwardBackwardRequest``, without decoding its data."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

_MODEL_ID, _SEQ_ID, _DATA, _LOSS, _CONFIG = 1, 2, 3, 4, 7
_MODEL_INPUT = 1  # of a datum
_LONG_CHUNK = 16_392  # from here two tags and two sizes before the tokens take 8 bytes, else 4 to 6
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_NAME = 64  # of a loss: all known names are shorter
_MOST_FIELDS = 65_536  # far more than datums; a body of tiny fields must not hold up the reader
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}


@dataclass(frozen=True)
class RequestHead:
    """The key fields of a request.

    ``whole`` says whether the message is well-formed at its top level, up to its end, and does not
    have an absurd number of fields.
    """

    model_id: str | None
    seq_id: int | None
    whole: bool
    loss: str = ""


def read_head(body: bytes) -> RequestHead:
    """Return the key fields of the message, as far as they can be read. Never raises.

    Later occurrences of a field win, as everywhere in protobuf.
    """
    model_id: str | None = None
    seq_id: int | None = None
    loss = ""
    at = fields = 0
    try:
        while at < len(body):
            fields += 1
            if fields > _MOST_FIELDS:
                return RequestHead(model_id, seq_id, whole=False)
            tag, at = _varint(body, at)
            field, wire_type = tag >> 3, tag & 7
            if wire_type == _VARINT:
                value, at = _varint(body, at)
                if field == _SEQ_ID:
                    seq_id = value
                continue
            size = _FIXED_SIZES.get(wire_type)
            if wire_type == _BYTES:
                size, at = _varint(body, at)
            if size is None or field == 0 or at + size > len(body):
                return RequestHead(model_id, seq_id, whole=False)
            if field == _MODEL_ID and wire_type == _BYTES:
                model_id = body[at : at + size].decode()
            elif field == _LOSS and wire_type == _BYTES and size <= _LONGEST_NAME:
                loss = body[at : at + size].decode()
            at += size
    except (IndexError, UnicodeDecodeError):
        return RequestHead(model_id, seq_id, whole=False)
    return RequestHead(model_id, seq_id, True, loss)


def read_sizes(body: bytes, most: int) -> tuple[int, list[int]]:
    """Return the number of fields of the message and its datums, and each datum's number of tokens.

    Reading stops after ``most`` fields, and where the message is malformed, which decoding will
    report. Input other than text counts by its bytes. Reading comes before decoding because a chunk
    of two bytes takes a hundred once it is decoded.
    """
    fields = 0
    lengths: list[int] = []
    for field, start, end in _fields(body, 0, len(body)):
        if fields >= most:
            break
        fields += 1
        if field != _DATA:
            continue
        lengths.append(0)
        for inner, first, last in islice(_fields(body, start, end), most - fields):
            fields += 1
            if inner == _MODEL_INPUT:
                size = last - first
                lengths[-1] += max(size - (4 if size < _LONG_CHUNK else 8), 0) // 4
    return fields, lengths


def read_config(body: bytes, most_bytes: int) -> bytes | None:
    """Return a ``ForwardBackwardRequest`` with the same ``loss_fn_config_v2``, and nothing else.

    Returns None if it has more than ``most_bytes``.
    """
    found = bytearray()
    for field, start, end in _fields(body, 0, len(body)):
        if field == _CONFIG:
            size = end - start
            if len(found) + size > most_bytes:
                return None
            found += bytes([_CONFIG << 3 | _BYTES, *_as_varint(size)]) + body[start:end]
    return bytes(found)


def _as_varint(value: int) -> Iterator[int]:
    while value >= 0x80:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value


def _fields(body: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number, start and end of each field, until the first malformed one."""
    try:
        while at < end:
            tag, at = _varint(body, at)
            wire_type = tag & 7
            size = _FIXED_SIZES.get(wire_type, 0)
            if wire_type == _VARINT:
                _, at = _varint(body, at)
            elif wire_type == _BYTES:
                size, at = _varint(body, at)
            elif not size:
                return
            if at + size > end:
                return
            yield tag >> 3, at, at + size
            at += size
    except IndexError:
        return


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Return the varint at ``at`` and the offset after it. Raises ``IndexError`` if malformed."""
    value = shift = 0
    while True:
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("a varint of more than ten bytes")
