"""The messages between the leader and its followers, and what both have to agree on."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tuneserve_engine.backend.base import OutOfMemory, SampleProgress, TrainResult
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import EngineError

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


def agreement(method: str, result: Any) -> Any:
    """Return the part of a call's result that all processes must have in common.

    Only the leader's results are used; this shows whether the processes are in step.
    """
    if isinstance(result, EngineError | OutOfMemory):
        return type(result).__name__
    if isinstance(result, TrainResult):
        return result.finite
    if isinstance(result, SampleProgress):
        ended = {name: agreement(method, each) for name, each in result.finished.items()}
        return ended, dict(result.remaining)
    if method == "optim_steps":
        return [each if isinstance(each, Mapping) else type(each).__name__ for each in result]
    return result if isinstance(result, bool) else None
