"""Valid bodies made invalid in every way that a client or an attacker may find.

The given generator decides everything: one seed gives one sequence of bodies.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import zstandard

CANARY = "canary-4f1c"
"""A mark in the requests that must not appear in an error."""

NAMES = {
    *("session_id", "model_id", "sampling_session_id", "request_id", "target"),
    *("base_model", "model", "path", "model_path", "tinker_path"),
    *("upload_id", "source_path"),
}
"""Fields that name an object: an error may repeat the name."""

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 31, 32, 255, 256, 2**31 - 1, 2**31, 2**53 + 1),
    *(2**63 - 1, 2**63, -(2**63), 2**64, 10**40, -(10**400), 10**4000),
    *(0.0, -0.0, 1.0, 1.5, 5e-324, 1e300, -1e308),
    *("", CANARY, CANARY * 1000, "\0", "..", "../../" + CANARY, "/etc/passwd", "1", "\u202e"),
    *(f"tinker://{CANARY}/weights/a", "\ufeff", "\ud7ff\ue000", "🦆" * 100, "a" * 100_000),
    *([], [CANARY], [[]], {}, {"": None}, {CANARY: CANARY}, [None] * 100, [0] * 5000),
]
LITERALS = [
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1e-999", b"0x10", b"01", b"+1"),
    *(b".5", b"1.", b"--1", b"nul", b"True", b"undefined", b"'a'", b"a", b"", b",", b"}", b"]"),
    *(rb'"\ud800"', rb'"\udc00"', rb'"\ud800\ud800"', rb'"\u12"', rb'"\x41"', b'"\n"', b'"\t"'),
    *(b'"\xff"', b'"\xed\xa0\x80"', b'"\xc0\xaf"', b'"\xf4\x90\x80\x80"', b'"a', b"/* */1"),
    *(
        rb'"\u0000"',
        b"[" * 33,
        b'{"a":' * 33,
        b"[" * 40 + b"]" * 40,
        b"9" * 5000,
        b"1" + b"0" * 400,
    ),
    *(b'{"a":' * 200 + b"1" + b"}" * 200, b"[" * 100_000, b'["[{"]', b"\0", b" " * 5000 + b"1"),
]
_MARK = "@mutated@"
Mutation = Callable[[random.Random, Any], bytes]


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys or indices."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from _places(node[key])


def _place(rng: random.Random, body: Any) -> tuple[Any, Any, Any]:
    """A copy of the body, and one place in it."""
    changed = copy.deepcopy(body)
    holder, key = rng.choice(list(_places(changed)))
    return changed, holder, key


def _value(rng: random.Random, body: Any) -> bytes:
    changed, holder, key = _place(rng, body)
    holder[key] = rng.choice(VALUES)
    return json.dumps(changed).encode()


def _literal(rng: random.Random, body: Any) -> bytes:
    changed, holder, key = _place(rng, body)
    holder[key] = _MARK
    return json.dumps(changed).encode().replace(b'"@mutated@"', rng.choice(LITERALS))


def _wrong_type(rng: random.Random, body: Any) -> bytes:
    changed, holder, key = _place(rng, body)
    value = holder[key]
    ways = [str(value), [value], {"value": value}, None, not value]
    ways += [float(value), -value, value + 0.5] if isinstance(value, int) else []
    holder[key] = rng.choice(ways)
    return json.dumps(changed).encode()


def _without(rng: random.Random, body: Any) -> bytes:
    changed, holder, key = _place(rng, body)
    del holder[key]
    return json.dumps(changed).encode()


def _more(rng: random.Random, body: Any) -> bytes:
    changed, holder, key = _place(rng, body)
    if isinstance(holder, dict):
        holder[rng.choice([CANARY, key.upper(), "__class__", "tenant", ""])] = rng.choice(VALUES)
    else:
        holder += holder * rng.choice([1, 10, 1000])
    return json.dumps(changed).encode()


def _twice(rng: random.Random, body: Any) -> bytes:
    """Repeat a key with another value. The last one counts."""
    key = rng.choice(list(body))
    again = json.dumps({key: rng.choice([*VALUES, body[key]])}).encode()
    return json.dumps(body).encode()[:-1] + b", " + again[1:]


def _truncated(rng: random.Random, body: Any) -> bytes:
    text = json.dumps(body).encode()
    return text[: rng.randrange(len(text))]


def _bytes(rng: random.Random, body: Any) -> bytes:
    text = bytearray(json.dumps(body).encode())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text))
        text[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
    return bytes(text)


def _surroundings(rng: random.Random, body: Any) -> bytes:
    text = json.dumps(body).encode()
    wrap = rng.choice(
        [(b"\xef\xbb\xbf", b""), (b"", b"\0"), (b"", text), (b"[", b"]"), (b"1", b"")]
    )
    return wrap[0] + text + wrap[1]


def _no_object(rng: random.Random, body: Any) -> bytes:
    other = [b"", b"null", b"[]", b'"' + CANARY.encode() + b'"', b"0", b"{}", b"\x1f\x8b\x08", b"{"]
    text = json.dumps(body)
    return rng.choice([*other, text.encode("utf-16"), text.encode("utf-32-le"), rng.randbytes(64)])


def _as_it_is(_: random.Random, body: Any) -> bytes:
    return json.dumps(body).encode()


JSON_MUTATIONS: list[Mutation] = [
    *(_value, _value, _value, _literal, _literal, _wrong_type, _wrong_type, _without, _more),
    *(_twice, _truncated, _bytes, _surroundings, _no_object, _as_it_is),
]


def mutated_json(rng: random.Random, body: Any) -> bytes:
    return rng.choice(JSON_MUTATIONS)(rng, body)


# --- protobuf ------------------------------------------------------------------------------------


def mutated_message(rng: random.Random, whole: bytes, key_bytes: int) -> bytes:
    """The message with wrong bytes, mostly after the first ``key_bytes``, which contain its key."""
    start = key_bytes if rng.random() < 0.85 else 0
    changed = bytearray(whole)
    for _ in range(rng.choice([0, 1, 1, 2, 4, 16])):
        rng.choice([_flip, _lie, _splice, _truncate])(rng, changed, start)
    return bytes(changed)


def _flip(rng: random.Random, message: bytearray, start: int) -> None:
    if len(message) > start:
        message[rng.randrange(start, len(message))] ^= 1 << rng.randrange(8)


def _lie(rng: random.Random, message: bytearray, start: int) -> None:
    """Change a number that may be a length, by one or by far."""
    if len(message) > start:
        at = rng.randrange(start, len(message))
        lies = [b"\x00", b"\x7f", b"\xff\x01", b"\xff\xff\xff\xff\x07", b"\xff" * 9 + b"\x01"]
        message[at : at + 1] = rng.choice([*lies, bytes([message[at] ^ 1])])


def _splice(rng: random.Random, message: bytearray, start: int) -> None:
    """Insert a copy of a part of the message elsewhere, or random bytes."""
    at, piece = (rng.randrange(start, len(message) + 1) for _ in "12")
    piece_bytes = bytes(message[piece : piece + rng.choice([1, 8, 64])])
    message[at:at] = rng.choice([piece_bytes, piece_bytes * 8, rng.randbytes(8)])


def _truncate(rng: random.Random, message: bytearray, start: int) -> None:
    del message[rng.randrange(start, len(message) + 1) :]


def compressed(rng: random.Random, message: bytes) -> tuple[bytes, str]:
    """The body as sent, and its ``Content-Encoding``, which may be wrong."""
    frame = zstandard.ZstdCompressor(write_content_size=rng.random() < 0.5).compress(message)
    way = rng.random()
    if way < 0.5:
        return frame, "zstd"
    if way < 0.8:
        broken = bytearray(frame)
        rng.choice([_flip, _lie, _splice, _truncate])(rng, broken, 0)
        return bytes(broken), "zstd"
    if way < 0.9:
        return frame + frame, "zstd"
    return message, rng.choice(["zstd", "gzip", "identity", "ZSTD", "zstd, zstd", CANARY])
