"""The messages between the leader and its followers, and what both have to agree on."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from tuneserve_engine.backend.base import OutOfMemory, SampleProgress, SampleResult, TrainResult
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.grammar import Grammar

EXCHANGING = ("forward_backward", "optim_steps", "sample_until", "sample")
"""The calls during which devices of several processes wait for each other."""


class BackendCall(NamedTuple):
    """A call of the backend, to be made in the order of the calls."""

    method: str
    arguments: tuple[Any, ...]


class Yielded(NamedTuple):
    """Whether the leader's ``should_yield`` was true, inside a call that samples."""

    value: bool


class Resumed(NamedTuple):
    """The calls between two rounds of a call that trains have ended."""


class Agreed(NamedTuple):
    """A process's part of a call has ended. All must have the same ``result``."""

    result: Any


class Prefetch(NamedTuple):
    """A call of ``prefetch``, which has no result and keeps no order."""

    adapter_ids: Sequence[str]


class CompileGrammar(NamedTuple):
    """A sample with this grammar will come. Without an answer: a failure is that of the sample."""

    grammar: Grammar


class Prepare(NamedTuple):
    """A call of ``prepare``, which runs beside the others; ``number`` names its answer."""

    number: int
    config: AdapterConfig


class Prepared(NamedTuple):
    """A call of ``prepare`` has ended: with ``shared_id``, or with an error."""

    number: int
    shared_id: str
    error: str = ""


class StopAsked(NamedTuple):
    """An operator has asked a follower to stop: the worker is to stop."""


class End(NamedTuple):
    """The worker has stopped."""


def ends_all(method: str, error: Exception) -> bool:
    """Return whether this error in one process must end all.

    Devices of other processes may wait for this one's. Programs and memory may be missing in one
    process only; what is wrong with a request is found in all of them, before devices exchange
    anything.
    """
    is_local = isinstance(error, OutOfMemory) or getattr(error, "no_room", False)
    return method in EXCHANGING and is_local


def agreement(result: Any) -> Any:
    """Return the part of a call's result that all processes must have in common.

    Only the leader's results are used; this shows whether the processes are in step.
    """
    if isinstance(result, Exception):
        return type(result).__name__
    if isinstance(result, TrainResult):
        return result.finite
    if isinstance(result, SampleProgress):
        ended = {name: agreement(each) for name, each in result.finished.items()}
        return ended, dict(result.remaining), dict(result.work)
    if isinstance(result, SampleResult):
        drawn = [part for each in result.sequences for part in (each.tokens, each.logprobs)]
        return crc32(b"".join(np.ascontiguousarray(part).tobytes() for part in drawn))
    if isinstance(result, Mapping):  # metrics; as text, NaN equals itself
        return {name: float(value).hex() for name, value in result.items()}
    if isinstance(result, list):
        return [agreement(each) for each in result]
    return result if isinstance(result, bool) else None
