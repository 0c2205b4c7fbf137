"""Texts that are too long are refused by their length. Others are tokenized within limits."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.server.openai.openai_case import ASK, ask, assert_error, chat, complete
from tests.support.fake_backend import FAKE_INFO
from tuneserve_client.wire.tokenizer import Tokenizer
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.access.auth import open_tenant
from tuneserve_server.base_model_text import CHARACTER_BYTES, BaseText, TokenizerPool
from tuneserve_server.errors import InvalidField

pytestmark = pytest.mark.anyio

LONGEST = FAKE_INFO.context_length * len("<eos>")
"""The largest number of characters that the context of the fake model can hold."""


@pytest.fixture
def no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tokenizer fail."""

    def encode(self: Tokenizer, text: str, **_: bool) -> list[int]:
        raise AssertionError(f"tokens were made of {len(text)} characters")

    monkeypatch.setattr(Tokenizer, "encode", encode)


@pytest.mark.usefixtures("no_tokens")
async def test_a_prompt_longer_than_the_context_is_never_tokenized(speaking: Any) -> None:
    long = "a" * (LONGEST + 1)
    for prompt in (long, ["a", long]):
        body = {"model": "tuneserve/fake", "prompt": prompt}
        response = await ask(speaking, "/completions", body)
        error = assert_error(response, 400, "invalid_request", "prompt")
        assert (
            f"{LONGEST + 1} characters" in error and f"hold more than {LONGEST} characters" in error
        )


@pytest.mark.usefixtures("no_tokens")
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a" * (LONGEST + 1)}],
        [{"role": "user", "content": [{"type": "text", "text": "a" * LONGEST}] * 2}],
        [{"role": "user", "content": "a", "reasoning_content": "a" * LONGEST}],
        [{"role": "user", "content": "", "name": "a" * (LONGEST + 1)}],
        [{"role": "user", "content": ""}] * (FAKE_INFO.context_length + 1),
    ],
)
async def test_a_conversation_longer_than_the_context_is_never_tokenized(
    speaking: Any, messages: Any
) -> None:
    body = {"model": "tuneserve/fake", "messages": messages}
    response = await ask(speaking, "/chat/completions", body)
    assert_error(response, 400, "invalid_request", "messages")


async def test_a_rendered_conversation_is_checked_too(
    speaking: Any, tokenizer: Path, no_tokens: None
) -> None:
    (tokenizer / "chat_template.jinja").write_text("{{ messages[0].content * 100 }}")
    body = {"model": "tuneserve/fake", "messages": [{"role": "user", "content": "abcd"}]}
    response = await ask(speaking, "/chat/completions", body)
    error = assert_error(response, 400, "invalid_request", "messages")
    assert "400 characters in the chat template" in error


async def test_a_text_that_may_fit_is_tokenized_and_counted(speaking: Any) -> None:
    body = {"model": "tuneserve/fake", "prompt": "a" * LONGEST}
    error = assert_error(await ask(speaking, "/completions", body), 400, "invalid_request", None)
    assert f"has {LONGEST} tokens" in error


