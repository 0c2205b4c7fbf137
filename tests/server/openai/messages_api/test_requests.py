"""Anthropic's requests as chat completions: conversions by hand, and what is refused."""

import json
from typing import Any

import pytest

from tuneserve_server.errors import InvalidField
from tuneserve_server.openai.messages_api.requests import parse_count, parse_message

USER = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}


def chat(**fields: Any) -> dict[str, Any]:
    request = parse_message(json.dumps(BODY | fields).encode())
    return request.model_dump(exclude_none=True, exclude_unset=True)


def messages(**fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat(**fields)["messages"]
    return found


def test_options_have_openais_names() -> None:
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "stream": True}
    assert chat(**options, stop_sequences=["a"], metadata={"user_id": "x"}) == {
        "model": "m",
        "messages": [USER],
        "max_tokens": 9,
        "stop": ["a"],
        "tools": [],
        "parallel_tool_calls": True,
        "chat_template_kwargs": {"enable_thinking": False},
        **options,
    }


@pytest.mark.parametrize(
    ("thinking", "enabled"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
        (None, False),
    ],
)
def test_thinking_is_an_option_of_the_template(thinking: Any, enabled: bool) -> None:
    assert chat(thinking=thinking)["chat_template_kwargs"] == {"enable_thinking": enabled}


def test_blocks_become_messages_of_openai() -> None:
    turns = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "b"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": [1]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "two"}],
                },
                {"type": "tool_result", "tool_use_id": "t3"},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    system = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    call = {"id": "t1", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    assert messages(messages=turns, system=system) == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: two"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "go on"},
    ]


def test_the_fields_of_claude_code_are_accepted() -> None:
    """As its version 2.1.197 sends them: the system message behind the user's is its own."""
    hint = [{"type": "text", "text": "skills", "cache_control": {"type": "ephemeral"}}]
    found = chat(
        messages=[USER, {"role": "system", "content": hint}],
        system=[{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
        max_tokens=32000,
        metadata={"user_id": "x"},
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        stream=True,
    )
    assert found["messages"] == [
        {"role": "system", "content": "be"},
        USER,
        {"role": "system", "content": "skills"},
    ]
    assert found["chat_template_kwargs"] == {"enable_thinking": True}


TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("choice", "name", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, True),
    ],
)
def test_tools_and_their_choice_have_openais_form(choice: Any, name: Any, parallel: bool) -> None:
    found = chat(tools=[{**TOOL, "type": "custom", "strict": False}], tool_choice=choice)
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert found["tools"] == [{"type": "function", "function": function}]
    assert (found["tool_choice"], found["parallel_tool_calls"]) == (name, parallel)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"stop_sequences": [""]}, "stop_sequences", "empty"),
    ({"stop_sequences": ["x"] * 257}, "stop_sequences", "256"),
    ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages", "continues none"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "role"),
    ({"messages": [{"role": "system", "content": [{"type": "image"}]}]}, "messages", "an image"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management",
        "not supported",
    ),
    ({"output_config": {"effort": "low"}}, "output_config", "not supported"),
    ({"container": "c"}, "container", "leave it out"),
    ({"logprobs": True}, "logprobs", "not a field"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "display", "thinking.display"),
    ({"tools": [{**TOOL, "strict": True}]}, "tools", "strict: false"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools", "tool of the server"),
    ({"tools": [{"name": "f"}]}, "tools", "input_schema"),
    ({"tools": [{**TOOL, "input_examples": [{}]}]}, "input_examples", "tools[0].input_examples"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice", "name of a tool"),
    ({"system": [{"type": "image"}]}, "system", "system[0] is an image"),
]
BLOCKS: list[tuple[str, dict[str, Any], str]] = [
    ("user", {"type": "image", "source": {}}, "is an image"),
    ("user", {"type": "document", "source": {}}, "is a document"),
    ("user", {"type": "tool_use"}, "of the type tool_use"),
    ("user", {"type": "secret"}, "a kind that is not known"),
    ("user", {"type": "text"}, "no text"),
    ("user", {"type": "text", "text": "a", "citations": {"enabled": True}}, "citations"),
    ("user", {"type": "tool_result", "content": "a"}, "no tool_use_id"),
    (
        "user",
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]},
        "messages[0].content[0].content[0] is an image",
    ),
    ("assistant", {"type": "redacted_thinking", "data": "x"}, "redacted_thinking"),
    ("assistant", {"type": "tool_use", "id": "t", "input": {}}, "no name"),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED)
def test_a_request_that_cannot_be_carried_out_is_refused(
    fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(InvalidField) as refused:
        chat(**fields)
    assert said in str(refused.value)
    assert refused.value.param == param


@pytest.mark.parametrize(("role", "block", "said"), BLOCKS)
def test_a_block_that_cannot_be_read_is_refused(role: str, block: Any, said: str) -> None:
    with pytest.raises(InvalidField) as refused:
        chat(messages=[{"role": role, "content": [block]}, USER])
    assert said in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_message_needs_max_tokens_and_a_count_does_not() -> None:
    body = json.dumps({"model": "m", "messages": [USER]}).encode()
    assert parse_count(body).messages[0].content == "hi"
    with pytest.raises(InvalidField, match="max_tokens: Field required"):
        parse_message(body)
