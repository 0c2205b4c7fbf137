"""The choice of samples to start, to run together, and to continue beside training."""

from dataclasses import replace

import pytest

from tests.engine.worker.scheduling.test_scheduler import GRADIENT, SAMPLE, SAVE, pending
from tuneserve_engine.core.jobs import Job, SampleCommand, encode
from tuneserve_engine.worker.scheduling.cost_model import CostModel
from tuneserve_engine.worker.scheduling.runnable import Running, RunningSample
from tuneserve_engine.worker.scheduling.scheduler import Scheduler


def samples(*asked: tuple[str, int], attempts: int = 0) -> list[Job]:
    """Samples from (tenant, sequences), of up to 100 tokens each."""
    return [
        replace(
            job,
            payload=encode(SampleCommand([0] * 32, 1, max_tokens=100, num_samples=count)),
            attempts=attempts,
        )
        for job, (_, count) in zip(
            pending(*[(tenant, SAMPLE) for tenant, _ in asked]), asked, strict=True
        )
    ]


def behind(first: list[Job], then: list[Job]) -> list[Job]:
    """The second list as if it had arrived after the first."""
    return [replace(job, release=job.release + len(first)) for job in then]


def running_samples(jobs: list[Job], *left: int) -> list[RunningSample]:
    return [RunningSample(job, count) for job, count in zip(jobs, left, strict=True)]


def four_decode_slots() -> Scheduler:
    """A scheduler with eight places, so a free decode slot has its next sequence at once."""
    return Scheduler(batch_s=0.1, costs=CostModel(decode_slots=4))


def test_samples_start_while_there_are_places() -> None:
    jobs = samples(*[("a", 1)] * 20)
    assert four_decode_slots().next_batch(jobs) == jobs[:8]
    wide = samples(*[("a", 3)] * 20)
    assert four_decode_slots().next_batch(wide) == wide[:3]  # the last of nine waits for a place
    huge = samples(("a", 100), ("a", 1))
    assert four_decode_slots().next_batch(huge) == huge[:1]


def test_running_samples_continue_together_and_others_join_as_sequences_end() -> None:
    jobs = samples(*[("a", 2)] * 6)
    device = four_decode_slots()
    assert device.next_batch(jobs) == jobs[:4]
    assert device.next_batch(jobs[4:], running_samples(jobs[:4], 2, 2, 2, 2)) == jobs[:4]
    assert device.next_batch(jobs[4:], running_samples(jobs[:4], 2, 2, 2, 1)) == jobs[:5]
    assert device.next_batch(jobs[4:], running_samples(jobs[2:4], 1, 1)) == jobs[2:]
    assert device.next_batch([], running_samples(jobs[:1], 1)) == jobs[:1]


def test_places_go_to_the_tenant_that_used_the_device_least() -> None:
    jobs = samples(*[("a", 1)] * 8, *[("b", 1)] * 8)
    device = four_decode_slots()
    assert device.next_batch(jobs) == [*jobs[:4], *jobs[8:12]]
    device.charge(jobs[8:12], 0.04, {job.request_id: 1000.0 for job in jobs[8:12]})
    assert device.next_batch(jobs) == jobs[:9]  # the first sample of a tenant always finds a place
    gold = Scheduler({"a": 3.0}, batch_s=0.1, costs=CostModel(decode_slots=4))
    assert gold.next_batch(jobs) == [*jobs[:6], *jobs[8:10]]


def test_a_tenant_without_running_samples_need_not_wait_for_a_place() -> None:
    flood = samples(*[("a", 4)] * 9)
    light = behind(flood, samples(("b", 1), ("b", 1)))
    device = four_decode_slots()
    begun = running_samples(flood[:2], 4, 4)
    assert device.next_batch([*flood[2:], *light], begun) == [*flood[:2], light[0]]


def test_samples_that_workers_may_have_died_of_run_apart() -> None:
    """After one death they run together, and after two alone. A third death gives proof."""
    fresh = samples(("a", 1), ("b", 1))
    once = behind(fresh, samples(("c", 1), ("d", 1), attempts=1))
    twice = behind([*fresh, *once], samples(("e", 1), ("f", 1), attempts=2))
    device = four_decode_slots()
    assert device.next_batch([*fresh, *once, *twice]) == fresh
    assert device.next_batch([*once, *twice]) == once
    assert device.next_batch(twice) == twice[:1]
    # No other sample starts until the running ones have ended, or the suspects would never run.
    assert (
        device.next_batch([*samples(("g", 1)), *once], running_samples(fresh[:1], 1)) == fresh[:1]
    )
    assert device.next_batch(once[1:], running_samples(once[:1], 1)) == once
    assert device.next_batch(twice[1:], running_samples(twice[:1], 1)) == twice[:1]


