"""Tool calls as models write them. Expected calls are worked out by hand from the text."""

import json

import pytest

from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.openai.call_formats import (
    HermesFormat,
    LlamaFormat,
    ReadCalls,
    ToolCall,
    call_format,
)

NAMES = frozenset({"find", "stop"})
FIND = '{"name": "find", "arguments": {"city": "Oslo"}}'
FOUND = ToolCall("find", {"city": "Oslo"})


def hermes(text: str, *, final: bool = True) -> ReadCalls | None:
    return HermesFormat().read(text, NAMES, final=final)


def llama(text: str, *, final: bool = True) -> ReadCalls | None:
    return LlamaFormat().read(text, NAMES, final=final)


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        (f"\n{FIND}\n", FOUND),
        (FIND, FOUND),
        ('{"name": "stop"}', ToolCall("stop", {})),
        ('{"name": "stop", "arguments": {}}', ToolCall("stop", {})),
        ('{"name": "find", "parameters": {"city": "Oslo"}}', FOUND),
        ('{"name": "find", "arguments": {"a": "1\n2"}}', ToolCall("find", {"a": "1\n2"})),
        (
            '{"name": "find", "arguments": {"a": "</tool_call>"}}',
            ToolCall("find", {"a": "</tool_call>"}),
        ),
        (
            '{"name": "find", "arguments": {"a": 1e5, "b": [null, true]}}',
            ToolCall("find", {"a": 1e5, "b": [None, True]}),
        ),
    ],
)
def test_a_hermes_call_is_read_with_its_tags(inside: str, expected: ToolCall) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    assert hermes(text + " and more") == ReadCalls((expected,), len(text))


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "{",
        "find(Oslo)",
        "[1]",
        '{"name": "other", "arguments": {}}',  # no tool of the request
        '{"name": 3, "arguments": {}}',
        '{"name": "find", "arguments": "Oslo"}',
        '{"name": "find", "arguments": {"a": NaN}}',
        '{"name": "find", "arguments": {"a": 1e999}}',
        '{"name": "find", "arguments": {"a": "\\ud800"}}',
        '{"name": "find", "arguments": {"a": ' + "[" * 25 + "]" * 25 + "}}",
        "[" * 100_000,
        '{"name": "find", "arguments": {"a": ' + "9" * 5000 + "}}",
        f"{FIND} {FIND}",
    ],
)
def test_a_malformed_hermes_call_is_text_up_to_its_closing_tag(inside: str) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    assert hermes(f"{text} {text}") == ReadCalls((), len(text))


def test_a_hermes_call_that_ends_with_the_message_needs_no_closing_tag() -> None:
    text = f"<tool_call>\n{FIND}\n"
    assert hermes(text) == ReadCalls((FOUND,), len(text))
    assert hermes(text[:-5]) == ReadCalls((), len(text) - 5)
    assert hermes(text, final=False) is None


def test_a_closing_tag_inside_a_text_does_not_end_an_unfinished_call() -> None:
    text = '<tool_call>{"name": "find", "arguments": {"a": "</tool_call>'
    assert hermes(text, final=False) is None
    assert hermes(text) == ReadCalls((), len(text))


@pytest.mark.parametrize("tag", ["", "<|python_tag|>", "\n<|python_tag|> "])
def test_llamas_calls_are_the_whole_text(tag: str) -> None:
    one = '{"name": "find", "parameters": {"city": "Oslo"}}'
    text = tag + one
    assert llama(text) == ReadCalls([FOUND], len(text))
    assert llama(text, final=False) is None
    two = f'{text}; {{"name": "stop", "parameters": {{}}}}\n'
    assert llama(two) == ReadCalls([FOUND, ToolCall("stop", {})], len(two))


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "find", "parameters": {"city": "Oslo"}} is what I would call',
        '{"city": "Oslo"}',
        '{"name": "other", "parameters": {}}',
        '{"name": "find", "parameters": {"city"',
        "<|python_tag|>find.call(city)",
    ],
)
def test_other_texts_of_llama_stay_text(text: str) -> None:
    assert llama(text) == ReadCalls((), len(text))


def test_a_required_call_begins_as_the_format_has_it() -> None:
    for form in (HermesFormat(), LlamaFormat()):
        rest = ' {"city": "Oslo"}}'
        read = form.read(form.begin("find") + rest, NAMES, final=True)
        assert read is not None and list(read.calls) == [FOUND]
        assert (form.begin(None) + 'find", ').endswith('{"name": "find", ')


def test_the_format_is_found_from_the_template() -> None:
    tiny = json.loads((TINY_MODEL / "tokenizer_config.json").read_text())["chat_template"]
    assert isinstance(call_format(tiny), HermesFormat)
    llama3 = '{% if tools %}Respond as {"name": n, "parameters": p}.{% endif %}'
    assert isinstance(call_format(llama3), LlamaFormat)
    for other in (
        "{{ messages }}",
        "{% for t in tools %}<tool_call>\n<function=f>{% endfor %}",  # XML inside the tags
        '{% if tools %}[TOOL_CALLS]{"name": n, "parameters": p}{% endif %}',
    ):
        assert call_format(other) is None
