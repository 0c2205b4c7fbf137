"""When a sequence ends: its token budget, a stop token, or a stop string in its decoded text."""

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

from tuneserve_engine.errors import ServerError

StopReason = Literal["stop", "length"]

_MARGIN_TOKENS = 4
"""More than a UTF-8 character has bytes: a window that opens inside a character, or whose decoder
drops a leading space, still shows whole every string that may be completed next."""


class TextDecoder(Protocol):
    """The part of ``tokenizers.Tokenizer`` that stop strings need."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...

    def id_to_token(self, id: int) -> str | None: ...


class StopWatch:
    """Told every token of one sequence, says when and why it ends."""

    def __init__(
        self,
        *,
        max_tokens: int,
        stop_tokens: Collection[int],
        stop_strings: Sequence[str],
        tokenizer: TextDecoder | None,
    ) -> None:
        self._left = max_tokens
        self._stop_tokens = stop_tokens
        self._text = _StringWatch(stop_strings, tokenizer) if any(stop_strings) else None

    def push(self, token: int) -> StopReason | None:
        """Why the sequence ends with this token; None if it goes on. A stop on the last token of
        the budget is a stop."""
        self._left -= 1
        if token in self._stop_tokens or (self._text is not None and self._text.push(token)):
            return "stop"
        return "length" if self._left <= 0 else None


class _StringWatch:
    """Searches the decoded text of a sliding window of tokens.

    The window is bounded by the longest string, not by the sequence: every token that decodes to
    text adds at least a byte, so what a string spans fits in as many tokens as it has bytes.
    Decoding the window afresh costs microseconds and, unlike a stream that waits for whole
    characters, sees a string whose last token also opens the next character.
    """

    def __init__(self, strings: Sequence[str], tokenizer: TextDecoder | None) -> None:
        if tokenizer is None:
            raise ServerError(
                f"stop strings {list(strings)} need a tokenizer and the base model has none; "
                "give stop as token ids, or put tokenizer.json beside the weights"
            )
        self._strings = [string for string in strings if string]
        self._tokenizer = tokenizer
        self._keep = max(len(string.encode()) for string in self._strings) + _MARGIN_TOKENS
        self._window: list[int] = []

    def push(self, token: int) -> bool:
        if self._tokenizer.id_to_token(token) is None:
            return False  # the embedding is often wider than the vocabulary: such ids have no text
        self._window.append(token)
        if len(self._window) > 2 * self._keep:
            del self._window[: -self._keep]
        # Special tokens count as text: "<|im_end|>" may be given as a string.
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        return any(string in text for string in self._strings)
