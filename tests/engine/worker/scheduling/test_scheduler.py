"""The choice of jobs that run together: order per model, sharing, limits.

For turns and shares, see test_fairness.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.jobs import MAX_JOBS, Job, JobKind
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.worker.scheduling.cost_model import Cost, CostModel
from tuneserve_engine.worker.scheduling.runnable import Running, RunningSample
from tuneserve_engine.worker.scheduling.scheduler import MAX_BYTES, Scheduler

CREATE, GRADIENT, STEP = JobKind.CREATE_MODEL, JobKind.FORWARD_BACKWARD, JobKind.OPTIM_STEP
SAVE, SAMPLE, UNLOAD = JobKind.SAVE_WEIGHTS, JobKind.SAMPLE, JobKind.UNLOAD_MODEL
ids = count()


def pending(*jobs: tuple[str, JobKind] | tuple[str, JobKind, int]) -> list[Job]:
    """Jobs in release order from (model, kind[, payload bytes]).

    The tenant is the model's first letter. A sample has no model, so its name is the tenant's
    alone.
    """
    return [
        Job(
            tenant=name[0],
            kind=kind,
            scope=name,
            seq=number,
            payload=bytes(*size),
            model_id=None if kind == SAMPLE else name,
            request_id=f"{name}-{next(ids)}",
            release=number,
        )
        for number, (name, kind, *size) in enumerate(jobs)
    ]


def scheduler(
    used: dict[str, float] | None = None, *, fast: bool = True, graded: Sequence[str] = ()
) -> Scheduler:
    """A scheduler whose tenants used the device for these seconds.

    It knows every kind to be fast, so time limits no batch. The models ``graded`` had a gradient.
    """
    device = Scheduler(batch_s=10.0)
    for kind in JobKind:
        device.charge(pending(("z", kind, 1000)), 1e-6 if fast else 1.0)
    for name in graded:
        device.charge(pending((name, GRADIENT, 1000)), 1e-6)
    for tenant, seconds in (used or {}).items():
        device.charge(pending((tenant, SAVE)), seconds)
    return device


def batch(jobs: list[Job], used: dict[str, float] | None = None) -> list[int]:
    """The indices of the next batch's jobs in the list."""
    return [job.release for job in scheduler(used).next_batch(jobs)]


def test_without_pending_jobs_there_is_no_batch() -> None:
    assert Scheduler().next_batch([]) == []


def test_a_run_of_gradients_of_one_model_shares_a_batch_up_to_the_step() -> None:
    jobs = pending(("a", GRADIENT), ("a", GRADIENT), ("a", STEP), ("a", GRADIENT))
    assert batch(jobs) == [0, 1]
    assert batch(jobs[2:]) == [2]
    assert batch(jobs[3:]) == [3]


def test_a_gradient_waits_for_the_step_before_it() -> None:
    jobs = pending(("a", STEP), ("a", GRADIENT), ("b", GRADIENT))
    assert scheduler({"b": 0.5, "a": 1.0}, graded="a").next_batch(jobs) == jobs[:1]
    suspect = with_fields(jobs, 0, attempts=1)
    assert scheduler({"b": 0.5, "a": 1.0}, graded="a").next_batch(suspect) == jobs[2:]
    assert batch(jobs, {"a": 1.0, "b": 0.5}) == [2], "a step without a gradient before it"
    device = scheduler({"b": 0.5}, graded="a")
    for _ in range(20):
        device.charge(pending(("a", SAVE)), 1.0)
    assert device.next_batch(jobs) == [jobs[2]], "ahead by more than one request or batch"


@pytest.mark.parametrize("kind", [CREATE, SAVE, JobKind.LOAD_WEIGHTS, UNLOAD])
def test_jobs_that_change_a_whole_model_run_alone(kind: JobKind) -> None:
    assert batch(pending(("a", kind), ("b", kind), ("b", GRADIENT))) == [0]


def test_steps_of_different_models_share_a_batch() -> None:
    assert batch(pending(("a1", STEP), ("b1", STEP), ("a2", STEP), ("a1", STEP))) == [0, 1, 2]


def test_samples_wait_for_no_model() -> None:
    jobs = pending(("a", CREATE), ("a", SAMPLE), ("b", SAMPLE))
    assert batch(jobs, {"a": 2.0, "b": 1.0}) == [1, 2]


def test_gradients_of_all_tenants_share_a_batch_in_release_order() -> None:
    jobs = pending(("c", GRADIENT), ("a", GRADIENT), ("b", GRADIENT), ("a", GRADIENT))
    assert batch(jobs, {"a": 3.0, "b": 9.0, "c": 5.0}) == [0, 1, 2, 3]


