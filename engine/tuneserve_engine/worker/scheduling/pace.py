"""The number of training tokens that fill a time slice of the device."""

from collections import deque
from statistics import median_low

from tuneserve_engine.core.policies import SLICE_S

_REMEMBERED = 9
"""The number of past passes that count; their median ignores those that compiled a program."""


class Pace:
    """The pace of training, learned from past passes, separately with and without gradients."""

    def __init__(self, slice_s: float = SLICE_S) -> None:
        self._slice_s = slice_s
        self._rates: dict[bool, deque[float]] = {
            forward_only: deque(maxlen=_REMEMBERED) for forward_only in (False, True)
        }
        self.tokens: dict[bool, int] = {}
        """The number of tokens that fill a slice, by ``forward_only``; none before its first pass.
        """

    def learn(self, forward_only: bool, tokens: float, seconds: float) -> None:
        """Learn from a pass that computed ``tokens`` tokens in ``seconds`` seconds."""
        if tokens > 0 and seconds > 0:
            rates = self._rates[forward_only]
            rates.append(seconds / tokens)
            self.tokens[forward_only] = max(int(self._slice_s / median_low(rates)), 1)
