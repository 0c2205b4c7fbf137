"""The jobs that need not wait for an earlier job of their model, and may share a batch."""

from dataclasses import replace

from tuneserve_engine.core.jobs import Job, JobKind
from tuneserve_engine.worker.scheduling.runnable import (
    by_tenant,
    can_share,
    runnable_of,
)

GRADIENT, STEP, SAMPLE = JobKind.FORWARD_BACKWARD, JobKind.OPTIM_STEP, JobKind.SAMPLE


def job(number: int, kind: JobKind, model: str | None = "m", tenant: str = "t") -> Job:
    return Job(tenant, kind, "scope", number, model_id=model, release=number)


def numbers(jobs: list[Job]) -> list[int]:
    return [each.release for each in jobs]


def test_gradients_at_the_head_of_a_model_run_together_and_nothing_behind_a_step() -> None:
    kinds = [GRADIENT, GRADIENT, STEP, GRADIENT]
    assert numbers(runnable_of([job(n, kind) for n, kind in enumerate(kinds)])) == [0, 1]
    kinds = [STEP, GRADIENT, STEP]
    assert numbers(runnable_of([job(n, kind) for n, kind in enumerate(kinds)])) == [0]


def test_models_do_not_wait_for_each_other_and_samples_for_none() -> None:
    jobs = [
        job(0, STEP, "m"),
        job(1, STEP, "m"),
        job(2, GRADIENT, "n"),
        job(3, SAMPLE, None),
        job(4, GRADIENT, "n"),
        job(5, SAMPLE, None),
    ]
    assert numbers(runnable_of(jobs)) == [0, 2, 3, 4, 5]


def test_tenants_have_their_jobs_in_release_order() -> None:
    jobs = [job(3, STEP), job(1, STEP, tenant="u"), job(2, STEP)]
    found = by_tenant(jobs)
    assert {tenant: numbers(mine) for tenant, mine in found.items()} == {"u": [1], "t": [2, 3]}


def test_a_suspect_a_halved_job_and_other_kinds_run_alone() -> None:
    assert can_share(job(0, GRADIENT)) and can_share(job(0, STEP))
    assert not can_share(job(0, JobKind.SAVE_WEIGHTS)) and not can_share(job(0, SAMPLE))
    for change in ({"attempts": 1}, {"halvings": 1}):
        assert not can_share(replace(job(0, GRADIENT), **change))