def test_the_tenant_that_used_the_least_decides_the_kind() -> None:
    jobs = pending(("a", GRADIENT), ("b", SAMPLE), ("c", GRADIENT))
    assert batch(jobs) == [0, 2]  # no tenant used anything, so the oldest runs
    assert batch(jobs, {"a": 2.0, "b": 1.0, "c": 2.0}) == [1]
    assert batch(jobs, {"a": 2.0, "b": 3.0, "c": 1.0}) == [0, 2]


def test_steps_run_before_a_gradient_up_to_one_request_ahead() -> None:
    """The gradients behind the steps then share its batch. The largest request took 0.5 s."""
    device = Scheduler(batch_s=0.03)
    for name in ("a", "b"):
        device.charge(pending((name, GRADIENT)), 1e-6)
    for _ in range(9):
        device.charge(gradients(("z", 4, 64)), 0.5)
    device.charge(pending(("z", STEP)), 0.003)
    (first,) = gradients(("c", 4, 64))
    _, *steps, _, _ = pending(
        ("c", GRADIENT), ("a", STEP), ("b", STEP), ("a", GRADIENT), ("b", GRADIENT)
    )
    behind = pending(*[("z", SAVE)] * 3, ("a", GRADIENT), ("b", GRADIENT))[3:]
    jobs = [first, *steps, *behind]
    assert device.next_batch(jobs) == steps
    assert device.next_batch([first, *steps]) == steps, "also if no gradient waits behind them"
    device.charge(gradients(("a", 4, 64)), 0.3)
    assert device.next_batch(jobs) == steps, "they share a batch, though one is ahead"
    assert device.next_batch([first, steps[0], behind[0]]) == steps[:1]
    device.charge(gradients(("a", 4, 64)), 0.4)
    assert device.next_batch([first, steps[0], behind[0]]) == [first]


def test_a_short_step_goes_before_the_turns_of_others_up_to_one_request() -> None:
    """It ends a request whose gradient has had its turn; only a long step waits for its own."""
    device = Scheduler(batch_s=0.03)
    for name, seconds in (("z", 0.5), ("b", 0.01), ("c", 0.01)):
        device.charge(pending((name, SAVE)), seconds)
    device.charge(pending(("a", STEP)), 0.003)
    device.charge(pending(("a", GRADIENT, 64)), 0.4)
    step, *others = pending(("a", STEP), ("b", GRADIENT), ("c", SAMPLE))
    assert device.next_batch([*others, step]) == [step]
    device.charge(pending(("a", SAVE)), 0.2)
    assert device.next_batch([*others, step]) == others[:1]
    slow = Scheduler(batch_s=0.03)
    slow.charge(pending(("b", SAVE)), 0.01)
    slow.charge(pending(("a", STEP)), 0.04)
    assert slow.next_batch([others[0], step]) == others[:1]


def test_a_short_step_interrupts_a_long_request_that_was_interrupted_enough() -> None:
    device = Scheduler(batch_s=0.03)
    for name, seconds in (("b", 0.01), ("c", 0.01)):
        device.charge(pending((name, SAVE)), seconds)
    device.charge(pending(("a", STEP)), 0.003)
    device.charge(pending(("a", GRADIENT, 64)), 1.2)
    running = pending(("b", GRADIENT, 64))
    step, gradient = pending(("a", STEP), ("a", GRADIENT))
    sample = [RunningSample(pending(("c", SAMPLE))[0], 1)]
    enough = [Running(running, 1.0, 1.0)]
    assert device.interrupting_batch(enough, [gradient], []) == []
    assert device.interrupting_batch(enough, [step], []) == [step]
    device.charge(pending(("a", SAVE)), 0.2)
    assert device.interrupting_batch(enough, [step], sample) == [sample[0].job]
    assert device.interrupting_batch(enough, [], sample) == [sample[0].job]
    device.charge([sample[0].job], 0.3)
    assert device.interrupting_batch(enough, [step], sample) == [step], "near the sample now"


