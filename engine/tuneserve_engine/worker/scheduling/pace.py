"""The number of training tokens that fill a time slice of the device."""

from collections import defaultdict, deque
from statistics import median_low

from tuneserve_engine.core.policies import SLICE_S

_REMEMBERED = 9
"""The number of past passes of a class that count; the median of several ignores a slow one, which
compiled a program."""


class Pace:
    """The pace of training, learned from past passes, separately with and without gradients.

    A token of a long datum takes longer than a token of a short one, because it attends to more
    tokens. So there is a pace for each class of lengths. The length of a pass is that of a token's
    datum, averaged over the tokens. A class spans a factor of two.
    """

    def __init__(self, slice_s: float = SLICE_S) -> None:
        self._slice_s = slice_s
        # Seconds per token, by ``forward_only`` and by the bits of the length.
        self._rates: dict[bool, defaultdict[int, deque[float]]] = {
            forward_only: defaultdict(lambda: deque(maxlen=_REMEMBERED))
            for forward_only in (False, True)
        }

    def tokens(self, forward_only: bool, length: float) -> int | None:
        """Return the number of tokens that fill a slice; None before the first pass.

        If no pass had such a length, the nearest length counts, and the longer one of two. A token
        of a datum twice as long takes at most twice the time, which is assumed for longer datums
        than those of all passes.
        """
        rates = self._rates[forward_only]
        if not rates:
            return None
        bits = int(length).bit_length()
        nearest = min(rates, key=lambda known: (abs(known - bits), -known))
        seconds = median_low(rates[nearest]) * 2 ** max(bits - nearest, 0)
        return max(int(self._slice_s / seconds), 1)

    def learn(self, forward_only: bool, length: float, tokens: float, seconds: float) -> None:
        """Learn from a pass that computed ``tokens`` tokens in ``seconds`` seconds."""
        if tokens > 0 and seconds > 0:
            self._rates[forward_only][int(length).bit_length()].append(seconds / tokens)
