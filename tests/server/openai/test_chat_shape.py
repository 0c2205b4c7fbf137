"""Tool calls and reasoning blocks of chats, as the ``openai`` client reads them."""

import json
import threading
from typing import Any

import pytest

from tests.server.openai.openai_case import Streaming
from tests.server.openai.scripted import LLAMA, OPENED, Talk
from tuneserve_server.openai.call_formats import HermesFormat
from tuneserve_server.openai.chat_shape import ChatShape
from tuneserve_server.openai.message_parser import MessageFormat
from tuneserve_server.openai.responses import Choice, ScoredToken

pytestmark = pytest.mark.anyio

USER: Any = {"role": "user", "content": "weather in Oslo?"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def asked(**fields: Any) -> Any:
    return {"model": "tuneserve/fake", "messages": [USER], **fields}


async def whole(talk: Talk, **fields: Any) -> Any:
    async with talk.openai() as client:
        answer = await client.chat.completions.create(**asked(**fields))
    return answer.choices[0]


async def streamed(talk: Talk, **fields: Any) -> tuple[Any, list[Any]]:
    """The final choice as the client accumulates it, and the deltas."""
    deltas = []
    async with talk.openai() as client, client.chat.completions.stream(**asked(**fields)) as stream:
        async for event in stream:
            if event.type == "chunk":
                deltas += [choice.delta for choice in event.chunk.choices]
        answer = await stream.get_final_completion()
    return answer.choices[0], deltas


def calls(choice: Any) -> list[tuple[str, Any]]:
    """The calls of a choice. Their ids are checked here: each has its own."""
    found = choice.message.tool_calls or []
    assert len({call.id for call in found}) == len(found)
    assert all(call.id and call.type == "function" for call in found)
    return [(call.function.name, json.loads(call.function.arguments)) for call in found]


async def test_tool_calls_are_answered_whole_and_in_a_stream(talk: Talk) -> None:
    talk.says(f"I look it up.\n{OSLO}\n{TIME}")
    expected = [("weather", {"city": "Oslo"}), ("time", {})]
    choice = await whole(talk, tools=TOOLS)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look it up.")
    assert calls(choice) == expected
    again, deltas = await streamed(talk, tools=TOOLS)
    assert (again.finish_reason, again.message.content) == ("tool_calls", "I look it up.")
    assert calls(again) == expected
    said = [delta.content for delta in deltas if delta.content]
    assert "".join(said) == "I look it up."


async def test_a_message_of_calls_alone_has_no_content(talk: Talk) -> None:
    talk.says(OSLO)
    choice = await whole(talk, tools=TOOLS)
    assert choice.message.content is None
    assert calls(choice) == [("weather", {"city": "Oslo"})]


async def test_text_before_a_call_is_sent_while_the_call_is_written(talk: Talk) -> None:
    talk.says(f"I look it up.\n{OSLO}")
    talk.api.backend.permits = threading.Semaphore(len("I look it up.\n<tool_ca"))
    body = asked(tools=TOOLS, stream=True)
    async with Streaming(talk.api, "/chat/completions", body) as stream:
        await stream.says({0: "I look it up."})
        assert not any("tool_calls" in each["choices"][0]["delta"] for each in stream.events)
        talk.api.backend.permits.release(1000)
        await stream.done()
        assert stream.said == {0: "I look it up."}
        *_, called, ended = stream.events
    (call,) = called["choices"][0]["delta"]["tool_calls"]
    assert (call["index"], call["function"]["name"]) == (0, "weather")
    assert ended["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_malformed_call_stays_text(talk: Talk) -> None:
    said = 'Well: <tool_call>{"name": "weather", "arguments": {</tool_call> there.'
    talk.says(said)
    choice, _ = await streamed(talk, tools=TOOLS)
    assert (choice.finish_reason, choice.message.content) == ("stop", said)
    assert calls(choice) == []


async def test_without_tools_a_call_is_text(talk: Talk) -> None:
    talk.says(OSLO)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = await whole(talk, **fields)
        assert (choice.finish_reason, choice.message.content) == ("stop", OSLO)
        assert "# Tools" not in talk.prompt


async def test_an_unfinished_call_of_a_cut_message_is_text(talk: Talk) -> None:
    talk.says(OSLO)
    choice = await whole(talk, tools=TOOLS, max_tokens=30)
    assert (choice.finish_reason, choice.message.content) == ("length", OSLO[:30])


async def test_without_parallel_calls_a_message_ends_after_the_first(talk: Talk) -> None:
    talk.says(f"{OSLO}\n{TIME} more")
    for choice in (
        await whole(talk, tools=TOOLS, parallel_tool_calls=False),
        (await streamed(talk, tools=TOOLS, parallel_tool_calls=False))[0],
    ):
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        assert calls(choice) == [("weather", {"city": "Oslo"})]


async def test_each_choice_has_its_own_calls(talk: Talk) -> None:
    talk.says(OSLO)
    async with talk.openai() as client:
        answer = await client.chat.completions.create(**asked(n=2, tools=TOOLS))
    first, second = answer.choices
    assert calls(first) == calls(second) == [("weather", {"city": "Oslo"})]
    assert first.message.tool_calls[0].id != second.message.tool_calls[0].id  # type: ignore[index]


@pytest.mark.parametrize("talk", [LLAMA], indirect=True)
async def test_llamas_calls_are_read_by_its_template(talk: Talk) -> None:
    talk.says('{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "time"}')
    expected = [("weather", {"city": "Oslo"}), ("time", {})]
    assert calls(await whole(talk, tools=TOOLS)) == expected
    choice, deltas = await streamed(talk, tools=TOOLS)
    assert calls(choice) == expected
    assert not any(delta.content for delta in deltas)
    talk.says("It rains {there}.")
    choice, deltas = await streamed(talk, tools=TOOLS)
    assert choice.message.content == "It rains {there}."


# --- reasoning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("talk", [OPENED], indirect=True)
async def test_reasoning_that_the_prompt_has_opened_is_apart(talk: Talk) -> None:
    talk.says("It may\nrain.\n</think>\n\nTake a coat.")
    choice = await whole(talk)
    assert choice.message.content == "Take a coat."
    assert choice.message.reasoning_content == "It may\nrain."
    assert choice.message.reasoning == "It may\nrain."


async def test_reasoning_is_streamed_apart_from_the_text(talk: Talk) -> None:
    talk.says(f"<think>\nIt may rain.\n</think>\n\nLet me see.\n{OSLO}")
    choice, deltas = await streamed(talk, tools=TOOLS)
    assert choice.message.content == "Let me see."
    assert calls(choice) == [("weather", {"city": "Oslo"})]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == "It may rain."


@pytest.mark.parametrize("talk", [None, OPENED], indirect=True)
async def test_reasoning_stays_in_the_text_if_the_request_says_so(talk: Talk) -> None:
    said = "<think>\nIt may rain.\n</think>\n\nTake a coat."
    talk.says(said)
    choice, _ = await streamed(talk, extra_body={"separate_reasoning": False})
    assert choice.message.content == said


async def test_unfinished_reasoning_is_no_text(talk: Talk) -> None:
    talk.says("<think>\nIt may rain.")
    choice = await whole(talk)
    assert (choice.message.content, choice.message.reasoning_content) == ("", "It may rain.")


# --- logprobs ------------------------------------------------------------------------------------


def test_the_logprobs_of_a_call_are_all_there() -> None:
    form = MessageFormat(calls=HermesFormat(), tools=frozenset({"weather"}))
    shape = ChatShape(form)
    scored = [ScoredToken(i, letter, i, -1.0, []) for i, letter in enumerate(OSLO)]
    pieces = [
        piece
        for i, token in enumerate(scored)
        for piece in shape.pieces(0, Choice(OSLO[i], None, [token]), is_first=i == 0)
    ]
    pieces += shape.pieces(0, Choice("", "stop", []), is_first=False)
    told = [
        each["token"] for piece in pieces for each in (piece["logprobs"] or {}).get("content", [])
    ]
    assert "".join(told) == OSLO
    assert sum("tool_calls" in piece["delta"] for piece in pieces) == 1
    assert pieces[-1]["finish_reason"] == "tool_calls"
