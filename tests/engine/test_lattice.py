"""The lattice's choices, worked by hand."""

import pytest

from tuneserve_engine.errors import UserError
from tuneserve_engine.lattice import ShapeLattice


@pytest.mark.parametrize(
    ("length", "bucket"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 100), (100, 100)]
)
def test_lengths_are_padded_to_powers_of_two_and_last_to_the_context_length(length, bucket):
    assert ShapeLattice(100).bucket(length) == bucket


def test_a_context_shorter_than_the_smallest_bucket_is_the_only_bucket():
    assert ShapeLattice(10).bucket(3) == 10


@pytest.mark.parametrize("length", [0, 101])
def test_a_length_outside_the_context_is_refused_with_the_limit(length):
    with pytest.raises(UserError, match=f"{length} tokens.*1 to 100"):
        ShapeLattice(100).bucket(length)


@pytest.mark.parametrize(
    ("bucket", "datums", "rows"),
    [
        (16, 1, 1),  # alone: one row
        (16, 2, 8),  # 64 would fit; at most 8
        (128, 2, 8),
        (128, 100, 8),
        (256, 2, 4),
        (300, 2, 2),  # 3 fit: down to a power of two
        (4096, 2, 2),  # none fits: at least 2
    ],
)
def test_rows_follow_from_the_bucket_and_whether_the_request_has_one_datum(bucket, datums, rows):
    assert ShapeLattice(8192).rows(bucket, datums) == rows


@pytest.mark.parametrize(("rank", "padded"), [(1, 8), (8, 8), (9, 32), (33, 128), (128, 128)])
def test_ranks_are_padded_to_their_class(rank, padded):
    assert ShapeLattice(100).rank_class(rank) == padded


@pytest.mark.parametrize(("targets", "padded"), [(1, 1), (2, 2), (3, 4), (33, 64), (64, 64)])
def test_targets_are_padded_to_powers_of_two(targets, padded):
    assert ShapeLattice(100).target_class(targets) == padded


@pytest.mark.parametrize("rank", [0, 129])
def test_a_rank_without_a_class_is_refused_with_the_limit(rank):
    with pytest.raises(UserError, match=f"rank is {rank}.*1 to 128"):
        ShapeLattice(100).rank_class(rank)


def test_too_many_targets_are_refused_with_the_limit():
    with pytest.raises(UserError, match=r"65 targets.*1 to 64"):
        ShapeLattice(100).target_class(65)


@pytest.mark.parametrize(
    "options",
    [
        {"context_length": 0},
        {"smallest_bucket": 24},
        {"token_budget": 0},
        {"max_rows": 0},
        {"rank_classes": ()},
        {"rank_classes": (8, 8)},
    ],
)
def test_settings_that_make_no_lattice_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ShapeLattice(**{"context_length": 100} | options)
