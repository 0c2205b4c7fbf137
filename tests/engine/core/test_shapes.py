"""The choices of static shapes, worked by hand."""

import pytest

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.shapes import StaticShapes


@pytest.mark.parametrize(
    ("context", "tokens", "micro_batch"),
    [
        (100, 4096, 4096),
        (100, 4000, 4096),  # rounded up to a multiple of the chunk
        (5000, 4096, 5120),  # one datum has to fit
        (100, 1, 256),
    ],
)
def test_a_micro_batch_has_the_requested_length_and_holds_any_datum(
    context: int, tokens: int, micro_batch: int
) -> None:
    assert StaticShapes(context, requested_tokens=tokens).micro_batch_tokens == micro_batch


@pytest.mark.parametrize(
    ("chunk", "tokens", "bin_tokens"),
    [
        (256, 256, 256),
        (256, 1024, 1024),
        (256, 4096, 1024),
        (2048, 8192, 4096),
        (8192, 16_384, 8192),
    ],
)
def test_a_bin_has_at_most_four_chunks_or_4096_tokens_and_fits_a_micro_batch(
    chunk: int, tokens: int, bin_tokens: int
) -> None:
    assert StaticShapes(100, chunk=chunk, requested_tokens=tokens).bin_tokens == bin_tokens


@pytest.mark.parametrize(("chunk", "prefill"), [(64, 64), (256, 256), (2048, 2048), (4096, 2048)])
def test_a_step_of_prefill_is_a_chunk_of_at_most_2048_tokens(chunk: int, prefill: int) -> None:
    assert StaticShapes(100, chunk=chunk).prefill_tokens == prefill


def test_a_step_of_prefill_has_at_least_one_block() -> None:
    assert StaticShapes(100, block=4096, chunk=8192).prefill_tokens == 4096


@pytest.mark.parametrize(("rank_bucket", "slots"), [(8, 6), (16, 3), (32, 1), (128, 1)])
def test_batches_of_all_rank_buckets_need_the_memory_of_the_lowest(
    rank_bucket: int, slots: int
) -> None:
    assert StaticShapes(100, request_slots=6).slots(rank_bucket) == slots


@pytest.mark.parametrize(("rank", "padded"), [(1, 8), (8, 8), (9, 32), (33, 128), (128, 128)])
def test_ranks_are_padded_to_their_bucket(rank: int, padded: int) -> None:
    assert StaticShapes(100).rank_bucket(rank) == padded
    assert StaticShapes(100).max_rank == 128


@pytest.mark.parametrize(("targets", "padded"), [(1, 1), (2, 64), (33, 64), (64, 64)])
def test_targets_are_one_token_or_a_distribution(targets: int, padded: int) -> None:
    assert StaticShapes(100).target_bucket(targets) == padded
    assert padded in StaticShapes(100).target_buckets


@pytest.mark.parametrize("rank", [0, 129])
def test_a_rank_without_a_bucket_is_refused_with_the_limit(rank: int) -> None:
    with pytest.raises(UserError, match=f"rank is {rank}.*1 to 128"):
        StaticShapes(100).rank_bucket(rank)


@pytest.mark.parametrize("targets", [0, 65])
def test_targets_without_a_bucket_are_refused_with_the_limit(targets: int) -> None:
    with pytest.raises(UserError, match=rf"{targets} targets.*1 to 64"):
        StaticShapes(100).target_bucket(targets)


@pytest.mark.parametrize(
    "options",
    [
        {"context_length": 0},
        {"block": 24},
        {"chunk": 96},
        {"chunk": 0},
        {"requested_tokens": 0},
        {"request_slots": 0},
        {"rank_buckets": ()},
        {"rank_buckets": (8, 8)},
    ],
)
def test_impossible_settings_of_static_shapes_are_refused_by_name(
    options: dict[str, object],
) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        StaticShapes(**{"context_length": 100} | options)  # type: ignore[arg-type]