def test_samples_without_a_place_do_not_hold_up_others() -> None:
    """The tenant that used the device least waits for a place, while the device does other work."""
    flood = samples(*[("a", 8)] * 2, ("b", 8), ("b", 8))
    gradient = behind(flood, pending(("c", GRADIENT)))
    device = four_decode_slots()
    for tenant, seconds in (("a", 3.0), ("c", 2.0)):
        device.charge(pending((tenant, SAVE)), seconds)
    begun = running_samples([flood[0], flood[2]], 8, 8)
    assert device.next_batch([flood[1], flood[3], *gradient], begun) == [flood[0], flood[2]]
    device.charge([flood[0], flood[2]], 5.0, {flood[0].request_id: 1.0, flood[2].request_id: 1.0})
    assert device.next_batch([flood[1], flood[3], *gradient], begun) == gradient


def test_sampling_and_training_of_one_tenant_get_equal_parts() -> None:
    (sample,) = samples(("a", 1))
    gradients = behind([sample], pending(("a", GRADIENT), ("a2", GRADIENT)))
    device = four_decode_slots()
    begun, done = running_samples([sample], 1), {"sampling": 0.0, "training": 0.0}
    for _ in range(200):
        batch = device.next_batch(gradients, begun)
        if batch == [sample]:
            device.charge(batch, 0.03, {sample.request_id: 4.0})
            done["sampling"] += 0.03
        else:
            device.charge(batch, 0.5)
            done["training"] += 0.5
        assert abs(done["sampling"] - done["training"]) <= 0.5 + 1e-9


def test_between_micro_batches_samples_continue_until_they_have_had_as_much_time() -> None:
    training = pending(("a", GRADIENT))
    mine, others = samples(("a", 1), ("b", 1))
    for sample in (mine, others):
        device = four_decode_slots()
        begun = running_samples([sample], 1)
        assert device.interrupting_batch([Running(training, 0.0, 0.0)], [], []) == []
        slices = 0
        while device.interrupting_batch([Running(training, 1.0, 1.0)], [], begun):
            device.charge([sample], 0.1, {sample.request_id: 1.0})
            slices += 1
        assert 10 <= slices <= 11
        assert device.interrupting_batch([Running(training, 2.0, 2.0)], [], begun) == [sample]
    asked = pending(("c", SAMPLE))
    assert device.interrupting_batch([Running(training, 1.2, 1.2)], asked, begun)[0].tenant == "c"


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_between_micro_batches_weights_count(weight: float) -> None:
    training, (sample,) = pending(("a", GRADIENT)), samples(("b", 1))
    device = Scheduler({"b": weight}, batch_s=0.1)
    slices = 0
    while device.interrupting_batch(
        [Running(training, 1.0, 1.0)], [], running_samples([sample], 1)
    ):
        device.charge([sample], 0.1, {sample.request_id: 1.0})
        slices += 1
    assert weight * 10 <= slices <= weight * 10 + 1


def test_a_tenant_that_waits_for_a_decode_slot_does_not_block_the_device() -> None:
    """Three tenants sample, two decode slots hold two of them, and a fourth tenant trains."""
    jobs = samples(("a", 1), ("b", 1), ("c", 1))
    training = behind(jobs, pending(("d", GRADIENT)))
    device = Scheduler(batch_s=0.03, costs=CostModel(decode_slots=2))
    begun = running_samples(jobs, 1, 1, 1)
    trained = 0
    for _ in range(300):
        batch = device.next_batch(training, begun)
        trained += batch == training
        work = {job.request_id: 4.0 for job in jobs[:2]} | {jobs[2].request_id: 0.0}
        device.charge(batch, 0.03, work if batch == jobs else None)
    assert 75 <= trained <= 150  # a fourth by tenants, a half at most


def test_a_suspect_whose_tenant_may_not_start_holds_up_no_other() -> None:
    fresh = samples(("a", 1), ("a", 1))
    suspect = behind(fresh, samples(("b", 1), attempts=1))
    device = four_decode_slots()
    device.charge(fresh[:1], 0.1, {fresh[0].request_id: 4.0})
    for _ in range(9):
        device.charge(pending(("b", SAVE)), 1.0)
    assert device.next_batch([fresh[1], *suspect], running_samples(fresh[:1], 1)) == fresh
