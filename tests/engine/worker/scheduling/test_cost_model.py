"""Costs of jobs, from their payloads. Expected values are counted by hand."""

import numpy as np
import pytest

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.jobs import Job, JobKind, SampleCommand, encode
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.worker.scheduling.cost_model import CostModel, TimeEstimator

COSTS = CostModel(StaticShapes(256, block=16, chunk=64), context=256, decode_slots=4)
"""Gradients have blocks of 16 tokens, and batches chunks of 64. Capacities are 64, 128 and 256."""


def gradient(*lengths: int) -> Job:
    body = wire.ForwardBackwardRequest(loss_fn="cross_entropy")
    for length in lengths:
        tokens = np.zeros(length, "<i4").tobytes()
        body.data.add().model_input.add().encoded_text.tokens = tokens
    payload = body.SerializeToString()
    return Job("t", JobKind.FORWARD_BACKWARD, "s", 0, payload, request_id=str(lengths))


def sample(prompt: int, max_tokens: int | None, num_samples: int = 1) -> Job:
    command = SampleCommand([0] * prompt, 1, max_tokens=max_tokens, num_samples=num_samples)
    return Job("t", JobKind.SAMPLE, "s", 0, encode(command))


def together(*jobs: Job) -> float:
    return COSTS.batch_cost([COSTS.job_cost(job) for job in jobs])


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ([[10]], 64),
        ([[64]], 64),
        ([[65]], 128),
        ([[10] * 6], 64),  # its datums share blocks
        ([[10] * 7], 128),
        ([[10], [10], [10], [10]], 64),  # a block each, and they share a chunk
        ([[10], [10], [10], [10], [10]], 128),
        ([[10, 10], [17]], 64),
        ([[40], [30, 30]], 128),  # 48 + 64
        ([[200]], 256),
    ],
)
def test_gradients_take_the_chunks_that_their_blocks_fill(
    lengths: list[list[int]], tokens: int
) -> None:
    assert together(*[gradient(*each) for each in lengths]) == 16 + tokens


def test_a_gradient_is_charged_for_its_own_blocks() -> None:
    assert [COSTS.job_cost(gradient(*n)).work for n in ([10], [10, 10], [60] * 3)] == [32, 48, 208]


def test_samples_cost_their_prompt_and_their_token_limit() -> None:
    assert together(sample(32, 100)) == 1 + 100
    assert together(*[sample(32, 100)] * 5) == 5 + 500
    assert COSTS.job_cost(sample(64, 100, num_samples=4)).work == 2 + 400
    assert [COSTS.job_cost(sample(9, 9, num_samples=n)).sequences for n in (1, 7)] == [1, 7]


def test_a_sample_without_a_limit_is_charged_to_the_end_of_the_context() -> None:
    assert together(sample(32, None)) == 1 + 224
    assert together(sample(32, 1000)) == 1 + 224


def test_twice_as_many_sequences_may_run_as_there_are_decode_slots() -> None:
    assert COSTS.max_sequences == TimeEstimator(COSTS).max_sequences == 8


def test_a_shared_batch_of_gradients_has_room_for_four_chunks() -> None:
    assert COSTS.shared_budget(COSTS.job_cost(gradient(10))) == 16 + 4 * 64
    assert COSTS.shared_budget(COSTS.job_cost(gradient(200, 200))) == 16 + 7 * 64


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        ([32], 1),
        ([32, 32], 2),
        ([32] * 3, 2),  # the third would open a chunk and leave half of it empty
        ([32] * 7, 6),
        ([32] * 8, 8),
        ([48] * 4, 4),  # three full chunks
        ([48] * 5, 4),
        ([48] * 3, 3),  # leaving one out would leave a chunk unfilled too
        ([200, 10], 2),  # the rest of the fourth chunk
        ([256, 10], 1),
        ([256, 32, 32], 3),
        ([256, 16, 16], 1),  # the last two together
        ([64, 48, 48, 48], 4),
        ([64, 128], 2),
    ],
)
def test_a_batch_of_gradients_leaves_out_jobs_that_would_open_a_chunk_without_filling_it(
    tokens: list[int], count: int
) -> None:
    assert COSTS.jobs_in_full_chunks([COSTS.job_cost(gradient(each)) for each in tokens]) == count
    assert COSTS.jobs_in_full_chunks([COSTS.job_cost(sample(each, 100)) for each in tokens]) == len(
        tokens
    )


@pytest.mark.parametrize("kind", list(JobKind))
def test_an_invalid_job_has_a_cost(kind: JobKind) -> None:
    for payload in (b"", b"\xff\xff", encode(SampleCommand([], 1, num_samples=0, max_tokens=-5))):
        cost = COSTS.job_cost(Job("t", kind, "s", 0, payload))
        assert cost.work > 0
        assert COSTS.batch_cost([cost]) > 0
    assert COSTS.job_cost(gradient(257)).work > 0


def test_estimates_follow_the_median_of_the_measurements() -> None:
    estimates, job = TimeEstimator(COSTS), gradient(10)
    assert estimates.batch_s([job]) is None
    for seconds in (9.0, 0.1, 0.1, 0.3):
        estimates.learn([job], seconds)
    assert estimates.batch_s([job]) == pytest.approx(0.1)
    assert estimates.batch_s([gradient(65)]) == pytest.approx(0.1 * (16 + 128) / (16 + 64))
    for _ in range(8):
        estimates.learn([job], 2.0)
    assert estimates.batch_s([job]) == pytest.approx(2.0)
    assert estimates.batch_s([sample(1, 1)]) is None


@pytest.mark.parametrize(("tokens", "is_long"), [(64, False), (256, False), (257, True)])
def test_a_gradient_is_long_if_it_takes_more_than_a_slice_and_four_chunks(
    tokens: int, is_long: bool
) -> None:
    """A gradient above the shared budget is alone in its batch, where others would wait for it."""
    estimates, job = TimeEstimator(COSTS), gradient(tokens)
    assert not estimates.is_long(job, 0.1)
    estimates.learn([gradient(64)], 0.2)
    assert estimates.is_long(job, 0.1) == is_long
    assert not estimates.is_long(job, 2.0)
    optim = Job("t", JobKind.OPTIM_STEP, "s", 0, b"")
    estimates.learn([optim], 0.2)
    assert not estimates.is_long(optim, 0.1)


def test_samples_are_charged_and_estimated_by_the_work_done_for_them() -> None:
    estimates = TimeEstimator(COSTS)
    one, other = (
        Job("t", JobKind.SAMPLE, "s", 0, sample(32, 100).payload, request_id=i) for i in "ab"
    )
    assert estimates.shares([one, other]) == [0.5, 0.5]
    assert estimates.shares([one, other], {"a": 6.0, "b": 2.0}) == [0.75, 0.25]
    assert estimates.shares([one, other], {"a": 0.0, "b": 0.0}) == [0.5, 0.5]
    estimates.learn([one, other], 0.5, {"a": 6.0, "b": 4.0})
    assert estimates.batch_s([one]) == pytest.approx(101 * 0.05)


def test_jobs_of_a_batch_share_its_time_by_their_work() -> None:
    jobs = [gradient(10), gradient(10, 10), gradient(17)]
    assert TimeEstimator(COSTS).shares(jobs) == [32 / 128, 48 / 128, 48 / 128]


def test_only_pending_jobs_are_remembered() -> None:
    estimates = TimeEstimator(COSTS)
    jobs = [gradient(*[1] * n) for n in range(1, 41)]
    estimates.shares(jobs)
    estimates.forget_all_but(jobs[:2])
    assert len(estimates._known) == 2
