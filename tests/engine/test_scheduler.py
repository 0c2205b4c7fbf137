"""Which jobs run together: order per model, sharing, turns between tenants, and limits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneserve_engine.jobs import Job, JobKind
from tuneserve_engine.scheduler import MAX_BYTES, MAX_JOBS, next_unit

CREATE, GRADIENT, STEP = JobKind.CREATE_MODEL, JobKind.FORWARD_BACKWARD, JobKind.OPTIM_STEP
SAVE, SAMPLE, UNLOAD = JobKind.SAVE_WEIGHTS, JobKind.SAMPLE, JobKind.UNLOAD_MODEL


def pending(*jobs: tuple[str, JobKind] | tuple[str, JobKind, int]) -> list[Job]:
    """Jobs in release order from (model, kind[, payload bytes]). The tenant is the model's first
    letter; a sample has no model, so its name is the tenant's alone."""
    return [
        Job(
            tenant=name[0],
            kind=kind,
            scope=name,
            seq=number,
            payload=bytes(*size),
            model_id=None if kind == SAMPLE else name,
            request_id=f"{name}-{number}",
            release=number,
        )
        for number, (name, kind, *size) in enumerate(jobs)
    ]


def unit(jobs: list[Job], last_served: dict[str, int] | None = None) -> list[int]:
    """The places of the next unit's jobs in the list."""
    return [job.release for job in next_unit(jobs, last_served or {})]


def test_nothing_pending_gives_nothing() -> None:
    assert next_unit([], {}) == []


def test_a_run_of_gradients_of_one_model_shares_a_unit_up_to_the_step() -> None:
    jobs = pending(("a", GRADIENT), ("a", GRADIENT), ("a", STEP), ("a", GRADIENT))
    assert unit(jobs) == [0, 1]
    assert unit(jobs[2:]) == [2]
    assert unit(jobs[3:]) == [3]


def test_a_gradient_waits_for_the_step_before_it() -> None:
    assert unit(pending(("a", STEP), ("a", GRADIENT), ("b", GRADIENT)), {"a": 1}) == [2]


@pytest.mark.parametrize("kind", [CREATE, SAVE, JobKind.LOAD_WEIGHTS, UNLOAD])
def test_jobs_that_change_a_whole_model_run_alone(kind: JobKind) -> None:
    assert unit(pending(("a", kind), ("b", kind), ("b", GRADIENT))) == [0]


def test_steps_of_different_models_share_a_unit() -> None:
    assert unit(pending(("a1", STEP), ("b1", STEP), ("a2", STEP), ("a1", STEP))) == [0, 1, 2]


def test_samples_wait_for_no_model() -> None:
    jobs = pending(("a", CREATE), ("a", SAMPLE), ("b", SAMPLE))
    assert unit(jobs, {"a": 2, "b": 1}) == [1, 2]


def test_gradients_of_all_tenants_share_a_unit_in_release_order() -> None:
    jobs = pending(("c", GRADIENT), ("a", GRADIENT), ("b", GRADIENT), ("a", GRADIENT))
    assert unit(jobs, {"a": 3, "b": 9, "c": 5}) == [0, 1, 2, 3]


def test_the_tenant_served_longest_ago_decides_the_kind() -> None:
    jobs = pending(("a", GRADIENT), ("b", STEP), ("c", GRADIENT))
    assert unit(jobs) == [0, 2]  # nobody was served: the oldest
    assert unit(jobs, {"a": 1, "c": 1}) == [1]
    assert unit(jobs, {"a": 2, "b": 3, "c": 1}) == [0, 2]


def test_one_tenants_backlog_leaves_room_for_the_others() -> None:
    jobs = pending(*[("a", GRADIENT)] * 50, ("b", GRADIENT), ("c", GRADIENT))
    assert unit(jobs) == list(range(MAX_JOBS))
    assert unit(jobs[MAX_JOBS:], {"a": 1}) == [*range(32, 52)]
    assert unit(jobs, {"a": 1}) == [*range(MAX_JOBS - 2), 50, 51]


def test_a_unit_has_a_limit_of_bytes_and_a_larger_job_runs_alone() -> None:
    half = MAX_BYTES // 2
    jobs = pending(("a", GRADIENT, half), ("b", GRADIENT, half), ("c", GRADIENT, 1))
    assert unit(jobs) == [0, 1]
    assert unit(pending(("a", GRADIENT, 3 * MAX_BYTES), ("b", GRADIENT, 1))) == [0]


def test_a_gradient_that_found_no_room_is_not_overtaken_by_its_model() -> None:
    jobs = pending(
        ("a", GRADIENT, MAX_BYTES - 10), ("b", GRADIENT, 20), ("b", GRADIENT, 1), ("c", GRADIENT, 1)
    )
    assert unit(jobs) == [0, 3]


models = st.sampled_from(["a1", "a2", "b1", "c1", "c2", "d1"])
sizes = st.sampled_from([1, 1000, MAX_BYTES // 3, MAX_BYTES // 2, MAX_BYTES, 2 * MAX_BYTES])
backlog = st.lists(st.tuples(models, st.sampled_from(list(JobKind)), sizes), max_size=60)


@given(backlog, st.data())
@settings(deadline=None, max_examples=150)
def test_a_backlog_drains_in_order_within_limits_and_in_turn(
    described: list[tuple[str, JobKind, int]], data: st.DataObject
) -> None:
    """Jobs also arrive while units run, in random groups."""
    arriving = pending(*described)
    waiting: list[Job] = []
    done: list[Job] = []
    last_served: dict[str, int] = {}
    waited: dict[str, int] = {}  # units since the tenant's first runnable job was passed over
    units = 0
    while arriving or waiting:
        count = data.draw(st.integers(0 if waiting else 1, 20))
        waiting += arriving[:count]
        del arriving[:count]
        chosen = next_unit(waiting, last_served)
        check_unit(chosen, waiting)
        units += 1
        served = {job.tenant for job in chosen}
        backlogged = {job.tenant for job in waiting}
        for tenant in backlogged:
            waited[tenant] = 0 if tenant in served else waited.get(tenant, 0) + 1
            assert waited[tenant] < 4, f"tenant {tenant} of 4 waited {waited[tenant]} units"
        for tenant in served:
            last_served[tenant] = units
        done += chosen
        waiting = [job for job in waiting if job not in chosen]
    assert sorted(job.release for job in done) == list(range(len(described)))
    for model in {job.model_id for job in done if job.model_id is not None}:
        order = [job.release for job in done if job.model_id == model]
        assert order == sorted(order)


def check_unit(chosen: list[Job], waiting: list[Job]) -> None:
    assert chosen
    assert len({job.kind for job in chosen}) == 1
    assert len(chosen) <= MAX_JOBS
    assert len(chosen) == 1 or sum(len(job.payload) for job in chosen) <= MAX_BYTES
    assert [job.release for job in chosen] == sorted({job.release for job in chosen})
    assert all(job in waiting for job in chosen)
    for job in chosen:  # nothing of its model that must come first stays behind
        earlier = [w for w in waiting if w.model_id == job.model_id and w.release < job.release]
        if job.model_id is not None:
            assert all(w in chosen and w.kind == GRADIENT for w in earlier)
