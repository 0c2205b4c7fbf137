"""The closed set of shapes that the device runs, and a request's choice from it. Plain Python."""

from dataclasses import dataclass, field
from itertools import pairwise

from tuneserve_engine.core.errors import UserError

MAX_LOGIT_BIASES = 300
"""The most tokens that one ``logit_bias`` names."""

MASK_BITS = 32
"""The tokens of a word of a mask over the vocabulary."""

_BIN_TOKENS = 4096
_PREFILL_TOKENS = 2048
_TARGET_BUCKETS = (1, 64)
"""The padded targets per position: one token, or a distribution. Each further bucket would multiply
the training programs, and would save little compared with the product with the vocabulary."""


def power_of_two_from(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def multiple_from(n: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is at least ``n``."""
    return -(-n // unit) * unit


def mask_words(vocab: int) -> int:
    """Return the words of a mask over a vocabulary."""
    return -(-vocab // MASK_BITS)


def longest_bin(chunk: int) -> int:
    """Return the most tokens of a bin: four chunks, but not more than 4,096 tokens or one chunk.

    Long bins keep products full. Longer ones would be the least memory of a micro-batch, and the
    shortest slice of time, without a gain.
    """
    return min(4 * chunk, max(chunk, _BIN_TOKENS))


@dataclass(frozen=True)
class StaticShapes:
    """The closed set of shapes of training programs.

    Shapes that bits depend on are fixed or follow from the request alone. ``block`` tokens share an
    adapter and attend together; a request starts at a multiple of it. ``chunk``, a multiple of
    ``block``, is the number of tokens of one matrix product: computing stops at the first multiple
    of ``chunk`` after the last used block.

    A training program has one length, ``micro_batch_tokens``, and works through as many of its
    chunks as a micro-batch uses. ``requested_tokens`` is the wanted length; the micro-batch is
    longer if one datum of ``context_length`` needs it. A datum longer than a micro-batch is divided
    among ``devices_per_datum`` devices: all of them, or 1. ``request_slots`` is the number of
    requests in one batch at the lowest rank bucket; a higher bucket has fewer, so that all buckets
    need the same memory.
    """

    context_length: int
    block: int = 64
    chunk: int = 256
    requested_tokens: int = 4096
    request_slots: int = 32
    rank_buckets: tuple[int, ...] = (8, 32, 128)
    devices_per_datum: int = 1

    micro_batch_tokens: int = field(init=False, repr=False, compare=False)
    """The tokens N of a micro-batch, a multiple of ``chunk``.

    Results do not depend on it, except that micro-batches of one chunk have programs of their own,
    and that a longer datum may be divided.
    """

    bin_tokens: int = field(init=False, repr=False, compare=False)
    """The most tokens into which a request's short datums are packed together.

    It is a multiple of ``block``; a longer datum is alone in its bin.
    """

    def __post_init__(self) -> None:
        if self.context_length < 1:
            raise ValueError(f"context_length is {self.context_length}; it must be at least 1")
        if self.block != power_of_two_from(self.block):
            raise ValueError(f"block is {self.block}; use a power of two")
        if self.chunk < 1 or self.chunk % self.block:
            raise ValueError(f"chunk is {self.chunk}; use a multiple of the block, {self.block}")
        if self.requested_tokens < 1 or self.request_slots < 1:
            raise ValueError(
                f"requested_tokens is {self.requested_tokens} and request_slots is "
                f"{self.request_slots}; both must be positive"
            )
        rising = all(low < high for low, high in pairwise((0, *self.rank_buckets)))
        if not self.rank_buckets or not rising:
            raise ValueError(f"rank_buckets are {self.rank_buckets}; use rising positive numbers")

        # The class is frozen, so its own attributes are set around that.
        longest = -(-self.context_length // self.devices_per_datum)
        tokens = multiple_from(max(self.requested_tokens, longest), self.chunk)
        object.__setattr__(self, "micro_batch_tokens", tokens)
        object.__setattr__(self, "bin_tokens", min(longest_bin(self.chunk), tokens))

    def part_tokens(self, tokens: int) -> int:
        """Return the tokens of each part but the last of a datum that is divided among devices.

        Whole chunks: a part of a chunk costs a device as much as all of it.
        """
        return multiple_from(-(-tokens // self.devices_per_datum), self.chunk)

    @property
    def is_one_chunk(self) -> bool:
        """Whether a micro-batch is one chunk, so that no layer needs a loop over chunks."""
        return self.micro_batch_tokens == self.chunk

    @property
    def prefill_tokens(self) -> int:
        """The tokens of a step of prefill: a chunk, but not more than 2,048 (or one block).

        Decoding waits for such a step, and a short prompt takes all of it.
        """
        return max(min(self.chunk, _PREFILL_TOKENS) // self.block, 1) * self.block

    @property
    def max_rank(self) -> int:
        """The largest rank an adapter can have."""
        return self.rank_buckets[-1]

    @property
    def target_buckets(self) -> tuple[int, ...]:
        """Every padded K."""
        return _TARGET_BUCKETS

    def slots(self, rank_bucket: int) -> int:
        """Return the number of requests of this rank bucket that one batch takes.

        Each has its own gradient.
        """
        return max(self.request_slots * self.rank_buckets[0] // rank_bucket, 1)

    def rank_bucket(self, rank: int) -> int:
        """Return the rank to which adapters of ``rank`` are padded.

        Raises ``UserError`` for a rank that this worker does not take.
        """
        for candidate in self.rank_buckets:
            if 1 <= rank <= candidate:
                return candidate
        error = UserError(
            f"rank is {rank}; this server takes 1 to {self.max_rank}; choose a lower one"
        )
        error.no_room = True  # on this worker: another one may be planned for the rank
        raise error

    def target_bucket(self, targets: int) -> int:
        """Return the padded K for ``targets`` targets per position.

        Raises ``UserError`` for more targets than any bucket has.
        """
        for candidate in _TARGET_BUCKETS:
            if 1 <= targets <= candidate:
                return candidate
        raise UserError(
            f"target_tokens has {targets} targets per position; this server takes 1 to "
            f"{_TARGET_BUCKETS[-1]}; send fewer"
        )
