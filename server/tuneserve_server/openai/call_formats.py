"""The formats in which models write tool calls, found from the chat template and read as calls.

Two families are known: Hermes, which Qwen uses too (``<tool_call>{json}</tool_call>``), and the
JSON of Llama 3 (``{"name": ..., "parameters": ...}``, perhaps behind ``<|python_tag|>``).
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_DECODER = json.JSONDecoder(strict=False)  # models write line ends into texts
_MOST_LEVELS = 24  # of a call's arguments: a body may nest 32, and the call comes back in one
_FOREIGN = ("<function=", "<arg_key>", "[TOOL_CALLS]", "<|tool_calls_section_begin|>")
"""Marks of templates whose calls look like a known format and are not."""


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote: the tool's name and its arguments, a JSON object."""

    name: str
    arguments: dict[str, Any]

    @property
    def arguments_json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class ReadCalls:
    """The calls at the start of a text, and how many of its characters they are.

    Without calls, these characters are text.
    """

    calls: Sequence[ToolCall]
    used: int


class CallFormat(Protocol):
    """A format of tool calls."""

    name: str

    def begin(self, tool: str | None) -> str:
        """Return how a call begins: a call of ``tool``, or of any tool."""
        ...

    def plain(self, text: str, *, is_first: bool, final: bool) -> tuple[int, bool]:
        """Return how many characters are certainly text, and whether a call may begin there.

        ``is_first`` says that no text came before this one, and ``final`` that none follows.
        """
        ...

    def read(self, text: str, names: Collection[str], *, final: bool) -> ReadCalls | None:
        """Return the calls at the start of the text, or None if more text is needed."""
        ...


class HermesFormat:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, anywhere in the text."""

    name = "hermes"
    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def begin(self, tool: str | None) -> str:
        named = '{"name": "' if tool is None else f'{{"name": {json.dumps(tool)}, "arguments":'
        return f"{self._OPEN}\n{named}"

    def plain(self, text: str, *, is_first: bool, final: bool) -> tuple[int, bool]:
        at = text.find(self._OPEN)
        if at >= 0:
            return len(text[:at].rstrip()), True
        if final:
            return len(text), False
        return len(text[: len(text) - unfinished(text, self._OPEN)].rstrip()), False

    def read(self, text: str, names: Collection[str], *, final: bool) -> ReadCalls | None:
        start = text.index(self._OPEN) + len(self._OPEN)
        close = text.find(self._CLOSE, start)
        if close < 0 and not final:
            return None
        wrong = ReadCalls((), len(text) if close < 0 else close + len(self._CLOSE))
        begins = start + len(text[start:]) - len(text[start:].lstrip())
        try:
            value, ends = _DECODER.raw_decode(text, begins)
        except json.JSONDecodeError as error:
            # The closing tag that was found may be inside a text of the arguments.
            is_open = not final and error.msg.startswith("Unterminated string")
            return None if is_open else wrong
        except (ValueError, RecursionError):
            return wrong
        call = _call(value, names)
        rest = text[ends:].lstrip()
        if call is None or not (rest.startswith(self._CLOSE) or (final and not rest)):
            return wrong
        return ReadCalls((call,), len(text) - len(rest) + len(self._CLOSE) * bool(rest))


class LlamaFormat:
    """``{"name": ..., "parameters": {...}}``, the whole text; several are divided by ``;``."""

    name = "llama3_json"
    _TAG = "<|python_tag|>"

    def begin(self, tool: str | None) -> str:
        return '{"name": "' if tool is None else f'{{"name": {json.dumps(tool)}, "parameters":'

    def plain(self, text: str, *, is_first: bool, final: bool) -> tuple[int, bool]:
        given = text.lstrip()
        if is_first and given.startswith(("{", self._TAG)):
            return 0, True
        if is_first and not final and self._TAG.startswith(given):
            return 0, False
        return len(text), False

    def read(self, text: str, names: Collection[str], *, final: bool) -> ReadCalls | None:
        if not final:
            return None
        calls: list[ToolCall] = []
        rest = text.strip().removeprefix(self._TAG).lstrip()
        while rest:
            try:
                value, ends = _DECODER.raw_decode(rest)
            except (ValueError, RecursionError):
                return ReadCalls((), len(text))
            call = _call(value, names)
            rest = rest[ends:].lstrip().removeprefix(";").lstrip()
            if call is None:
                return ReadCalls((), len(text))
            calls.append(call)
        return ReadCalls(calls, len(text))


def unfinished(text: str, tag: str) -> int:
    """Return how many of the last characters may be the beginning of the tag."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


def _call(value: Any, names: Collection[str]) -> ToolCall | None:
    """Return the call that the JSON describes, or None if it describes no call of these tools."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if name not in names or not isinstance(arguments, dict):
        return None
    if not _is_shallow(arguments, _MOST_LEVELS):
        return None
    try:  # not every text and number that was read can be written
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return None
    return ToolCall(name, arguments)


def _is_shallow(value: Any, levels: int) -> bool:
    """Return whether the JSON value nests no more than ``levels`` deep."""
    if not isinstance(value, dict | list):
        return True
    inside = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inside)


def call_format(template: str) -> CallFormat | None:
    """Return the format in which the template shows tool calls, or None if it is not known."""
    if any(mark in template for mark in _FOREIGN):
        return None
    if "<tool_call>" in template:
        return HermesFormat()
    if "tools" in template and '"parameters"' in template and '"name"' in template:
        return LlamaFormat()
    return None
