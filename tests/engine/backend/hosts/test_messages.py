"""The part of a result that all processes must have in common at the end of a call."""

from typing import Any

import pytest

from tuneserve_engine.backend.base import OutOfMemory, SampleProgress, TrainResult
from tuneserve_engine.backend.hosts.messages import agreement
from tuneserve_engine.core.errors import ServerError, UserError


@pytest.mark.parametrize(
    ("method", "result", "common"),
    [
        ("create_adapter", None, None),
        ("exported", object(), None),  # the leader alone uses it
        ("has_snapshot", True, True),
        ("create_adapter", UserError("the host's own words"), "UserError"),
        ("create_adapter", OutOfMemory("no room"), "OutOfMemory"),
        ("forward_backward", TrainResult((), (True, False)), (True, False)),
        ("optim_steps", [{"norm": 0.5}, OutOfMemory("no")], [{"norm": 0.5}, "OutOfMemory"]),
        (
            "sample_until",
            SampleProgress({"a": ServerError("x")}, {"b": 2}, {"a": 1.0}),
            ({"a": "ServerError"}, {"b": 2}),
        ),
    ],
)  # fmt: skip
def test_the_common_part_of_a_result(method: str, result: Any, common: Any) -> None:
    assert agreement(method, result) == common
