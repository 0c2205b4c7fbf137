"""The part of a result that all processes must have in common at the end of a call."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tuneserve_engine.backend.base import (
    OutOfMemory,
    SampledSequence,
    SampleProgress,
    SampleResult,
    TrainResult,
)
from tuneserve_engine.backend.hosts.messages import agreement, ends_all
from tuneserve_engine.core.errors import ServerError, UserError

DRAWN = SampledSequence(np.array([1, 2], np.int32), np.array([-0.5, -1.0], np.float32), "length")


@pytest.mark.parametrize(
    ("result", "common"),
    [
        (None, None),
        (object(), None),  # the leader alone uses it
        (True, True),
        (UserError("the host's own words"), "UserError"),
        (OutOfMemory("no room"), "OutOfMemory"),
        (KeyError("x"), "KeyError"),
        (TrainResult((), (True, False)), (True, False)),
        ([{"norm": 0.5}, OutOfMemory("no")], [{"norm": (0.5).hex()}, "OutOfMemory"]),
        ([{"norm": float("nan")}, {"norm": float("inf")}], [{"norm": "nan"}, {"norm": "inf"}]),
        (
            SampleProgress({"a": ServerError("x")}, {"b": 2}, {"a": 1.0}),
            ({"a": "ServerError"}, {"b": 2}, {"a": 1.0}),
        ),
    ],
)
def test_the_common_part_of_a_result(result: Any, common: Any) -> None:
    assert agreement(result) == common


def test_every_token_and_every_bit_of_its_logprob_is_in_common() -> None:
    def of(drawn: SampledSequence) -> Any:
        return agreement(SampleProgress({"a": SampleResult((drawn,))}, {}, {}))

    other = np.nextafter(DRAWN.logprobs, np.float32(0))
    assert of(DRAWN) == of(replace(DRAWN))
    assert of(DRAWN) != of(replace(DRAWN, tokens=DRAWN.tokens + 1))
    assert of(DRAWN) != of(replace(DRAWN, logprobs=other))
    assert agreement([SampleResult((DRAWN,))]) != agreement([SampleResult((DRAWN, DRAWN))])


def test_missing_memory_or_a_missing_program_ends_all_only_while_devices_wait() -> None:
    uncompiled = ServerError("the compiler said no")
    uncompiled.no_room = True
    for error in (OutOfMemory("no"), uncompiled):
        assert ends_all("forward_backward", error) and ends_all("sample_until", error)
        assert not ends_all("create_adapter", error)
    assert not ends_all("forward_backward", ServerError("no such adapter"))
    assert not ends_all("sample_until", UserError("too long"))
