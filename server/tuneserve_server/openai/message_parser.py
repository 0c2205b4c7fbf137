"""A sampled message in parts: its reasoning, its text and its tool calls, also as it arrives."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tuneserve_server.openai.call_formats import CallFormat, ToolCall, unfinished

THINK, THOUGHT = "<think>", "</think>"
"""The tags around a reasoning block."""


@dataclass(frozen=True)
class MessageFormat:
    """How a model writes its message: what the chat template and the request say about it."""

    has_reasoning: bool = False  # a message may begin with a reasoning block
    is_thinking: bool = False  # the prompt has already opened the block
    calls: CallFormat | None = None  # None: no calls are looked for
    tools: frozenset[str] = frozenset()  # the names that may be called
    most_calls: int | None = None  # the message ends after so many
    begun: str = ""  # the start of the message, which stands in the prompt


@dataclass(frozen=True)
class TextPart:
    """A piece of text or of reasoning. Neighbours of a kind belong together."""

    text: str
    is_reasoning: bool = False


MessagePart = TextPart | ToolCall


class _State(Enum):
    OPENING = "opening"  # the first characters decide whether there is reasoning
    REASONING = "reasoning"
    GAP = "gap"  # the line ends behind the reasoning
    TEXT = "text"
    CALL = "call"
    OVER = "over"


class MessageParser:
    """Divides one message. Text is returned as soon as it cannot be part of a tag or a call.

    A call is returned once it is whole. A call that cannot be read stays text.
    """

    def __init__(self, form: MessageFormat) -> None:
        self._form = form
        self._rest = form.begun
        self._state = _State.TEXT
        if form.is_thinking:
            self._state = _State.REASONING
        elif form.has_reasoning and not form.begun:
            self._state = _State.OPENING
        self._calls = 0
        self._is_first = True  # nothing of the present reasoning or text has been returned
        self._steps = {
            _State.OPENING: self._opening,
            _State.REASONING: self._reasoning,
            _State.GAP: self._gap,
            _State.TEXT: self._text,
            _State.CALL: self._call,
            _State.OVER: self._over,
        }

    @property
    def is_over(self) -> bool:
        """Whether the message has its last call."""
        return self._state is _State.OVER

    def push(self, text: str) -> list[MessagePart]:
        """Take more text and return the parts that are certain now."""
        self._rest += text
        return self._advance(final=False)

    def end(self) -> list[MessagePart]:
        """Return the rest, after the last text."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> list[MessagePart]:
        found: list[MessagePart] = []
        state = None
        while state is not self._state:
            state = self._state
            found += self._steps[state](final)
        return joined(found)

    def _opening(self, final: bool) -> Iterator[MessagePart]:
        text = self._rest.lstrip()
        if text.startswith(THINK):
            self._rest, self._state = text[len(THINK) :], _State.REASONING
        elif final or not THINK.startswith(text):
            self._state = _State.TEXT
        yield from ()

    def _reasoning(self, final: bool) -> Iterator[MessagePart]:
        if self._is_first:  # templates put the block on lines of its own
            self._rest = self._rest.lstrip("\n")
        at = self._rest.find(THOUGHT)
        certain = self._rest[:at] if at >= 0 else self._rest
        if at < 0 and not final:
            certain = certain[: len(certain) - unfinished(certain, THOUGHT)]
        said = certain.rstrip("\n")
        if said:
            self._is_first = False
            yield TextPart(said, is_reasoning=True)
        self._rest = self._rest[len(said) :]
        if at >= 0:
            self._rest, self._is_first = self._rest.lstrip("\n")[len(THOUGHT) :], True
            self._state = _State.GAP
        elif final:
            self._rest = ""

    def _gap(self, final: bool) -> Iterator[MessagePart]:
        self._rest = self._rest.lstrip("\n")
        if self._rest or final:
            self._state = _State.TEXT
        yield from ()

    def _text(self, final: bool) -> Iterator[MessagePart]:
        size, may_call = len(self._rest), False
        if self._form.calls is not None:
            is_first = self._is_first and not self._calls
            size, may_call = self._form.calls.plain(self._rest, is_first=is_first, final=final)
        said = self._rest[:size]
        if said.strip() or (said and not (self._calls and self._is_first)):
            self._is_first = False
            yield TextPart(said)
        self._rest = self._rest[size:]  # space after a call, which nothing follows, is no text
        if may_call:
            self._state = _State.CALL

    def _call(self, final: bool) -> Iterator[MessagePart]:
        assert self._form.calls is not None
        read = self._form.calls.read(self._rest, self._form.tools, final=final)
        if read is None:
            return
        said, self._rest = self._rest[: read.used], self._rest[read.used :]
        self._state = _State.TEXT
        if not read.calls:
            self._is_first = False
            yield TextPart(said)
            return
        for call in read.calls:
            self._calls += 1
            yield call
            if self._calls == self._form.most_calls:
                self._state = _State.OVER
                return
        self._is_first = True

    def _over(self, final: bool) -> Iterator[MessagePart]:
        self._rest = ""
        yield from ()


def joined(parts: list[MessagePart]) -> list[MessagePart]:
    """Return the parts with neighbours of one kind as one part."""
    found: list[MessagePart] = []
    for part in parts:
        last = found[-1] if found else None
        if (
            isinstance(part, TextPart)
            and isinstance(last, TextPart)
            and part.is_reasoning == last.is_reasoning
        ):
            found[-1] = TextPart(last.text + part.text, part.is_reasoning)
        else:
            found.append(part)
    return found
