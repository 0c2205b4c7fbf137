"""``/v1/responses`` as the ``openai`` client uses it."""

import json
from typing import Any

import pytest
from openai.types.responses import Response

from tests.server.openai.openai_case import assert_error
from tests.server.openai.scripted import Talk

pytestmark = pytest.mark.anyio

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object"},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SAID = f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}"


async def whole(talk: Talk, **fields: Any) -> Response:
    async with talk.openai() as client:
        return await client.responses.create(
            **{"model": "tuneserve/fake", "input": "hi", "tools": [TOOL], **fields}
        )


async def streamed(talk: Talk, **fields: Any) -> tuple[Any, list[Any]]:
    """The response as the client accumulates it, and the events."""
    asked: Any = {"model": "tuneserve/fake", "input": "hi", "tools": [TOOL], **fields}
    async with talk.openai() as client, client.responses.stream(**asked) as stream:
        events = [event async for event in stream]
        return await stream.get_final_response(), events


def without_ids(output: list[Any]) -> list[dict[str, Any]]:
    found = [each.to_dict() for each in output]
    for each in found:
        assert each.pop("id")
        each.pop("call_id", None)
        each.pop("parsed_arguments", None)
        for part in each.get("content") or ():
            part.pop("parsed", None)
    return found


async def test_a_response_has_reasoning_text_and_calls(talk: Talk) -> None:
    talk.says(SAID)
    response = await whole(talk, instructions="be brief", metadata={"a": "b"})
    assert Response.model_validate(response.to_dict()) == response, "all fields that the SDK needs"
    assert (response.status, response.output_text) == ("completed", "I look.")
    call = {
        "type": "function_call",
        "name": "weather",
        "arguments": '{"city": "Oslo"}',
        "status": "completed",
    }
    text = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    thought = {"type": "reasoning_text", "text": "hm"}
    assert without_ids(response.output) == [
        {"type": "reasoning", "summary": [], "content": [thought]},
        {"type": "message", "role": "assistant", "status": "completed", "content": [text]},
        call,
        call,
    ]
    assert response.usage is not None
    assert response.usage.input_tokens == len(talk.prompt)
    assert response.usage.output_tokens == len(SAID) + 1  # the end of sequence
    assert response.usage.output_tokens_details.reasoning_tokens == len("hm")
    assert (response.instructions, response.metadata) == ("be brief", {"a": "b"})
    assert response.model_dump()["store"] is False


async def test_a_stream_accumulates_to_the_same_response(talk: Talk) -> None:
    talk.says(SAID)
    expected = without_ids((await whole(talk)).output)
    response, events = await streamed(talk)
    assert without_ids(response.output) == expected
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(said) == "I look."
    thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thought) == "hm"
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert added == done == [each.id for each in response.output]


async def test_a_response_that_is_cut_is_incomplete(talk: Talk) -> None:
    talk.says("a long story")
    response = await whole(talk, max_output_tokens=6)
    async with talk.openai() as client:
        sent = [
            event
            async for event in await client.responses.create(
                model="tuneserve/fake", input="hi", max_output_tokens=6, stream=True
            )
        ]
    last: Any = sent[-1]
    assert last.type == "response.incomplete"
    for found in (response, last.response):
        assert (found.status, found.output_text) == ("incomplete", "a long")
        assert found.incomplete_details.reason == "max_output_tokens"
        assert found.output[0].status == "incomplete"
    assert sent[-2].item.status == "incomplete"  # type: ignore[union-attr]


async def test_a_response_can_be_sent_back_as_input(talk: Talk) -> None:
    talk.says(SAID)
    response = await whole(talk)
    history: list[Any] = [{"role": "user", "content": "hi"}, *response.output]
    for item in response.output:
        if item.type == "function_call":
            output = json.dumps({"sky": "grey"})
            history.append(
                {"type": "function_call_output", "call_id": item.call_id, "output": output}
            )
    talk.says("Grey.")
    assert (await whole(talk, input=history)).output_text == "Grey."
    assert f"<|im_start|>assistant\n{SAID}<|im_end|>" in talk.prompt
    assert talk.prompt.count('<tool_response>\n{"sky": "grey"}\n</tool_response>') == 2


async def test_failures_name_the_clients_fields(talk: Talk) -> None:
    body = {"model": "tuneserve/fake", "input": "x" * 100_000}
    response = await talk.post("/v1/responses", body)
    said = assert_error(response, 400, "invalid_request", "input")
    assert said.startswith("input has 100000 characters")
    response = await talk.post("/v1/responses", {**body, "input": "x", "store": True})
    assert "store: false" in assert_error(response, 400, "invalid_request", "store")
    response = await talk.post("/v1/responses", {**body, "input": "x", "model": "gpt-4"})
    assert_error(response, 404, "model_not_found", "model")
    response = await talk.post("/oai/api/v1/responses", {**body, "input": "x", "temperature": -1})
    assert_error(response, 400, "invalid_request", "temperature")
