"""The number of training tokens that fill a time slice of the device."""

from collections import defaultdict, deque
from statistics import median_low

from tuneserve_engine.core.policies import SLICE_S

_REMEMBERED = 9
"""The number of past passes that count; their median ignores those that compiled a program."""


class Pace:
    """The pace of training, learned from past passes, separately with and without gradients.

    A token of a long datum takes longer than a token of a short one, because it attends to more
    tokens. So passes count by the length of their longest datum, up to a factor of two.
    """

    def __init__(self, slice_s: float = SLICE_S) -> None:
        self._slice_s = slice_s
        # Seconds per token, by ``forward_only`` and by the bits of the longest datum's length.
        self._rates: dict[bool, defaultdict[int, deque[float]]] = {
            forward_only: defaultdict(lambda: deque(maxlen=_REMEMBERED))
            for forward_only in (False, True)
        }

    def tokens(self, forward_only: bool, longest: int) -> int | None:
        """Return the number of tokens that fill a slice; None before the first pass.

        ``longest`` is the number of tokens of the longest datum. If no pass was like it, those with
        the nearest length count.
        """
        rates = self._rates[forward_only]
        if not rates:
            return None
        bits = longest.bit_length()
        nearest = min(rates, key=lambda known: (abs(known - bits), -known))
        return max(int(self._slice_s / median_low(rates[nearest])), 1)

    def learn(self, forward_only: bool, longest: int, tokens: float, seconds: float) -> None:
        """Learn from a pass that computed ``tokens`` tokens in ``seconds`` seconds."""
        if tokens > 0 and seconds > 0:
            self._rates[forward_only][longest.bit_length()].append(seconds / tokens)
