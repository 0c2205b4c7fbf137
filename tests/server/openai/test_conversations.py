"""Messages and tools in the chat template: prompts written out by hand, and what is refused."""

from typing import Any

import pytest

from tests.server.openai.openai_case import assert_error
from tests.server.openai.scripted import LLAMA, OPENED, Talk
from tests.server.openai.test_chat_shape import OSLO, TIME, TOOLS, USER, asked, calls, whole

pytestmark = pytest.mark.anyio

ASSISTANT: Any = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "hm",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
        },
        {"id": "call_2", "type": "function", "function": {"name": "time", "arguments": ""}},
    ],
}
RESULT: Any = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


async def test_tools_calls_and_results_are_in_the_prompt(talk: Talk) -> None:
    talk.says("ok")
    await whole(talk, messages=[USER, ASSISTANT, RESULT], tools=TOOLS[1:])
    assert talk.prompt == (
        '<|im_start|>system\n# Tools\n\nCall a function with <tool_call>{"name": ..., '
        '"arguments": ...}</tool_call>.\n<tools>\n'
        '{"type": "function", "function": {"name": "time"}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nweather in Oslo?<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\nhm\n</think>\n\n{OSLO}\n{TIME}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_an_answer_with_calls_can_be_sent_back(talk: Talk) -> None:
    talk.says(f"<think>\nhm\n</think>\n\nSo:\n{OSLO}\n{TIME}")
    choice = await whole(talk, tools=TOOLS)
    message = choice.message.to_dict()
    await whole(talk, messages=[USER, message, RESULT], tools=TOOLS)
    assert f"<|im_start|>assistant\n{talk.api.backend.said}<|im_end|>\n" in talk.prompt


async def test_the_template_receives_enable_thinking(talk: Talk) -> None:
    talk.says("ok")
    await whole(talk, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert talk.prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("talk", "choice", "begins", "says"),
    [
        (None, "required", '<tool_call>\n{"name": "', 'weather", "arguments": {"city": "Oslo"}}'),
        (None, NAMED, '<tool_call>\n{"name": "weather", "arguments":', ' {"city": "Oslo"}}'),
        (LLAMA, "required", '{"name": "', 'weather", "parameters": {"city": "Oslo"}}'),
        (LLAMA, NAMED, '{"name": "weather", "parameters":', ' {"city": "Oslo"}}'),
    ],
    indirect=["talk"],
)
async def test_a_required_call_begins_in_the_prompt(
    talk: Talk, choice: Any, begins: str, says: str
) -> None:
    talk.says(says + ("\n</tool_call>" if "<tool_call>" in begins else ""))
    answered = await whole(talk, tools=TOOLS, tool_choice=choice)
    assert talk.prompt.endswith(f"assistant{']' if begins[0] == '{' else chr(10)}{begins}")
    assert calls(answered) == [("weather", {"city": "Oslo"})]
    assert (answered.finish_reason, answered.message.content) == ("tool_calls", None)


@pytest.mark.parametrize("talk", [OPENED], indirect=True)
async def test_a_required_call_closes_the_reasoning_that_the_prompt_opened(talk: Talk) -> None:
    talk.says(' {"city": "Oslo"}}\n</tool_call>')
    answered = await whole(talk, tools=TOOLS, tool_choice=NAMED)
    end = '<think>\n\n</think>\n\n<tool_call>\n{"name": "weather", "arguments":'
    assert talk.prompt.endswith(end)
    assert calls(answered) == [("weather", {"city": "Oslo"})]


async def test_a_required_call_that_fails_is_text_with_its_beginning(talk: Talk) -> None:
    talk.says(" Oslo, I think")
    answered = await whole(talk, tools=TOOLS, tool_choice=NAMED)
    begins = '<tool_call>\n{"name": "weather", "arguments":'
    assert answered.message.content == f"{begins} Oslo, I think"
    assert answered.finish_reason == "stop"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [TOOLS[1], TOOLS[1]]}, "tools", "same name"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]},
        "tools",
        "strict: false",
    ),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools", "function"),
    ({"tools": [{**TOOLS[1], "limit": 3}]}, "limit", "tools[0].limit is not a field"),
    ({"tool_choice": "required"}, "tool_choice", "send tools"),
    ({"tools": TOOLS[1:], "tool_choice": NAMED}, "tool_choice", "not in tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "required"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "needs a tool_call_id"),
    ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages", "no other has one"),
    ({"messages": [{**ASSISTANT, "role": "user"}]}, "messages", "role assistant"),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[1]"}}],
                }
            ]
        },
        "messages",
        "messages[0].tool_calls[0].function.arguments is not a JSON object",
    ),
    (
        {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
        "part 0 is an image; the models of this server read text only",
    ),
    (
        {"messages": [{**USER, "content": [{"type": "secret"}]}]},
        "messages",
        "a kind that is not known",
    ),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED)
async def test_a_conversation_that_cannot_be_rendered_is_refused(
    talk: Talk, fields: dict[str, Any], param: str, said: str
) -> None:
    response = await talk.post("/v1/chat/completions", asked(**fields))
    message = assert_error(response, 400, "invalid_request", param)
    assert said in message
    assert "secret" not in message


@pytest.mark.parametrize("talk", ["{{ messages[0].content }}"], indirect=True)
async def test_tools_are_refused_if_the_template_shows_none(talk: Talk) -> None:
    response = await talk.post("/v1/chat/completions", asked(tools=TOOLS))
    assert "shows no tools" in assert_error(response, 400, "invalid_request", "tools")
    talk.says("ok")
    assert (await whole(talk, tools=[], tool_choice="auto")).message.content == "ok"


async def test_a_long_tool_counts_as_text_before_it_is_rendered(talk: Talk) -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": {"x": ["y" * 50_000]}}}
    response = await talk.post("/v1/chat/completions", asked(tools=[tool]))
    said = assert_error(response, 400, "invalid_request", "messages")
    assert "cannot hold more than" in said
