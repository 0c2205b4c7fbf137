"""The number of training tokens that fill a time slice of the device."""

from collections import deque
from statistics import median_low
from typing import TypeVar

from tuneserve_engine.core.policies import SLICE_S

T = TypeVar("T")


_REMEMBERED = 9
"""The number of past passes that count; their median ignores those that compiled a program."""


class Pace:
    """The pace of training, learned from past passes, separately with and without gradients."""

    def __init__(self, slice_s: float = SLICE_S) -> None:
        self._slice_s = slice_s
        self._rates: dict[bool, deque[float]] = {
            forward_only: deque(maxlen=_REMEMBERED) for forward_only in (False, True)
        }

    def tokens(self, forward_only: bool) -> int | None:
        """Return the number of tokens that fill a slice; None before the first pass."""
        rates = self._rates[forward_only]
        return max(int(self._slice_s / median_low(rates)), 1) if rates else None

    def learn(self, forward_only: bool, tokens: float, seconds: float) -> None:
        """Learn from a pass that computed ``tokens`` tokens in ``seconds`` seconds."""
        if tokens > 0 and seconds > 0:
            self._rates[forward_only].append(seconds / tokens)
