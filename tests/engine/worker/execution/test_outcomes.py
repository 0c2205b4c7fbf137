"""The outcomes of jobs that ended, failed, or found no room."""

import json
import logging
import math
from collections.abc import Callable
from functools import partial

import pytest

from tuneserve_engine.backend.base import DeviceFailed, OutOfMemory
from tuneserve_engine.core.errors import ServerError, UserError
from tuneserve_engine.core.jobs import JSON, MAX_BODY_BYTES, PROTOBUF, Job, JobKind, Outcome
from tuneserve_engine.core.records import Update
from tuneserve_engine.core.usage import CurvePoint
from tuneserve_engine.worker.execution import outcomes

STEP = Job("t", JobKind.OPTIM_STEP, "m", 5, model_id="m", position=4, request_id="req_a")
CREATION = Job("t", JobKind.CREATE_MODEL, "s", 0, model_id="m", position=0, request_id="req_b")
FAILED = Update("model", "m", {"status": "failed"})


def raising(error: Exception) -> Callable[[Job], Outcome]:
    def run(job: Job) -> Outcome:
        raise error

    return run


def test_an_attempt_returns_the_outcome_or_the_failure() -> None:
    done = Outcome("req_a", b"{}")
    assert outcomes.attempt(STEP, lambda job: done) is done
    refused = outcomes.attempt(STEP, raising(UserError("too long"))).rejection
    assert refused is not None
    assert (refused.message, refused.category, refused.no_room) == ("too long", "user", False)


def test_a_failed_device_is_not_the_jobs_fault() -> None:
    with pytest.raises(DeviceFailed):
        outcomes.attempt(STEP, raising(DeviceFailed("gone")))


@pytest.mark.parametrize(
    ("kind", "category"),
    [
        (JobKind.FORWARD_BACKWARD, "user"),
        (JobKind.SAMPLE, "user"),
        (JobKind.OPTIM_STEP, "server"),
        (JobKind.LOAD_WEIGHTS, "server"),
    ],
)
def test_a_job_without_room_is_refused_and_says_so_to_its_worker(
    kind: JobKind, category: str
) -> None:
    job = Job("t", kind, "m", 5, model_id="m", position=4, request_id="req_a")
    refused = outcomes.failure(job, OutOfMemory("full")).rejection
    assert refused is not None
    assert (refused.category, refused.no_room) == (category, True)
    assert f"the device has no memory for {'this ' * (category == 'user')}{kind}" in refused.message


def test_an_unexpected_error_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    refused = outcomes.failure(STEP, KeyError("secret")).rejection
    assert refused is not None
    assert (refused.category, "secret" in refused.message) == ("server", False)
    assert "internal error while running optim_step; see the log" in refused.message
    (record,) = caplog.records
    assert record.exc_info is not None and record.exc_info[0] is KeyError


def test_a_model_whose_creation_failed_is_marked_failed() -> None:
    assert outcomes.rejected(CREATION, ServerError("why")).updates == (FAILED,)
    assert outcomes.rejected(STEP, ServerError("why")).updates == ()


def test_a_result_that_is_too_large_is_refused_with_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MAX_BODY_BYTES == 80 * 2**20
    monkeypatch.setattr(outcomes, "MAX_BODY_BYTES", 3)
    assert outcomes.protobuf(STEP, b"abc") == Outcome("req_a", b"abc", PROTOBUF)
    refused = outcomes.protobuf(STEP, b"abcd").rejection
    assert refused is not None
    assert "has 4 bytes; the limit is 3" in refused.message and refused.category == "user"


def test_a_step_has_its_finite_metrics_and_a_point_of_the_curve() -> None:
    result = {"grad_norm": 2.0, "other": math.nan}
    done = outcomes.stepped(result, 7, 1e-3, STEP)
    assert (done.content_type, json.loads(done.body)) == (JSON, {"metrics": {"grad_norm": 2.0}})
    assert done.changed
    assert done.point == CurvePoint("optim_step", 4, step=7, learning_rate=1e-3, grad_norm=2.0)
    with pytest.raises(UserError, match="why"):
        outcomes.stepped(UserError("why"), 7, 1e-3, STEP)


def test_a_created_model_is_ready() -> None:
    done = outcomes.created(CREATION, {"model_id": "m"})
    assert done.updates == (Update("model", "m", {"status": "ready"}),)
    assert done.changed and json.loads(done.body) == {"model_id": "m"}


def test_a_batch_makes_its_outcomes_in_order() -> None:
    done = [Outcome("req_a"), Outcome("req_b")]
    batch = outcomes.BatchResult([STEP, CREATION], [lambda: done[0], lambda: done[1]])
    assert batch.outcomes() == done


def test_a_result_that_cannot_be_made_is_the_failure_of_its_job_alone() -> None:
    done = Outcome("req_b")
    refused = partial(raising(UserError("too long")), STEP)
    failed, other = outcomes.BatchResult([STEP, CREATION], [refused, lambda: done]).outcomes()
    assert other is done
    assert failed.rejection is not None
    assert (failed.request_id, failed.rejection.message) == ("req_a", "too long")
    with pytest.raises(DeviceFailed):
        outcomes.BatchResult([STEP], [partial(raising(DeviceFailed("gone")), STEP)]).outcomes()
