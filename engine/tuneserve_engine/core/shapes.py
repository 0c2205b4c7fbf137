"""The closed set of shapes that the device runs, and a request's choice from it. Plain Python."""

from dataclasses import dataclass
from itertools import pairwise

from tuneserve_engine.core.errors import UserError

_TARGET_CLASSES = (1, 64)
"""The padded targets per position: one token, or a distribution. Each further class would multiply
the training programs, and would save little compared with the product with the vocabulary."""


def power_of_two_from(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def multiple_from(n: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is at least ``n``."""
    return -(-n // unit) * unit


@dataclass(frozen=True)
class StaticShapes:
    """The static shapes of training programs; implements ``backend.base.Lattice``.

    A training program has one length, ``stream``, and works through as many of its chunks as a
    micro-batch uses. ``tokens`` is the wanted length of a stream; the stream is longer if one datum
    of ``context_length`` needs it. ``request_slots`` is the number of requests in one batch at the
    lowest rank class; a higher class has fewer, so that all classes need the same memory.
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
        """The tokens N of a micro-batch."""
        return multiple_from(max(self.tokens, self.context_length), self.chunk)

    @property
    def piece(self) -> int:
        """The most tokens into which a request's short datums are packed."""
        return min(4 * self.chunk, self.stream)

    @property
    def target_classes(self) -> tuple[int, ...]:
        """Every padded K."""
        return _TARGET_CLASSES

    def slots(self, rank_class: int) -> int:
        """Return the number of requests of this rank class that one batch takes."""
        return max(self.request_slots * self.rank_classes[0] // rank_class, 1)

    def rank_class(self, rank: int) -> int:
        """Return the rank to which adapters of ``rank`` are padded.

        Raises ``UserError`` for a rank that this worker does not take.
        """
        for candidate in self.rank_classes:
            if 1 <= rank <= candidate:
                return candidate
        error = UserError(
            f"rank is {rank}; this server takes 1 to {self.max_rank}; choose a lower one"
        )
        error.no_room = True  # on this worker: another one may be planned for the rank
        raise error

    def target_class(self, targets: int) -> int:
        """Return the padded K for ``targets`` targets per position.

        Raises ``UserError`` for more targets than any class has.
        """
        for candidate in _TARGET_CLASSES:
            if 1 <= targets <= candidate:
                return candidate
        raise UserError(
            f"target_tokens has {targets} targets per position; this server takes 1 to "
            f"{_TARGET_CLASSES[-1]}; send fewer"
        )
