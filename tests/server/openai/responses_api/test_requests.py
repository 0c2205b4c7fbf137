"""Requests for responses as chat completions: conversions by hand, and what is refused."""

import json
from typing import Any

import pytest

from tuneserve_server.errors import InvalidField
from tuneserve_server.openai.responses_api.requests import as_chat, parse_request

BODY: dict[str, Any] = {"model": "m", "input": "hi"}


def chat(**fields: Any) -> dict[str, Any]:
    request = as_chat(parse_request(json.dumps(BODY | fields).encode()))
    return request.model_dump(exclude_none=True, exclude_unset=True)


def messages(*items: Any, **fields: Any) -> Any:
    return chat(input=list(items), **fields)["messages"]


def item(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


THOUGHT = {
    "type": "reasoning",
    "id": "rs",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
    "encrypted_content": None,
}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "r"}
CALLED = {"id": "c1", "function": {"name": "f", "arguments": "{}"}}


def test_options_have_the_names_of_chats() -> None:
    options = {"temperature": 0.5, "top_p": 0.9, "parallel_tool_calls": False, "stream": True}
    found = chat(max_output_tokens=5, store=False, metadata={"a": "b"}, user="u", **options)
    user = {"role": "user", "content": "hi"}
    assert (
        found
        == {"model": "m", "messages": [user], "max_completion_tokens": 5, "tools": []} | options
    )


def test_instructions_and_the_first_system_items_are_one_message() -> None:
    found = messages(
        item("developer", "b"),
        item("system", "c"),
        item("user", "d"),
        item("developer", "e"),
        instructions="a",
    )
    assert found == [
        {"role": "system", "content": "a\n\nb\n\nc"},
        {"role": "user", "content": "d"},
        {"role": "system", "content": "e"},
    ]


def test_items_of_the_assistant_are_one_message() -> None:
    second = {**CALL, "call_id": "c2"}
    found = messages(
        item("user", "q"), THOUGHT, item("assistant", "so"), CALL, second, OUTPUT, CALL, OUTPUT
    )
    assert found == [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "so",
            "tool_calls": [CALLED, CALLED | {"id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        {"role": "assistant", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ]


def test_two_messages_of_the_assistant_stay_two() -> None:
    found = messages(item("assistant", "a"), item("assistant", "b"), CALL, THOUGHT, CALL)
    assert found == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [CALLED]},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [CALLED]},
    ]


def test_tools_and_their_choice_have_the_form_of_chats() -> None:
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {}, "strict": False}
    found = chat(tools=[tool], tool_choice={"type": "function", "name": "f"})
    function = {"name": "f", "description": "d", "parameters": {}}
    assert found["tools"] == [{"type": "function", "function": function}]
    assert found["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[tool], tool_choice="required")["tool_choice"] == "required"


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"format": {"type": "text"}, "verbosity": None}},
        {"reasoning": {"effort": None, "summary": None}, "include": [], "background": False},
        {"truncation": "disabled", "stream_options": {"include_obfuscation": False}},
        {"store": False, "previous_response_id": None, "conversation": None},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields)["messages"] == [{"role": "user", "content": "hi"}]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"store": True}, "store", "stores no responses"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
    ({"conversation": "c"}, "conversation", "not supported"),
    ({"background": True}, "background", "not supported"),
    ({"reasoning": {"effort": "low"}}, "reasoning", "not supported"),
    ({"include": ["reasoning.encrypted_content"]}, "include", "not supported"),
    ({"truncation": "auto"}, "truncation", "'disabled'"),
    ({"text": {"format": {"type": "json_object"}}}, "text", "text.format"),
    ({"text": {"verbosity": "low"}}, "text", "text.verbosity"),
    ({"top_logprobs": 3}, "top_logprobs", "not supported"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"frequency": 1}, "frequency", "not a field"),
    ({"input": []}, "input", "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0] is of a type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "an image"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input", "with text"),
    ({"input": [{"content": "a"}]}, "input", "input[0] has no role"),
    ({"input": [{**CALL, "arguments": None}]}, "input", "no arguments"),
    ({"input": [{**OUTPUT, "call_id": None}]}, "input", "no call_id"),
    ({"input": [{**THOUGHT, "summary": [{"type": "summary_text"}]}]}, "input", "summary"),
    ({"input": [{**THOUGHT, "encrypted_content": "x"}]}, "encrypted_content", "not a field"),
    ({"tools": [{"type": "web_search"}]}, "tools", "not a function"),
    ({"tools": [{"type": "function", "name": "f", "strict": True}]}, "tools", "strict: false"),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED)
def test_a_request_that_cannot_be_carried_out_is_refused(
    fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(InvalidField) as refused:
        chat(**fields)
    assert said in str(refused.value)
    assert refused.value.param == param
