"""The decisions of every store: ids, limits and their arithmetic."""

import re
from dataclasses import replace

import pytest

from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.jobs import Job, JobKind, Rejection
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.core.records import (
    ModelRecord,
    ModelStatus,
    SamplerRecord,
    SessionRecord,
    TenantRecord,
)
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import CheckpointUsage
from tuneserve_engine.store.errors import LimitReached

JOB = Job("t", JobKind.OPTIM_STEP, "m", 12, model_id="m", position=11)
MODEL = ModelRecord("m", "t", "s", "base", AdapterConfig(8, 16.0, 0), 1.0, 1.0)
SESSION = SessionRecord("s", "t", 1.0, 1.0)
SAMPLER = SamplerRecord("s:sample:0", "t", "s", "base", 1.0)


def test_an_id_depends_on_the_key_of_the_job_and_on_the_secret_alone() -> None:
    one = refusals.request_id(b"secret", JOB)
    assert re.fullmatch(r"req_[a-z2-7]{26}", one)
    assert refusals.request_id(b"secret", replace(JOB, payload=b"x", position=3)) == one
    others = {
        refusals.request_id(b"other", JOB),
        *(
            refusals.request_id(b"secret", replace(JOB, **change))
            for change in ({"tenant": "u"}, {"scope": "n"}, {"seq": 13}, {"kind": JobKind.SAMPLE})
        ),
    }
    assert len(others | {one}) == 6


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (ModelStatus.READY, JobKind.OPTIM_STEP, None),
        (ModelStatus.CREATING, JobKind.OPTIM_STEP, None),
        (ModelStatus.ENDED, JobKind.OPTIM_STEP, "has ended with its session"),
        (ModelStatus.ENDED, JobKind.UNLOAD_MODEL, None),
        (ModelStatus.FAILED, JobKind.OPTIM_STEP, "its creation failed"),
        (ModelStatus.LOST, JobKind.OPTIM_STEP, "cannot be restored"),
    ],
)
def test_a_job_of_a_model_that_is_gone_is_refused(
    status: ModelStatus, kind: JobKind, message: str | None
) -> None:
    found = refusals.dead_model(replace(MODEL, status=status), kind)
    assert (found is None) == (message is None)
    assert found is None or str(message) in found.message


def test_only_five_missing_ranges_are_named() -> None:
    missing = [(1, 1), (3, 5), (7, 7), (9, 9), (11, 11), (13, 13), (15, 15)]
    message = refusals.gap(missing, 600.0).message
    assert message.startswith("seq_id 1, 3-5, 7, 9, 11 and 2 more ranges did not arrive within")
    assert refusals.gap(missing[:1], 0.5).message.startswith("seq_id 1 did not arrive within 0.5 s")


def test_a_tenants_own_limits_replace_those_of_the_server() -> None:
    policy = StorePolicy(tenant_checkpoints=10, tenant_checkpoint_bytes=100)
    assert refusals.most_kept(None, policy) == CheckpointUsage(10, 100)
    own = TenantRecord("t", "t", 1.0, max_checkpoints=0)
    assert refusals.most_kept(own, policy) == CheckpointUsage(0, 100)


@pytest.mark.parametrize(
    ("kept", "needed", "message"),
    [
        (CheckpointUsage(9, 99), 0, None),
        (CheckpointUsage(9, 60), 40, None),
        (CheckpointUsage(10, 0), 0, "you have 10 checkpoints; this server keeps up to 10"),
        (CheckpointUsage(10, 0, coming=3), 0, "you have 7 checkpoints, and 3 more are being saved"),
        (CheckpointUsage(1, 100), 0, "your checkpoints have 100 bytes; the limit is 100 bytes"),
        (CheckpointUsage(1, 60), 41, "have 60 bytes and this one would have 41; this server"),
    ],
)
def test_a_checkpoint_beyond_a_limit_is_refused_with_the_numbers(
    kept: CheckpointUsage, needed: int, message: str | None
) -> None:
    found = refusals.keeps_too_much(kept, CheckpointUsage(10, 100), needed)
    assert (found is None) == (message is None)
    assert found is None or str(message) in found.message


def test_a_job_may_be_a_window_ahead_of_the_first_missing_position() -> None:
    """The window is four times the jobs of a model: 40 positions, the missing one included."""
    policy = StorePolicy(model_jobs=10)
    refusals.check_window(replace(JOB, position=None), 0, policy)
    refusals.check_window(replace(JOB, seq=50, position=49), 10, policy)
    with pytest.raises(LimitReached, match=r"seq_id 51 of m is 40 ahead of 11, .* limit is 39"):
        refusals.check_window(replace(JOB, seq=51, position=50), 10, policy)


def test_refusals_fill_a_bucket_that_empties_within_an_hour() -> None:
    """Of 4 an hour, each takes 900 s to forget."""
    policy = StorePolicy(tenant_refusals=4)
    level_s, wait_s = refusals.level_of_refusals(0.0, 1000.0, policy)
    assert (level_s, wait_s) == (1900.0, 0.0)
    for expected in (2800.0, 3700.0, 4600.0):
        level_s, wait_s = refusals.level_of_refusals(level_s, 1000.0, policy)
        assert (level_s, wait_s) == (expected, 0.0)
    assert refusals.level_of_refusals(level_s, 1000.0, policy) == (4600.0, 900.0)
    assert refusals.level_of_refusals(level_s, 1899.5, policy) == (5499.5, 0.5)
    assert refusals.level_of_refusals(level_s, 1900.0, policy) == (5500.0, 0.0)
    refused = refusals.too_many_refusals(Rejection("why"), 4, 0.5)
    assert refused.retry_after_s == 1


def test_sessions_and_samplers_have_limits_for_all_and_for_one() -> None:
    policy = StorePolicy(
        server_sessions=10, tenant_sessions=5, session_samplers=4, tenant_samplers=8
    )
    refusals.check_sessions(9, 4, policy)
    refusals.check_samplers("s", 3, 7, policy)
    for call, message in (
        (lambda: refusals.check_sessions(10, 4, policy), "the server has 10 sessions"),
        (lambda: refusals.check_sessions(9, 5, policy), "your key has 5 sessions"),
        (lambda: refusals.check_samplers("s", 4, 7, policy), "session s has 4 sampling sessions"),
        (lambda: refusals.check_samplers("s", 3, 8, policy), "your key has 8 sampling sessions"),
    ):
        with pytest.raises(LimitReached, match=message) as caught:
            call()
        assert caught.value.retry_after_s == 30


def test_records_are_created_at_most_so_fast() -> None:
    policy = StorePolicy(tenant_sessions_a_minute=3, tenant_samplers_a_minute=7)
    assert [refusals.rate_of(each, policy) for each in (SESSION, SAMPLER, MODEL)] == [3, 7, 0]
    for passed_s in (60.0, 1000.0, -1.0):
        refusals.check_rate(SESSION, policy, passed_s)
    for passed_s, retry_after_s in ((0.0, 60), (59.9, 1), (30.5, 30)):
        with pytest.raises(LimitReached, match="created 3 sessions within a minute") as caught:
            refusals.check_rate(SESSION, policy, passed_s)
        assert caught.value.retry_after_s == retry_after_s


def test_a_late_request_learns_the_next_number_or_that_its_model_exists() -> None:
    assert "the next seq_id is 20" in refusals.too_late(JOB, 20).message
    created = replace(JOB, kind=JobKind.CREATE_MODEL, scope="s", position=0)
    assert "model m was created long ago" in refusals.too_late(created, 20).message
