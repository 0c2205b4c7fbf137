"""Messages in parts: equal however they arrive, with no tag and no character lost."""

import random

import pytest

from tuneserve_server.openai.call_formats import HermesFormat, LlamaFormat, ToolCall
from tuneserve_server.openai.message_parser import (
    MessageFormat,
    MessageParser,
    MessagePart,
    TextPart,
    joined,
)

NAMES = frozenset({"find"})
HERMES = MessageFormat(has_reasoning=True, calls=HermesFormat(), tools=NAMES)
LLAMA = MessageFormat(calls=LlamaFormat(), tools=NAMES)
PLAIN = MessageFormat()
THINKS = MessageFormat(has_reasoning=True)
OPENED = MessageFormat(has_reasoning=True, is_thinking=True)
ONE = MessageFormat(calls=HermesFormat(), tools=NAMES, most_calls=1)
BEGUN = MessageFormat(
    has_reasoning=True, calls=HermesFormat(), tools=NAMES, begun=HermesFormat().begin("find")
)
BEGUN_LLAMA = MessageFormat(calls=LlamaFormat(), tools=NAMES, begun='{"name": "')


def find(city: str) -> ToolCall:
    return ToolCall("find", {"city": city})


def hermes(city: str) -> str:
    return f'<tool_call>\n{{"name": "find", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def thought(text: str) -> TextPart:
    return TextPart(text, is_reasoning=True)


BAD = '<tool_call>{"name": }</tool_call>'
JSON = '{"name": "find", "parameters": {"city": "A"}}'
CASES: list[tuple[MessageFormat, str, list[MessagePart]]] = [
    (PLAIN, "", []),
    (PLAIN, "\n <think>a</think><tool_call>", [TextPart("\n <think>a</think><tool_call>")]),
    (THINKS, "\n\nhello\n", [TextPart("\n\nhello\n")]),
    (THINKS, "<think>\nwhy\n\nso\n</think>\n\nyes", [thought("why\n\nso"), TextPart("yes")]),
    (THINKS, "<think>\n\n</think>\n\nyes", [TextPart("yes")]),
    (THINKS, " <think>why </thin", [thought("why </thin")]),
    (THINKS, "<thin", [TextPart("<thin")]),
    (THINKS, "a <think>b</think>", [TextPart("a <think>b</think>")]),
    (OPENED, "\nwhy\n</think>\n\nyes </think>", [thought("why"), TextPart("yes </think>")]),
    (OPENED, "why\n", [thought("why")]),
    (HERMES, hermes("A"), [find("A")]),
    (HERMES, f"\n{hermes('A')}\n\n{hermes('B')}\n", [find("A"), find("B")]),
    (
        HERMES,
        f"<think>\nhm\n</think>\n\nLook:\n\n{hermes('A')}",
        [thought("hm"), TextPart("Look:"), find("A")],
    ),
    (HERMES, f"{hermes('A')}\nDone.\n", [find("A"), TextPart("\nDone.\n")]),
    (HERMES, "1 < 2 <tool", [TextPart("1 < 2 <tool")]),
    (HERMES, f"a\n{BAD} b", [TextPart(f"a\n{BAD} b")]),
    (HERMES, f"{BAD}{hermes('A')}", [TextPart(BAD), find("A")]),
    (HERMES, f"a\n {hermes('A')[:-13]}", [TextPart("a"), find("A")]),
    (HERMES, "a\n <tool_call>{", [TextPart("a\n <tool_call>{")]),
    (HERMES, "\n ", [TextPart("\n ")]),
    (ONE, f"a {hermes('A')} b {hermes('B')}", [TextPart("a"), find("A")]),
    (BEGUN, ' {"city": "A"}}\n</tool_call>', [find("A")]),
    (BEGUN, " Oslo", [TextPart('<tool_call>\n{"name": "find", "arguments": Oslo')]),
    (BEGUN_LLAMA, 'find", "parameters": {"city": "A"}}', [find("A")]),
    (LLAMA, JSON, [find("A")]),
    (LLAMA, f"\n{JSON};{JSON}", [find("A"), find("A")]),
    (LLAMA, f"<|python_tag|>{JSON}", [find("A")]),
    (LLAMA, f"Sure: {JSON}", [TextPart(f"Sure: {JSON}")]),
    (LLAMA, f"{JSON} x", [TextPart(f"{JSON} x")]),
    (LLAMA, "<|python", [TextPart("<|python")]),
]


def parsed(form: MessageFormat, pieces: list[str]) -> list[MessagePart]:
    parser = MessageParser(form)
    found = [part for piece in pieces for part in parser.push(piece)]
    return joined([*found, *parser.end()])


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_a_message_has_the_same_parts_however_it_arrives(
    form: MessageFormat, text: str, expected: list[MessagePart]
) -> None:
    assert parsed(form, [text]) == expected
    assert parsed(form, list(text)) == expected
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(form, pieces) == expected


def test_text_before_a_call_is_returned_at_once_and_no_part_of_a_tag_is() -> None:
    parser = MessageParser(HERMES)
    assert parser.push("Let me look") == [TextPart("Let me look")]
    assert parser.push(" up.\n<tool") == [TextPart(" up.")]
    assert parser.push('_call>{"name": "find",') == []
    assert parser.push(' "arguments": {"city": "A"}}</tool_call>') == [find("A")]


def test_reasoning_is_returned_at_once_but_for_its_last_line_end() -> None:
    parser = MessageParser(THINKS)
    assert parser.push("<think>\none\n") == [thought("one")]
    assert parser.push("two\n</thi") == [thought("\ntwo")]
    assert parser.push("nk>\n\nyes") == [TextPart("yes")]


def test_random_texts_without_a_whole_call_lose_no_character() -> None:
    rng = random.Random(3)
    words = ["<tool_call>", "</tool_call>", "<", "{", "}", '"', "\n", " ", "a", "tool", JSON[:9]]
    for _ in range(300):
        text = "".join(rng.choices(words, k=rng.randrange(12)))
        parts = parsed(HERMES, list(text))
        assert parts == ([TextPart(text)] if text else [])


@pytest.mark.parametrize("form", [HERMES, LLAMA, THINKS, OPENED, ONE, BEGUN, BEGUN_LLAMA])
def test_random_messages_have_the_same_parts_however_they_arrive(form: MessageFormat) -> None:
    rng = random.Random(4)
    words = ["<think>", "</think>", "\n", " ", "a", "<", hermes("A"), hermes("B"), BAD, JSON, ";"]
    words += ["<tool_call>", "</tool_call>", '{"name": "', "<|python_tag|>", '"</tool_call>']
    for _ in range(300):
        text = "".join(rng.choices(words, k=rng.randrange(9)))
        assert parsed(form, list(text)) == parsed(form, [text]), text


def test_a_parser_says_when_its_last_call_has_come() -> None:
    parser = MessageParser(ONE)
    parser.push(hermes("A")[:-1])
    assert not parser.is_over
    parser.push(">")
    assert parser.is_over
