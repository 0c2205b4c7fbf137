"""Streams of the OpenAI-compatible routes are live: tokens are sent while the rest is decoded.

The fake backend's letters are as in ``test_routes``. Here it decodes one letter per permit.
"""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.openai.openai_case import ASK, CHAT, LETTERS, Streaming, complete, events, whole
from tests.server.openai.openai_case import ask as ask_whole
from tests.support.fake_backend import FAKE_INFO, FakeBackend
from tuneserve_engine.backend.base import SampleProgress, SamplingRequest
from tuneserve_engine.core.jobs import Outcome
from tuneserve_engine.store import refusals

pytestmark = pytest.mark.anyio
LONG = {**ASK, "stream": True, "max_tokens": 6}
TWO = {**LONG, "prompt": ["ab", "abcd"], "max_tokens": 40}
MANY = 1000


class Stepwise(FakeBackend):
    """Advances one step per permit: a letter of every stream, or a whole sample of another kind."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.permits = threading.Semaphore(0)
        self.asked: set[str] = set()

    def draw(self, count: int = MANY) -> None:
        self.permits.release(count)

    def sample_until(
        self, asked: Mapping[str, SamplingRequest], is_over: Callable[[], bool]
    ) -> SampleProgress:
        self.asked |= set(asked)
        assert self.permits.acquire(timeout=10)
        return super().sample_until(asked, lambda: True)


class Live:
    """The API, and a worker that advances step by step."""

    def __init__(self, api: Any, tokenizer: Path) -> None:
        self.api = api
        self._info = replace(FAKE_INFO, tokenizer_id=str(tokenizer))

    async def begin(self) -> None:
        """Start a worker in place of the previous one."""
        await self.api.start_worker(info=self._info, backend=Stepwise)

    async def kill(self) -> None:
        self.draw()
        await self.api.kill_worker()

    @property
    def backend(self) -> Stepwise:
        assert isinstance(self.api.backend, Stepwise)
        return self.api.backend

    def draw(self, count: int = MANY) -> None:
        self.backend.draw(count)

    async def draw_until_said(self, stream: Streaming, choices: int) -> None:
        """Decode step by step until ``choices`` choices have some text. No choice is complete."""
        while len(stream.said) < choices:
            assert not any(len(said) == stream.body["max_tokens"] for said in stream.said.values())
            self.draw(1)
            await asyncio.sleep(0.02)

    def ask(self, body: Any, path: str = "/completions") -> Streaming:
        return Streaming(self.api, path, body)


@pytest.fixture
async def live(api: Any, tokenizer: Path) -> AsyncIterator[Live]:
    made = Live(api, tokenizer)
    await made.begin()
    yield made
    made.draw()


async def test_text_arrives_before_the_last_token_is_decoded(live: Live) -> None:
    async with live.ask({**LONG, "n": 2}) as stream:
        for size in range(1, 6):
            live.draw(1)
            await stream.says({0: "jklmno"[:size], 1: "klmnop"[:size]})
        assert all(
            choice["finish_reason"] is None for each in stream.events for choice in each["choices"]
        )
        live.draw(1)
        await stream.done()
        assert stream.said == {0: "jklmno", 1: "klmnop"}


async def test_a_chat_arrives_as_deltas_of_one_message(live: Live) -> None:
    async with live.ask({**CHAT, "stream": True}, "/chat/completions") as stream:
        live.draw(1)
        await stream.says({0: "y"})
        live.draw(1)
        await stream.says({0: "yz"})
        live.draw(1)
        await stream.done()
        choices = [each["choices"][0] for each in stream.events]
        assert [each["delta"] for each in choices] == [
            {"role": "assistant", "content": ""},
            {"content": "y"},
            {"content": "z"},
            {"content": "A"},
            {},
        ]
        assert [each["finish_reason"] for each in choices] == [None] * 4 + ["length"]


async def test_prompts_are_answered_side_by_side(live: Live) -> None:
    async with live.ask({**TWO, "n": 2}) as stream:
        await live.draw_until_said(stream, 4)
        live.draw()
        await stream.done()
        assert stream.said == {index: LETTERS[index + 9 :][:40] for index in range(4)}


@pytest.mark.parametrize("stop", [None, "mn", ["nox", "z", "o"], ["j"], ["lmnopqrstu"]])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_a_stream_is_the_whole_answer_in_pieces(
    live: Live, stop: Any, logprobs: int | None
) -> None:
    body = {**LONG, "prompt": ["ab", "b"], "n": 3, "stop": stop, "logprobs": logprobs}
    body["stream_options"] = {"include_usage": True}
    async with live.ask(body) as stream:
        for _ in range(8):
            live.draw(1)
            await asyncio.sleep(0.03)
        live.draw()
        await stream.done()
        *pieces, last = stream.events
    assert len(pieces) > 6
    expected = await complete(live.api, **{**body, "stream": False, "stream_options": None})
    assert whole(pieces) == expected["choices"]
    assert last["usage"] == expected["usage"]


async def test_text_that_may_become_a_stop_string_is_not_sent(live: Live) -> None:
    async with live.ask({**LONG, "max_tokens": 9, "stop": ["lmx", "mno"]}) as stream:
        live.draw(2)
        await stream.says({0: "jk"})
        live.draw(2)  # "lm" may start one stop string, then "m" the other
        await stream.says({0: "jk"})
        live.draw(1)
        await stream.says({0: "jkl"})
        live.draw()
        await stream.done()
        assert stream.said == {0: "jkl"}
        assert stream.events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_restarted_sample_repeats_no_text(live: Live) -> None:
    async with live.ask({**LONG, "logprobs": 1}) as stream:
        live.draw(3)
        await stream.says({0: "jkl"})
        await live.kill()
        await live.begin()
        live.draw(5)
        await stream.says({0: "jklmn"})
        live.draw()
        await stream.done()
        expected = await complete(live.api, max_tokens=6, logprobs=1)
        assert whole(stream.events) == expected["choices"]


@pytest.mark.parametrize("lost", ["first", "second", "all"])
async def test_lost_tokens_arrive_with_the_result(
    live: Live, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = live.api.services.store
    told: list[Any] = []

    async def progress(parts: Any) -> None:
        told.append(parts)
        if lost == "all" or len(told) == (1 if lost == "first" else 2):
            raise ConnectionError("lost")
        store._streams.publish(parts)

    monkeypatch.setattr(store, "publish_tokens", progress)
    async with live.ask({**LONG, "logprobs": 1, "n": 2}) as stream:
        for count in range(1, 4):
            live.draw(1)
            while len(told) < count:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        assert stream.said == ({0: "j", 1: "k"} if lost == "second" else {})
        live.draw()
        await stream.done()
        expected = await complete(live.api, max_tokens=6, logprobs=1, n=2)
        assert whole(stream.events) == expected["choices"]


async def test_a_sample_that_fails_during_the_stream_says_why(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live.ask(LONG) as stream:
        live.draw(2)
        await stream.says({0: "jk"})
        (request_id,) = live.backend.asked
        await live.api.services.store.cancel(request_id)
        await stream.until(lambda stream: '"error"' in stream.text)
        assert not stream.is_done
        assert refusals.cancelled().message in stream.text


async def outcome(live: Live, request_id: str) -> Outcome | None:
    found: Outcome | None = await live.api.services.store.wait(request_id, 0)
    return found


async def nobody_listens(live: Live) -> None:
    await asyncio.sleep(0)
    gc.collect()  # a cancelled task is part of its exception's traceback
    assert not live.api.services.store._streams.are_heard


async def test_a_client_that_disconnects_cancels_its_samples(live: Live) -> None:
    async with live.ask(TWO) as stream:
        await live.draw_until_said(stream, 2)
    assert len(live.backend.asked) == 2
    for request_id in live.backend.asked:
        ended = await outcome(live, request_id)
        assert ended is not None and ended.rejection == refusals.cancelled()
    await nobody_listens(live)


async def test_a_delivered_answer_is_not_cancelled(live: Live) -> None:
    live.draw()
    response = await ask_whole(live.api, "/completions", {**LONG, "prompt": ["ab", "abcd"]})
    assert events(response)[-1] == "[DONE]"
    for request_id in live.backend.asked:
        ended = await outcome(live, request_id)
        assert ended is not None and ended.rejection is None
    await nobody_listens(live)
