"""The recordings of samples that the store keeps for ``stable_reinforce``. NumPy only."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np


class Gone(StrEnum):
    """The reason for which a sample has no recording."""

    UNKNOWN = "unknown"  # it never existed, or so long ago that nothing is known of it any more
    UNUSED = "unused"  # it was not used for longer than recordings are kept
    NO_ROOM = "no room"  # it was the least recently used one of its tenant


@dataclass(frozen=True)
class SampleKey:
    """A sample: the key of its sampling session, and its number there."""

    scope: str
    seq: int


@dataclass(frozen=True)
class RecordedSequence:
    """One sequence: token ids as int32 and their logprobs as float32, little-endian."""

    tokens: bytes
    logprobs: bytes


@dataclass(frozen=True)
class Recording:
    """The sequences of one sample; ``prompt`` is the number of tokens of its prompt."""

    prompt: int
    sequences: list[RecordedSequence]


def encode(
    prompt: int, drawn: Iterable[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]
) -> bytes:
    """Return a recording of these tokens and logprobs, encoded."""
    sequences = [
        RecordedSequence(tokens.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes())
        for tokens, logprobs in drawn
    ]
    return msgspec.msgpack.encode(Recording(prompt, sequences))


def decode(body: bytes) -> Recording:
    return msgspec.msgpack.decode(body, type=Recording)


def sequence_id(scope: str, seq: int, index: int) -> str:
    """Return the name by which training refers to the ``index``-th sequence of a sample."""
    return f"{scope}:{seq}:{index}"
