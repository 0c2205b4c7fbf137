"""Request bodies: how long they may take, how deep they may nest, which numbers they may hold."""

import asyncio
import json
import time

import pytest
from fastapi import Request
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneserve_client.body import Request as Body
from tuneserve_server import body
from tuneserve_server.errors import BodyTooLarge, BodyTooSlow, Malformed

LIMIT_BYTES = 2**20


class Anything(Body):
    """A body that is never at fault itself."""


async def arriving(pieces: list[bytes], pause_s: float, timeout_s: float) -> bytes:
    """What is read of a body whose pieces arrive one by one."""
    left = list(pieces)

    async def receive() -> dict[str, object]:
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    return await body.read(request, limit_bytes=LIMIT_BYTES, timeout_s=timeout_s)


@pytest.mark.anyio
async def test_a_body_that_stalls_is_given_up_when_its_time_is_over() -> None:
    started_s = time.monotonic()
    with pytest.raises(BodyTooSlow, match="only 2 bytes"):
        await arriving([b"a"] * 1000, pause_s=0.04, timeout_s=0.1)
    assert time.monotonic() - started_s < 1


@pytest.mark.anyio
async def test_a_large_body_has_a_second_more_for_each_16_kib() -> None:
    """By hand: the last piece comes after 1.6 s, and 0.5 s + 7 x 8 KiB / 16 KiB/s = 4 s are allowed
    by then; the third piece would be late without its summand."""
    pieces = [b"a" * 8192] * 8
    assert len(await arriving(pieces, pause_s=0.2, timeout_s=0.5)) == 8 * 8192


@pytest.mark.anyio
async def test_a_body_over_the_limit_is_refused_before_it_ends() -> None:
    with pytest.raises(BodyTooLarge):
        await arriving([b"a" * LIMIT_BYTES, b"a"] + [b""] * 1000, pause_s=0, timeout_s=5)


@pytest.mark.parametrize("levels", [31, 32, 33, 150, 10_000])
@pytest.mark.parametrize("pair", ["[]", '{"a":}'])
def test_a_body_may_nest_32_levels(levels: int, pair: str) -> None:
    inner = levels - 1  # the body itself is one
    nested = pair[:-1] * inner + "1" + pair[-1] * inner
    raw = f'{{"x": {nested}}}'.encode()
    if levels <= 32:
        body.parse(Anything, raw)
    else:
        with pytest.raises(Malformed, match="deeper than 32 levels"):
            body.parse(Anything, raw)


JSON = st.recursive(
    st.none() | st.text('[]{}"\\\n a', max_size=6) | st.integers(0, 9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('"\\[}', max_size=2), inner)
    ),
    max_leaves=40,
)


@given(st.lists(JSON, max_size=30))
@settings(max_examples=300)
def test_brackets_inside_of_text_do_not_count(values: list[object]) -> None:
    """By an explicit walk: whatever is no deeper than the limit passes."""

    def depth(value: object) -> int:
        if isinstance(value, dict):
            value = list(value.values())
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    raw = json.dumps({"x": values}).encode()
    assert depth({"x": values}) <= 32
    body.parse(Anything, raw)


def test_a_long_text_full_of_brackets_is_only_text() -> None:
    raw = json.dumps({"x": "[{" * 1000, "y": ['"]}\\'] * 100}).encode()
    assert body.parse(Anything, raw).model_extra == json.loads(raw)


@pytest.mark.parametrize(
    "raw",
    [b"[" * 2**24, b'[[[["",' * (2**24 // 7), (b"[" * 31 + b"]" * 31) * (2**24 // 62)],
    ids=["open", "texts", "hills"],
)
def test_16_mib_of_brackets_are_refused_within_a_quarter_of_a_second(raw: bytes) -> None:
    started_s = time.process_time()
    with pytest.raises(Malformed):
        body.parse(Anything, raw)
    assert time.process_time() - started_s < 0.25


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("place", ["%s", "[%s]", '{"a": [1, %s]}'])
def test_a_number_that_json_does_not_have_is_refused_in_fields_that_nobody_reads(
    number: str, place: str
) -> None:
    with pytest.raises(Malformed, match="must be finite"):
        body.parse(Anything, f'{{"x": {place % number}}}'.encode())


def test_their_names_as_text_are_text() -> None:
    body.parse(Anything, b'{"x": "NaN", "Infinity": ["-Infinity"]}')


@pytest.mark.parametrize("text", [rb'"\ud800"', rb'"\udc00\ud800"', b'"\xed\xa0\x80"', b'"\xff"'])
def test_text_that_is_no_unicode_is_refused(text: bytes) -> None:
    for raw in (b'{"x": ' + text + b"}", b"{" + text + b": 1}"):
        with pytest.raises(Malformed):
            body.parse(Anything, raw)
