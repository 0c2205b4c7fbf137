"""``/v1/messages`` through the API: answers, streams, counts and failures in Anthropic's form."""

import json
from typing import Any

import pytest

from tests.server.openai.openai_case import ask
from tests.server.openai.scripted import Talk

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {
    "model": "tuneserve/fake",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "hi"}],
}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


async def test_a_message_with_a_tool_use_goes_to_and_fro(talk: Talk) -> None:
    talk.says(f"<think>\nhm\n</think>\n\nso\n{CALL}")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    # More tokens than the context has are no error: clients do not know the context.
    body = {**BODY, "tools": [TOOL], "thinking": thinking, "max_tokens": 32000}
    response = await talk.post("/v1/messages", body, **{"anthropic-version": "2023-06-01"})
    assert response.status_code == 200, response.text
    message = response.json()
    assert message["id"].startswith("msg_")
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    use = message["content"][2]
    turns = [
        *BODY["messages"],
        {"role": "assistant", "content": message["content"]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "r"}],
        },
    ]
    talk.says("done")
    answered = (await talk.post("/v1/messages", {**body, "messages": turns})).json()
    assert answered["content"] == [{"type": "text", "text": "done"}]
    assert (answered["stop_reason"], answered["usage"]["output_tokens"]) == ("end_turn", 5)
    assert '<think>\nhm\n</think>\n\nso\n<tool_call>\n{"name": "f"' in talk.prompt
    assert "<tool_response>\nr\n</tool_response>" in talk.prompt
    assert talk.prompt.endswith("<|im_start|>assistant\n")
    assert answered["usage"]["input_tokens"] == len(talk.prompt)


async def test_a_stream_has_anthropics_events(talk: Talk) -> None:
    talk.says("one two three")
    response = await talk.post("/v1/messages", {**BODY, "stream": True, "stop_sequences": ["thr"]})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [each.split("\n") for each in response.text.split("\n\n")[:-1] if each[0] != ":"]
    names = [name.removeprefix("event: ") for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    data = [json.loads(each.removeprefix("data: ")) for _, each in events]
    assert [each["type"] for each in data] == names
    assert "".join(each["delta"]["text"] for each in data[2:-3]) == "one two "
    assert data[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "thr"}
    assert data[0]["message"]["usage"]["input_tokens"] == len(talk.prompt)


async def test_a_count_is_that_of_the_message(talk: Talk) -> None:
    talk.says("x")
    body = {**BODY, "tools": [TOOL], "system": "be brief"}
    message = (await talk.post("/v1/messages", body)).json()
    del body["max_tokens"]
    response = await talk.post("/v1/messages/count_tokens", body)
    assert response.json() == {"input_tokens": message["usage"]["input_tokens"]}
    assert response.json() == {"input_tokens": len(talk.prompt)}


async def test_the_hosted_services_prefix_and_both_headers_of_keys_work(talk: Talk) -> None:
    talk.says("yes")
    for headers in ({"x-api-key": "tml-a"}, {"Authorization": "Bearer tml-a"}):
        for prefix in ("", "/anthropic/api"):
            response = await talk.api.http.post(f"{prefix}/v1/messages", json=BODY, headers=headers)
            assert response.json()["content"][0]["text"] == "yes"


@pytest.mark.parametrize(
    ("path", "body", "key", "status", "kind"),
    [
        ("", {**BODY, "max_tokens": 0}, "tml-a", 400, "invalid_request_error"),
        ("", {**BODY, "model": "gpt-4"}, "tml-a", 404, "not_found_error"),
        ("", BODY, "sk-other", 401, "authentication_error"),
        ("/count_tokens", BODY, "tml-a", 400, "invalid_request_error"),  # max_tokens
        ("/nothing", BODY, "tml-a", 404, "not_found_error"),
    ],
)
async def test_failures_have_anthropics_shape(
    talk: Talk, path: str, body: Any, key: str, status: int, kind: str
) -> None:
    headers = {"X-API-Key": key}
    response = await talk.api.http.post(f"/v1/messages{path}", json=body, headers=headers)
    assert response.status_code == status
    failure = response.json()
    assert (failure["type"], failure["error"]["type"]) == ("error", kind)
    assert set(failure["error"]) == {"type", "message", "code"}
    assert "gpt-4" not in failure["error"]["message"] or status == 404


async def test_bodies_that_cannot_be_read_are_400(talk: Talk) -> None:
    for content in (b"", b"[]", b"{", b"\xff", b'{"a": NaN}', b"[" * 500):
        response = await ask(talk.api, "/messages", content=content)
        assert (response.status_code, response.json()["type"]) == (400, "error")


async def test_a_checkpoint_is_named_behind_its_base_model(talk: Talk) -> None:
    api = talk.api
    model = await api.model(await api.session())
    request = {"model_id": model, "seq_id": 1, "path": "mine", "kind": "snapshot"}
    path = (await api.result(await api.post("/save_weights_for_sampler", request)))["path"]
    talk.says("trained")
    for name in (path, f"tuneserve/fake;{path}"):
        message = (await talk.post("/v1/messages", {**BODY, "model": name})).json()
        assert (message["model"], message["content"][0]["text"]) == (name, "trained")
    response = await talk.post("/v1/messages", {**BODY, "model": path}, **{"X-API-Key": "tml-b"})
    assert response.status_code == 404
