"""Refusals of the OpenAI-compatible routes, and the answers to requests that wait in vain."""

import asyncio
import json
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.server.openai.openai_case import ASK, CHAT, ask, assert_error, complete, events, texts
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.store import refusals
from tuneserve_engine.store.errors import LimitReached
from tuneserve_server.access.auth import open_tenant

pytestmark = pytest.mark.anyio

REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"presence_penalty": 2.5}, "presence_penalty", "-2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-2 to 2"),
    ({"logit_bias": {"64": 1}}, "logit_bias", "0 to 63"),
    ({"n": 2, "best_of": 1}, "best_of", "below n"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"min_p": 0.1}, "min_p", "not supported"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "not supported"),
    ({"ignore_eos": True}, "ignore_eos", "not supported"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "not supported"),
    ({"guided_json": {}}, "guided_json", "not a field"),
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "at most 1"),
    ({"top_k": -2}, "top_k", "or -1 for all tokens"),
    ({"n": 0}, "n", "1 to 256"),
    ({"n": 257}, "n", "1 to 256"),
    ({"max_tokens": 0}, "max_tokens", "1 to"),
    ({"seed": -1}, "seed", "0 to"),
    ({"stop": ["", "x"]}, "stop", "empty"),
    ({"stop": ["x"] * 300}, "stop", "256"),
    ({"logprobs": 6}, "logprobs", "0 to 5"),
    ({"prompt": []}, "prompt", "1 to 128"),
    ({"prompt": [[1]] * 129}, "prompt", "1 to 128"),
    ({"prompt": ""}, None, "no tokens"),
    ({"prompt": [64]}, None, "0 to 63"),
    ({"prompt": "a" * 64}, None, "context of 64"),
    ({"prompt": None}, "prompt", "prompt"),
    ({"model": ""}, "model", "at least 1"),
]
REFUSED_CHAT: list[tuple[dict[str, Any], str | None, str]] = [
    ({"best_of": 3}, "best_of", "not supported"),
    ({"tools": [{"type": "function"}]}, "tools", "function: Field required"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "has no schema"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs", "as regex"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "not a field"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "1 to"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "role"),
    ({"messages": [{"role": "user", "tool_calls": [{}]}]}, "messages", "tool_calls.0.id"),
    ({"messages": [{"role": "user", "audio": {"id": "a"}}]}, "audio", "messages[0]."),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "content",
    ),
    (
        {"messages": [CHAT["messages"][0], {"role": "system", "content": "x"}]},  # type: ignore[index]
        "messages",
        "system comes first",
    ),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ({"chat_template_kwargs": {"self": 1}}, "messages", "self"),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED)
async def test_an_unsupported_option_of_a_completion_is_refused_by_name(
    speaking: Any, fields: dict[str, Any], param: str | None, said: str
) -> None:
    for stream in (False, True):
        response = await ask(speaking, "/completions", {**ASK, **fields, "stream": stream})
        assert said in assert_error(response, 400, "invalid_request", param)


async def test_an_echo_is_not_streamed(speaking: Any) -> None:
    response = await ask(speaking, "/completions", {**ASK, "echo": True, "stream": True})
    said = assert_error(response, 400, "invalid_request", "echo")
    assert "leave out stream or echo" in said


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED_CHAT)
async def test_an_unsupported_option_of_a_chat_is_refused_by_name(
    speaking: Any, fields: dict[str, Any], param: str | None, said: str
) -> None:
    response = await ask(speaking, "/chat/completions", {**CHAT, **fields})
    assert said in assert_error(response, 400, "invalid_request", param)


async def test_a_chat_with_a_base_model_without_a_template_is_referred_to_completions(
    speaking: Any, tokenizer: Path
) -> None:
    (tokenizer / "tokenizer_config.json").unlink()
    response = await ask(speaking, "/chat/completions", CHAT)
    assert "/v1/completions" in assert_error(response, 400, "invalid_request", "model")
    assert texts(await complete(speaking)) == ["jkl"]


async def test_a_missing_tokenizer_is_503_until_it_appears(speaking: Any, tokenizer: Path) -> None:
    path = tokenizer / "tokenizer.json"
    path.rename(path.with_suffix(".away"))
    response = await ask(speaking, "/completions", ASK)
    assert str(tokenizer) in assert_error(response, 503, "model_unavailable", None)
    assert int(response.headers["retry-after"]) > 0
    path.with_suffix(".away").rename(path)
    assert texts(await complete(speaking)) == ["jkl"]


async def test_a_base_model_that_no_worker_has_served_is_503(api: Any) -> None:
    assert_error(await ask(api, "/completions", ASK), 503, "model_unavailable", None)


async def test_requests_without_a_usable_key_are_401(speaking: Any) -> None:
    response = await ask(speaking, "/completions", ASK, key="sk-other")
    assert_error(response, 401, "unauthorized", None)
    response = await speaking.http.post("/v1/completions", json=ASK, headers={"X-API-Key": "tml-a"})
    assert response.status_code == 200  # the SDK's header is accepted


