"""The closed set of shapes that the device runs, and how a request picks from it. Plain Python."""

from dataclasses import dataclass
from itertools import pairwise

from tuneserve_engine.errors import UserError

_MAX_TARGETS = 64


def power_of_two_from(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def _power_of_two_to(n: int) -> int:
    return 1 << (n.bit_length() - 1)


@dataclass(frozen=True)
class ShapeLattice:
    """Implements ``backend.base.Lattice``.

    Lengths are padded to powers of two from ``smallest_bucket`` up; the last bucket is
    ``context_length`` itself. A micro-batch has one row, for a request of one datum, or as many as
    ``token_budget`` allows: a power of two, at least 2, at most ``max_rows``. Bits depend on the
    number of rows, so there are these two choices only, and each request's own number of datums
    makes it.
    """

    context_length: int
    smallest_bucket: int = 16
    token_budget: int = 1024
    max_rows: int = 8
    rank_classes: tuple[int, ...] = (8, 32, 128)

    def __post_init__(self) -> None:
        if self.context_length < 1:
            raise ValueError(f"context_length is {self.context_length}; it must be at least 1")
        if self.smallest_bucket != power_of_two_from(self.smallest_bucket):
            raise ValueError(f"smallest_bucket is {self.smallest_bucket}; use a power of two")
        if self.token_budget < 1 or self.max_rows < 1:
            raise ValueError(
                f"token_budget is {self.token_budget} and max_rows is {self.max_rows}; "
                "both must be positive"
            )
        rising = all(low < high for low, high in pairwise((0, *self.rank_classes)))
        if not self.rank_classes or not rising:
            raise ValueError(f"rank_classes are {self.rank_classes}; use rising positive numbers")

    @property
    def max_rank(self) -> int:
        """The largest rank an adapter can have."""
        return self.rank_classes[-1]

    def bucket(self, length: int) -> int:
        """Padded length T for a datum of ``length`` tokens."""
        if not 1 <= length <= self.context_length:
            raise UserError(
                f"a datum has {length} tokens; this base model takes 1 to {self.context_length}; "
                "shorten or split it"
            )
        padded = max(power_of_two_from(length), self.smallest_bucket)
        return min(padded, self.context_length)

    def rows(self, bucket: int, datums: int) -> int:
        """Rows B of the micro-batches for a request with ``datums`` datums in this bucket."""
        if datums == 1:
            return 1
        fitting = max(self.token_budget // bucket, 2)
        return _power_of_two_to(min(fitting, self.max_rows))

    def rank_class(self, rank: int) -> int:
        """The rank that adapters of ``rank`` are padded to."""
        for candidate in self.rank_classes:
            if 1 <= rank <= candidate:
                return candidate
        raise UserError(
            f"rank is {rank}; this server takes 1 to {self.max_rank}; choose a lower one"
        )

    def target_class(self, targets: int) -> int:
        """Padded K for ``targets`` targets per position."""
        if not 1 <= targets <= _MAX_TARGETS:
            raise UserError(
                f"target_tokens has {targets} targets per position; this server takes 1 to "
                f"{_MAX_TARGETS}; send fewer"
            )
        return power_of_two_from(targets)
