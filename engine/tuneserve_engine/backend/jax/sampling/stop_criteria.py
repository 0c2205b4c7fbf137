"""The end of a sequence: its token budget, a stop token, or a stop string in its decoded text."""

from collections.abc import Collection, Sequence
from typing import Literal, Protocol, runtime_checkable

from tuneserve_engine.core.errors import ServerError

StopReason = Literal["stop", "length"]

_MARGIN_TOKENS = 4
"""More than the bytes of a UTF-8 character.

A window that opens inside a character, or whose decoder drops a leading space, still shows every
string in full that the next token may complete.
"""


@runtime_checkable  # the tests check the types of arguments
class TextDecoder(Protocol):
    """The part of ``tokenizers.Tokenizer`` that stop strings need."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...

    def id_to_token(self, id: int) -> str | None: ...


class StopCriteria:
    """Takes every token of one sequence and decides when and why the sequence ends."""

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
        self._text = _StopStringMatcher(stop_strings, tokenizer) if any(stop_strings) else None

    def push(self, token: int) -> StopReason | None:
        """Return why the sequence ends with this token, or None if it continues.

        A stop on the last token of the budget is a stop.
        """
        self._left -= 1
        if token in self._stop_tokens or (self._text is not None and self._text.push(token)):
            return "stop"
        return "length" if self._left <= 0 else None


class _StopStringMatcher:
    """Searches the decoded text of a sliding window of tokens.

    The longest string bounds the window, not the sequence: every token that decodes to text adds at
    least a byte, so a string spans at most as many tokens as it has bytes. Decoding the window
    again for each token costs microseconds. Unlike a stream that waits for whole characters, it
    finds a string whose last token also opens the next character.
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
            return False  # ids between vocabulary size and a wider embedding's size have no text
        self._window.append(token)
        if len(self._window) > 2 * self._keep:
            del self._window[: -self._keep]
        # Special tokens count as text: "<|im_end|>" may be given as a string.
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        return any(string in text for string in self._strings)