async def test_failures_of_all_kinds_have_openais_shape(speaking: Any) -> None:
    assert_error(await ask(speaking, "/nothing"), 404, "not_found", None)
    assert_error(await ask(speaking, "/completions"), 405, "method_not_allowed", None)
    for content in (b"", b"null", b"[]", b"{", b"\xff", b'{"a": NaN}', b"[" * 500):
        response = await ask(speaking, "/completions", content=content)
        param = response.json()["error"]["param"]
        assert_error(response, 400, "invalid_request", param)
        assert param in (None, "model")  # the first field that is missing


async def test_too_many_requests_are_429(speaking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    polls, tenant = speaking.services.polls, open_tenant("tml-a")
    with ExitStack() as crowd:
        for _ in range(speaking.services.settings.max_polls_per_tenant):
            crowd.enter_context(polls.counted(tenant))
        response = await ask(speaking, "/completions", ASK)
    assert_error(response, 429, "overloaded", None)
    assert response.headers["retry-after"] == "1"

    async def full(*_: Any) -> Any:
        raise LimitReached("your key has 9 unfinished requests", 5)

    monkeypatch.setattr(speaking.services.store, "submit", full)
    response = await ask(speaking, "/completions", ASK)
    assert_error(response, 429, "overloaded", None)
    assert response.json()["error"]["type"] == "rate_limit_error"


async def test_prompts_before_a_refused_one_are_not_sampled(
    speaking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await speaking.stop_worker()
    store, accepted = speaking.services.store, []
    submit = store.submit

    async def filling(job: Any) -> Any:
        if len(accepted) == 2:
            raise LimitReached("your key has 2 unfinished requests", 5)
        submitted = await submit(job)
        accepted.append(submitted.request_id)
        return submitted

    monkeypatch.setattr(store, "submit", filling)
    response = await ask(speaking, "/completions", {**ASK, "prompt": ["a", "b", "c"]})
    assert_error(response, 429, "overloaded", None)
    assert len(accepted) == 2
    for request_id in accepted:
        assert (await store.wait(request_id, 0)).rejection == refusals.cancelled()


async def test_mutated_bodies_never_cause_a_5xx(speaking: Any) -> None:
    rng = random.Random(5)
    odd = [None, True, -1, 0, 2**70, 1e300, "", "x", [], {}, [[]], ["a", 1], {"type": "text"}]
    for path, body in (("/completions", ASK), ("/chat/completions", CHAT)):
        names = [*body, "stop", "logprobs", "n", "temperature", "stream_options", "top_p", "tools"]
        for _ in range(150):
            changed = {**body, rng.choice(names): rng.choice(odd), rng.choice(names): "x"}
            response = await ask(speaking, path, changed)
            assert response.status_code < 500, (changed, response.text)


async def test_a_failed_request_says_why_in_the_stream_too(
    speaking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> Any:
        raise UserError("this cannot be sampled")

    monkeypatch.setattr(speaking.backend, "sample", refuse)
    said = assert_error(await ask(speaking, "/completions", ASK), 400, "invalid_request", None)
    assert said == "this cannot be sampled"
    (event,) = events(await ask(speaking, "/completions", {**ASK, "stream": True}))
    assert json.loads(event)["error"]["message"] == said


# --- waiting requests ----------------------------------------------------------------------------


async def test_the_request_of_a_client_that_leaves_is_cancelled(
    speaking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samples are not drawn either."""
    await speaking.stop_worker()
    store, cancelled = speaking.services.store, []
    cancel = store.cancel

    async def noted(request_id: str) -> bool:
        cancelled.append(request_id)
        found: bool = await cancel(request_id)
        return found

    monkeypatch.setattr(store, "cancel", noted)
    for stream in (False, True):
        body = json.dumps({**ASK, "stream": stream}).encode()
        messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
        headers = [(b"host", b"localhost"), (b"authorization", b"Bearer tml-a")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": headers,
            "state": {},
        }

        async def receive(messages: list[Any] = messages) -> Any:
            return messages.pop(0) if len(messages) > 1 else messages[0]

        async def send(_: Any) -> None: ...

        async with asyncio.timeout(5):
            await speaking.app(scope, receive, send)
        with speaking.services.polls.counted(open_tenant("tml-a")) as held:
            assert held == 1  # the request itself
        assert len(cancelled) == 1
        ended = await store.wait(cancelled.pop(), 0)
        assert ended.rejection == refusals.cancelled()


async def test_a_waiting_request_ends_when_the_service_stops(speaking: Any) -> None:
    await speaking.stop_worker()
    asking = asyncio.create_task(ask(speaking, "/completions", ASK))
    await asyncio.sleep(0.3)
    speaking.services.polls.release()
    assert_error(await asking, 503, "store_unavailable", None)


async def test_a_sampling_session_is_a_model_until_its_session_ends(speaking: Any) -> None:
    session = await speaking.session()
    sampler = await speaking.sampler(session)
    assert texts(await complete(speaking, model=sampler)) == texts(await complete(speaking))
    unknown = await ask(speaking, "/completions", {**ASK, "model": sampler}, key="tml-b")
    assert_error(unknown, 404, "model_not_found", "model")
    await speaking.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
    ended = await ask(speaking, "/completions", {**ASK, "model": sampler})
    assert_error(ended, 410, "session_ended", None)
