"""The answers of Redis' scripts become the errors that the other stores raise too."""

from dataclasses import replace
from typing import Any

import pytest

from tuneserve_engine.core.jobs import Job, JobKind, Rejection
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.store.errors import LimitReached
from tuneserve_engine.store.redis.limits import check_limits

POLICY = StorePolicy(model_jobs=2, tenant_refusals=4)
STEP = Job("t", JobKind.OPTIM_STEP, "m", 10, payload=b"12345", model_id="m", position=9)


@pytest.mark.parametrize("answer", [[b"new", b"req_a"], [b"ahead", b"2"], [b"refusals", 0, 0]])
def test_an_answer_that_is_no_limit_of_the_job_raises_nothing(answer: list[Any]) -> None:
    check_limits(STEP, answer, POLICY)


@pytest.mark.parametrize(
    ("scope", "whose", "retry_s"),
    [(b"server", "the server", 10), (b"tenant", "your key", 5), (b"model", "model m", 2)],
)
def test_a_limit_names_its_owner_and_the_time_to_wait(
    scope: bytes, whose: str, retry_s: int
) -> None:
    with pytest.raises(LimitReached, match=f"^{whose} has 7 unfinished requests") as many:
        check_limits(STEP, [b"over", scope, b"jobs", 7, 7], POLICY)
    with pytest.raises(
        LimitReached, match=f"^{whose} has 96 bytes .* the 5 bytes .* 100;"
    ) as large:
        check_limits(STEP, [b"over", scope, b"bytes", 96, 100], POLICY)
    assert many.value.retry_after_s == large.value.retry_after_s == retry_s


def test_a_limit_of_models_names_the_models_that_wait() -> None:
    with pytest.raises(LimitReached, match=r"you have 3 models in use.*; 2 more wait"):
        check_limits(STEP, [b"over", b"tenant", b"models", 2, 3], POLICY)


def test_a_job_beyond_the_window_of_its_model_is_refused() -> None:
    # The window has 8 positions: 9 fits behind a missing 2, and not behind a missing 1.
    with pytest.raises(LimitReached, match=r"seq_id 10 of m is 8 ahead of 2, .* limit is 7"):
        check_limits(STEP, [b"ahead", b"1"], POLICY)


def test_a_refused_job_waits_until_there_is_room_for_one_more_refusal() -> None:
    # Each of four refusals an hour fills 900 s. At 1000 s, the bucket is full at 4600 s.
    refused = replace(STEP, rejection=Rejection("the rank is too high"))
    with pytest.raises(LimitReached, match=r"4 of your requests .* the rank is too high") as told:
        check_limits(refused, [b"refusals", b"4000", b"1000"], POLICY)
    assert told.value.retry_after_s == 300