def test_only_the_first_step_after_a_gradient_goes_before_others() -> None:
    """Otherwise tenants that send nothing but steps would keep a gradient waiting."""
    device = Scheduler(batch_s=0.03)
    device.charge(pending(("z", GRADIENT, 64)), 30.0)  # a compilation
    device.charge(pending(("b", SAVE)), 0.01)
    (gradient,) = pending(("b", GRADIENT))
    for name in "acd":
        device.charge(pending((name, GRADIENT, 64)), 0.1)
    device.charge(pending(("z", STEP)), 0.003)
    steps = pending(("a", STEP), ("c", STEP), ("d", STEP))
    assert device.next_batch([gradient, *steps]) == steps, "they share a batch"
    device.charge(steps, 0.009)
    again = pending(("a", STEP), ("c", STEP), ("d", STEP))
    assert device.next_batch([gradient, *again]) == [gradient]


def test_a_tenants_steps_do_not_keep_its_own_gradient_waiting_forever() -> None:
    """One model's steps arrive as fast as they run, and another's gradient was there before."""
    device = scheduler(graded=["a2"])
    jobs = pending(("a1", GRADIENT), ("a2", STEP), ("a2", GRADIENT), ("a2", STEP), ("a2", GRADIENT))
    assert device.next_batch(jobs) == jobs[1:2]
    assert device.next_batch([jobs[0], *jobs[2:]]) == [jobs[0], jobs[2]]
    flood = pending(("a1", GRADIENT), *[("a2", STEP)] * 50)
    assert device.next_batch(flood) == flood[:1]


def test_one_tenants_backlog_leaves_room_for_the_others() -> None:
    jobs = pending(*[("a", GRADIENT)] * 50, ("b", GRADIENT), ("c", GRADIENT))
    assert batch(jobs) == [*range(MAX_JOBS - 2), 50, 51]
    assert batch(jobs[MAX_JOBS:], {"a": 1.0}) == [*range(32, 52)]
    assert batch(jobs, {"a": 1.0, "b": 1.0, "c": 2.0}) == [*range(MAX_JOBS - 1), 50]


def test_a_batch_has_a_limit_of_bytes_and_a_larger_job_runs_alone() -> None:
    half = MAX_BYTES // 2
    jobs = pending(("a", GRADIENT, half), ("b", GRADIENT, half), ("c", GRADIENT, 1))
    assert batch(jobs) == [0, 1]
    assert batch(pending(("a", GRADIENT, 3 * MAX_BYTES), ("b", GRADIENT, 1))) == [0]


def test_a_job_that_found_no_room_is_not_overtaken_by_its_tenant() -> None:
    jobs = pending(
        ("a", GRADIENT, MAX_BYTES - 10),
        *[("b", GRADIENT, 20), ("b", GRADIENT, 1), ("b2", GRADIENT, 1)],
        ("c", GRADIENT, 1),
    )
    assert batch(jobs) == [0, 4]


def with_fields(jobs: list[Job], at: int, **fields: int) -> list[Job]:
    return [replace(job, **fields) if job.release == at else job for job in jobs]


@pytest.mark.parametrize("fields", [{"attempts": 1}, {"attempts": 2}, {"halvings": 1}])
@pytest.mark.parametrize("kind", [GRADIENT, STEP])
def test_a_suspect_and_a_job_too_large_for_the_device_run_alone(
    kind: JobKind, fields: dict[str, int]
) -> None:
    jobs = pending(*[(name, kind) for name in "abcd"])
    suspect = with_fields(jobs, 1, **fields)
    assert batch(suspect) == [0, 2, 3]
    assert batch(suspect, {"a": 2.0, "b": 1.0, "c": 2.0, "d": 2.0}) == [1]
    assert batch(with_fields(jobs, 0, **fields)) == [0]


def test_a_suspect_is_not_overtaken_by_the_gradients_behind_it() -> None:
    jobs = with_fields(pending(*[("a", GRADIENT)] * 4), 1, attempts=1)
    chosen = [batch(jobs), batch(jobs[1:]), batch(jobs[2:])]
    assert chosen == [[0], [1], [2, 3]]


def test_the_first_job_of_a_kind_runs_alone_because_its_time_is_unknown() -> None:
    device, jobs = Scheduler(batch_s=1.0), pending(*[(name, GRADIENT) for name in "abc"])
    assert device.next_batch(jobs) == jobs[:1]
    device.charge(jobs[:1], 0.1)
    assert device.next_batch(jobs[1:]) == jobs[1:]


def gradients(*asked: tuple[str, int, int]) -> list[Job]:
    """Gradients from (tenant, datums, tokens of each)."""
    jobs = []
    for job, (_, datums, tokens) in zip(
        pending(*[(tenant, GRADIENT) for tenant, *_ in asked]), asked, strict=True
    ):
        body = wire.ForwardBackwardRequest()
        for _ in range(datums):
            body.data.add().model_input.add().encoded_text.tokens = bytes(4 * tokens)
        jobs.append(replace(job, payload=body.SerializeToString()))
    return jobs


