"""Anthropic's messages and their events, for choices made by hand."""

import json
from typing import Any

import pytest

from tuneserve_server.errors import TooManyRequests
from tuneserve_server.openai.call_formats import HermesFormat
from tuneserve_server.openai.generation import AnswerHead
from tuneserve_server.openai.message_parser import MessageFormat
from tuneserve_server.openai.messages_api.answers import MessageAnswers
from tuneserve_server.openai.responses import Choice, SampledAnswer

HEAD = AnswerHead("msg_1", "m", 1, 7)
FORM = MessageFormat(has_reasoning=True, calls=HermesFormat(), tools=frozenset({"f"}))
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
SAID = f"<think>\nhm\n</think>\n\nso\n{CALL}\n{CALL}"


def answered(text: str, why: Any = "stop", stop: str | None = None) -> SampledAnswer:
    return SampledAnswer([Choice(text, why, None, stop)], 7, 5, 3)


def events(sent: list[str]) -> list[dict[str, Any]]:
    found = []
    for each in sent:
        name, data, *end = each.split("\n")
        assert end == ["", ""]
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_whole_message_has_blocks_in_order() -> None:
    message = MessageAnswers(FORM).whole(HEAD, [answered(SAID)])
    blocks = message.pop("content")
    ids = [block.pop("id") for block in blocks[2:]]
    assert len(set(ids)) == 2 and all(each.startswith("toolu_") for each in ids)
    assert blocks == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "name": "f", "input": {"x": 1}},
    ]
    assert message == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 5,
        },
    }


@pytest.mark.parametrize(
    ("answer", "reason", "sequence"),
    [
        (answered("a"), "end_turn", None),
        (answered("a", "length"), "max_tokens", None),
        (answered("a", "stop", "zz"), "stop_sequence", "zz"),
    ],
)
def test_a_message_says_why_it_ends(answer: Any, reason: str, sequence: str | None) -> None:
    answers = MessageAnswers(FORM)
    message = answers.whole(HEAD, [answer])
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    answers.say(0, answer.choices[0], is_first=True)
    delta = events(answers.finish([answer]))[-2]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


def test_a_stream_has_the_blocks_of_the_whole_message() -> None:
    answers = MessageAnswers(FORM)
    sent = answers.begin(HEAD)
    for letter in SAID:
        sent += answers.say(0, Choice(letter, None, None), is_first=False)
    sent += answers.say(0, Choice("", "stop", None), is_first=False)
    sent += answers.finish([answered(SAID)])
    first, *middle, delta, last = events(sent)
    assert first["message"]["usage"] == {"input_tokens": 7, "output_tokens": 0}
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"parts": []})
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(blocks) - 1
            blocks[-1]["parts"].append(event["delta"])
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
            is_open = False
    assert not is_open
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert "".join(part["thinking"] for part in blocks[0]["parts"]) == "hm"
    assert "".join(part["text"] for part in blocks[1]["parts"]) == "so"
    for block in blocks[2:]:
        assert block["input"] == {}
        assert block["parts"] == [{"type": "input_json_delta", "partial_json": '{"x": 1}'}]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 5
    assert last == {"type": "message_stop"}


def test_a_stream_that_fails_says_so_in_anthropics_form() -> None:
    (event,) = events(MessageAnswers(FORM).fail(TooManyRequests("too many", 1)))
    error = {"type": "rate_limit_error", "message": "too many", "code": "overloaded"}
    assert event == {"type": "error", "error": error}
