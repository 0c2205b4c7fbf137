"""The closed set of shapes that the device runs, and how a request picks from it. Plain Python."""

from dataclasses import dataclass
from itertools import pairwise

from tuneserve_engine.errors import UserError

_TARGET_CLASSES = (1, 64)
"""Padded targets per position: one token, or a distribution. Further classes would each double the
training programs, and what they would save is small beside the product with the vocabulary."""


def power_of_two_from(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def multiple_from(n: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is at least ``n``."""
    return -(-n // unit) * unit


@dataclass(frozen=True)
class ShapeLattice:
    """Implements ``backend.base.Lattice``.

    A training program has one length, ``stream``; it works through as many chunks of it as a
    micro-batch uses. ``tokens`` is how long a stream should be; it is longer where one datum of
    ``context_length`` needs it. ``request_slots`` are the requests of one unit at the lowest rank
    class; a higher one has fewer, so that all classes need the same memory.
    """

    context_length: int
    block: int = 64
    chunk: int = 256
    tokens: int = 4096
    request_slots: int = 32
    rank_classes: tuple[int, ...] = (8, 32, 128)

    def __post_init__(self) -> None:
        if self.context_length < 1:
            raise ValueError(f"context_length is {self.context_length}; it must be at least 1")
        if self.block != power_of_two_from(self.block):
            raise ValueError(f"block is {self.block}; use a power of two")
        if self.chunk < 1 or self.chunk % self.block:
            raise ValueError(f"chunk is {self.chunk}; use a multiple of the block, {self.block}")
        if self.tokens < 1 or self.request_slots < 1:
            raise ValueError(
                f"tokens is {self.tokens} and request_slots is {self.request_slots}; "
                "both must be positive"
            )
        rising = all(low < high for low, high in pairwise((0, *self.rank_classes)))
        if not self.rank_classes or not rising:
            raise ValueError(f"rank_classes are {self.rank_classes}; use rising positive numbers")

    @property
    def max_rank(self) -> int:
        """The largest rank an adapter can have."""
        return self.rank_classes[-1]

    @property
    def stream(self) -> int:
        """Tokens N of a micro-batch."""
        return multiple_from(max(self.tokens, self.context_length), self.chunk)

    @property
    def piece(self) -> int:
        """Tokens that a request's short datums are packed into, at most."""
        return min(4 * self.chunk, self.stream)

    @property
    def target_classes(self) -> tuple[int, ...]:
        """Every padded K."""
        return _TARGET_CLASSES

    def slots(self, rank_class: int) -> int:
        """Requests of this rank class that one unit takes."""
        return max(self.request_slots * self.rank_classes[0] // rank_class, 1)

    def rank_class(self, rank: int) -> int:
        """The rank that adapters of ``rank`` are padded to."""
        for candidate in self.rank_classes:
            if 1 <= rank <= candidate:
                return candidate
        error = UserError(
            f"rank is {rank}; this server takes 1 to {self.max_rank}; choose a lower one"
        )
        error.no_room = True  # here: another worker may be planned for it
        raise error

    def target_class(self, targets: int) -> int:
        """Padded K for ``targets`` targets per position."""
        for candidate in _TARGET_CLASSES:
            if 1 <= targets <= candidate:
                return candidate
        raise UserError(
            f"target_tokens has {targets} targets per position; this server takes 1 to "
            f"{_TARGET_CLASSES[-1]}; send fewer"
        )