def test_a_batch_takes_no_more_jobs_than_its_time_allows() -> None:
    device = Scheduler(batch_s=1.0)
    device.charge(gradients(("z", 1, 512)), 0.3)
    jobs = gradients(*[(name, 1, 512) for name in "abcde"])
    assert device.next_batch(jobs) == jobs[:3]
    long = gradients(("a", 1, 4096), ("b", 1, 10))
    assert device.next_batch(long) == long[:1]


def test_gradients_that_fill_the_rest_of_a_chunk_join_despite_the_time_limit() -> None:
    """Four blocks of 64 tokens are computed together, and each request has one."""
    device = Scheduler(batch_s=0.01)
    device.charge(gradients(("z", 2, 32)), 0.5)
    jobs = gradients(*[("a", 2, 32)] * 5)
    assert device.next_batch(jobs) == jobs[:4]


def test_a_gradient_of_several_slices_is_alone_though_its_last_chunk_has_room() -> None:
    """In its company, a small gradient would wait for all of it; alone, it can run in between."""
    device = Scheduler(batch_s=0.01, slice_s=0.1)
    device.charge(gradients(("z", 1, 1280)), 1.0)
    jobs = gradients(("a", 1, 1152), ("b", 1, 10))
    assert device.next_batch(jobs) == jobs[:1]


def test_small_gradients_of_other_tenants_share_four_chunks() -> None:
    """This holds for any time: 16 blocks of 64 tokens, and each tenant's share is one request."""
    device = Scheduler(batch_s=0.01)
    device.charge(gradients(("z", 2, 32)), 0.5)
    jobs = gradients(*[(str(tenant), 2, 32) for tenant in range(20)])
    jobs = [replace(job, tenant=job.scope) for job in jobs]
    assert device.next_batch(jobs) == jobs[:16]
    crowd = gradients(*[("a", 2, 32)] * 20, ("b", 2, 32))
    assert device.next_batch(crowd) == [*crowd[:3], crowd[20]]


def test_a_batch_is_shared_by_as_many_tenants_as_a_pass_has_slots() -> None:
    device = Scheduler(batch_s=0.01, costs=CostModel(StaticShapes(4096, request_slots=6)))
    device.charge(gradients(("z", 2, 32)), 0.5)
    jobs = gradients(*[(str(tenant), 2, 32) for tenant in range(20)])
    jobs = [replace(job, tenant=job.scope) for job in jobs]
    assert len(device.next_batch(jobs)) == 4  # two more would leave a chunk half empty
    assert len(device.next_batch(jobs[:6])) == 6


def test_a_request_that_would_not_fill_its_chunk_waits_while_other_work_exists() -> None:
    device = Scheduler(batch_s=0.01)
    device.charge(gradients(("z", 2, 32)), 0.5)
    jobs = gradients(*[(str(tenant), 1, 128) for tenant in range(7)])
    jobs = [replace(job, tenant=job.scope) for job in jobs]
    assert device.next_batch(jobs) == jobs
    other = with_fields(pending(("y", SAVE)), 0, release=99)
    assert device.next_batch([*jobs, *other]) == jobs[:6]


def test_a_crowd_of_jobs_that_do_not_fit_is_not_checked_one_by_one() -> None:
    """The device would wait for it."""

    class Counting(CostModel):
        asked = 0

        def batch_cost(self, costs: Sequence[Cost]) -> float:
            self.asked += 1
            return super().batch_cost(costs)

    costs = Counting()
    device = Scheduler(batch_s=1.0, costs=costs)
    device.charge(gradients(("z", 1, 1024)), 0.6)
    jobs = gradients(*[(str(tenant), 1, 1024) for tenant in range(1000)])
    jobs = [replace(job, tenant=job.scope) for job in jobs]
    costs.asked = 0
    assert device.next_batch(jobs) == jobs[:1]
    assert costs.asked < 2 * MAX_JOBS


def test_a_batch_that_had_to_compile_is_soon_forgotten() -> None:
    device = Scheduler(batch_s=1.0)
    jobs = pending(*[(name, GRADIENT, 1000) for name in "abcdefgh"])
    device.charge(jobs[:1], 60.0)
    assert len(device.next_batch(jobs[1:])) == 1
    device.charge(jobs[1:2], 0.01)
    assert len(device.next_batch(jobs[2:])) == 6
