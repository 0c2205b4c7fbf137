"""Calls that are sent in several parts, each of which may fail alone."""

import asyncio
from collections.abc import Awaitable

import pytest

from tuneserve_client.errors import RequestFailed, Unreachable
from tuneserve_client.futures import of_all_parts, split_id

pytestmark = pytest.mark.anyio


async def part(outcome: object, ended: list[object]) -> object:
    await asyncio.sleep(0)
    ended.append(outcome)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def parts(outcomes: list[object], ended: list[object]) -> list[Awaitable[object]]:
    return [part(outcome, ended) for outcome in outcomes]


async def test_the_results_of_all_parts_keep_their_order() -> None:
    assert await of_all_parts(parts([1, 2, 3], [])) == [1, 2, 3]


async def test_the_first_error_counts_the_failed_parts_once_all_have_ended() -> None:
    first, second = RequestFailed("no memory", category="server"), Unreachable("gone")
    ended: list[object] = []
    with pytest.raises(RequestFailed, match=r"no memory; .*3 parts, of which 2 failed") as caught:
        await of_all_parts(parts([1, first, second], ended))
    assert caught.value is first
    assert ended == [1, first, second]


async def test_an_error_of_all_parts_is_raised_unchanged() -> None:
    failed = RequestFailed("no memory", category="server")
    with pytest.raises(RequestFailed, match=r"^no memory$"):
        await of_all_parts(parts([failed, RequestFailed("too", category="server")], []))


def test_an_id_has_one_request_id_for_each_part() -> None:
    assert split_id("req_a") == ["req_a"]
    assert split_id("req_a,req_b") == ["req_a", "req_b"]