async def test_texts_wait_for_their_memory_and_then_get_a_429(
    speaking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneserve_server.base_model_text._FREE_BYTES", 0)
    texts = speaking.services.tokenizers
    monkeypatch.setattr(texts.memory, "_wait_s", 0.05)
    async with texts.memory.taken(open_tenant("tml-a"), texts.memory.most):
        response = await ask(speaking, "/completions", {"model": "tuneserve/fake", "prompt": "ab"})
        assert_error(response, 429, "overloaded", None)
        assert "(text_memory_bytes)" in response.json()["error"]["message"]
        assert response.headers["retry-after"] == "2"
        other = await ask(speaking, "/completions", ASK, key="tml-b")
        assert other.status_code == 200
    await complete(speaking)
    await chat(speaking)
    assert texts.memory.held == 0


async def test_a_body_is_released_while_its_answer_is_awaited(speaking: Any) -> None:
    """Answers take up to an hour, and a body of 300 KB would count 1.2 MB until then."""
    await speaking.kill_worker()
    memory = speaking.services.body_memory
    body = {**ASK, "metadata": {"note": "x" * 300_000}}
    asking = asyncio.create_task(ask(speaking, "/completions", body))
    async with asyncio.timeout(10):
        while not memory.used:
            await asyncio.sleep(0)
        assert memory.used > 300_000
        while memory.used:
            await asyncio.sleep(0.005)
    assert not asking.done()
    await speaking.start_worker("next", info=await served(speaking))
    assert (await asking).status_code == 200


async def served(api: Any) -> BaseModelInfo:
    return (await api.services.served.known())[0].info


async def test_a_text_for_which_memory_never_suffices_is_refused(speaking: Any) -> None:
    info = replace(FAKE_INFO, context_length=10**6, tokenizer_id=str(TINY_MODEL))
    await speaking.kill_worker()
    await speaking.start_worker("other", info=info)
    most = speaking.services.tokenizers.most_characters
    assert most == 2**27 // CHARACTER_BYTES
    body = {"model": "tuneserve/fake", "prompt": "a" * (most + 1)}
    error = assert_error(
        await ask(speaking, "/completions", body), 400, "invalid_request", "prompt"
    )
    assert f"up to {most} at once (text_memory_bytes)" in error


async def test_other_requests_run_while_a_text_is_tokenized() -> None:
    """The library's call for a single text blocks everything else in the process."""
    text, texts = BaseText("tuneserve/tiny", TINY_MODEL), TokenizerPool(2**30)
    gaps: list[float] = []

    async def tick() -> None:
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now_s = time.perf_counter()
            gaps.append(now_s - last_s)
            last_s = now_s

    ticking = asyncio.create_task(tick())
    started_s = time.perf_counter()
    await texts.tokens("a", 10**6, lambda: [text.encode("word " * 200_000)])
    took_s = time.perf_counter() - started_s
    ticking.cancel()
    texts.stop()
    assert max(gaps) < took_s / 2


async def test_a_text_that_makes_the_tokenizer_fail_is_the_requests_fault(
    speaking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten million spaces exceed its regular expressions."""
    info = replace(FAKE_INFO, context_length=10**6, tokenizer_id=str(TINY_MODEL))
    await speaking.kill_worker()
    await speaking.start_worker("other", info=info)
    monkeypatch.setattr(TokenizerPool, "most_characters", 10**8)
    monkeypatch.setattr("tuneserve_server.base_model_text.CHARACTER_BYTES", 1)
    spaces = " " * 10**7
    response = await ask(speaking, "/completions", {"model": "tuneserve/fake", "prompt": spaces})
    error = assert_error(response, 400, "invalid_request", "prompt")
    assert "the tokenizer gave up on this text of 10000000 characters" in error
    messages = [{"role": "user", "content": spaces}]
    body = {"model": "tuneserve/fake", "messages": messages}
    response = await ask(speaking, "/chat/completions", body)
    assert_error(response, 400, "invalid_request", "messages")


@pytest.mark.parametrize("special", [True, False])
def test_long_texts_have_the_same_tokens_as_with_the_library(special: bool) -> None:
    library = tokenizers.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 5)]
    )
    text = "naïve 🎉 words, 日本語 <|im_end|>\n  \n" * 300
    assert len(text) > 4096
    expected = library.encode(text, add_special_tokens=special).ids
    assert Tokenizer(library.to_str()).encode(text, special=special) == expected


def test_no_token_has_more_characters_than_the_limit_assumes() -> None:
    text = BaseText("tuneserve/tiny", TINY_MODEL)
    longest = text.most_characters(1)
    library = tokenizers.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    for token in range(library.get_vocab_size()):
        assert len(library.decode([token], skip_special_tokens=False)) <= longest


def test_other_failures_of_a_tokenizer_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    text = BaseText("tuneserve/tiny", TINY_MODEL)
    with pytest.raises(InvalidField, match="half of a surrogate pair"):
        text.encode("\ud800")

    class Stopped(BaseException): ...

    def stopped(*_: object, **__: object) -> None:
        raise Stopped

    monkeypatch.setattr(text._tokenizer, "_encode_apart", stopped)
    with pytest.raises(Stopped):
        text.encode("a" * 5000)
