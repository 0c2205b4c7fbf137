"""The recipe of a training run: its order, its rates, and its memory in checkpoints."""

from dataclasses import replace
from itertools import chain

import pytest

from tuneserve_server.cli.train_recipe import Recipe


def test_every_epoch_has_each_row_once_in_a_new_order() -> None:
    recipe = Recipe("digest", seed=3, epochs=2, batch_size=3)
    data = list(range(8))
    batches = [recipe.batch(step, data) for step in range(recipe.steps(8))]
    assert [len(each) for each in batches] == [3, 3, 2, 3, 3, 2]
    first, second = ([*chain.from_iterable(each)] for each in (batches[:3], batches[3:]))
    assert sorted(first) == sorted(second) == data
    assert first != second
    other = replace(recipe, seed=4)
    assert [other.batch(step, data) for step in range(6)] != batches


def test_the_learning_rate_falls_to_zero_in_a_straight_line() -> None:
    recipe = Recipe("digest", epochs=2, batch_size=4, learning_rate=1e-3)
    rates = [recipe.rate(step, 8) for step in range(4)]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_a_checkpoint_remembers_the_next_step() -> None:
    recipe = Recipe("digest", seed=3, epochs=2, batch_size=3, learning_rate=3e-5)
    assert Recipe.remembered(recipe.metadata(17)) == (recipe, 17)
    assert Recipe.remembered({}) is None
    assert Recipe.remembered({**recipe.metadata(17), "tuneserve_train_seed": "x"}) is None
    assert recipe.changed({"epochs": 9, "seed": None}) == replace(recipe, epochs=9)
    assert recipe.has_order_of(replace(recipe, epochs=9, learning_rate=1.0))
    assert not recipe.has_order_of(replace(recipe, batch_size=4))
    cut = replace(recipe, max_tokens=24)
    assert Recipe.remembered(cut.metadata(17)) == (cut, 17)
    assert not cut.has_order_of(recipe)


EVALUATED = Recipe(
    "digest",
    eval_split=0.05,
    eval_every=7,
    patience=3,
    sample_prompts=("Hello, “you”", "two\nlines"),
    sample_tokens=12,
)


def test_a_checkpoint_remembers_the_evaluation() -> None:
    assert Recipe.remembered(EVALUATED.metadata(5)) == (EVALUATED, 5)
    of_file = EVALUATED.changed({"eval_file": "/rows.jsonl", "eval_data": "other"})
    assert of_file.eval_split is None
    assert Recipe.remembered(of_file.metadata(5)) == (of_file, 5)
    assert of_file.changed({"eval_split": 0.05}) == EVALUATED
    part = {"eval_file_config": "main", "eval_file_split": "test"}
    of_part = EVALUATED.changed({"eval_file": "owner/name", "eval_data": "other", **part})
    assert Recipe.remembered(of_part.metadata(5)) == (of_part, 5)
    assert of_part.changed({"eval_file": "/rows.jsonl"}) == of_file
    assert of_part.changed({"eval_split": 0.05}) == EVALUATED
    assert of_part.changed({"epochs": 2}).eval_file_split == "test"


def test_other_held_out_rows_change_the_order_or_the_losses_that_compare() -> None:
    assert not EVALUATED.has_order_of(replace(EVALUATED, eval_split=0.1))
    assert not EVALUATED.has_held_out_of(replace(EVALUATED, seed=1))
    assert EVALUATED.has_held_out_of(replace(EVALUATED, patience=9, epochs=4))
    of_file = EVALUATED.changed({"eval_file": "/rows.jsonl", "eval_data": "other"})
    assert of_file.has_held_out_of(replace(of_file, seed=1, data="more"))
    assert not of_file.has_held_out_of(replace(of_file, eval_data="new"))


@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [
        (7, 16, [0, 7, 14, 16]),
        (None, 50, [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50]),
        (None, 3, [0, 1, 2, 3]),
        (100, 3, [0, 3]),
    ],
)
def test_evaluations_come_first_last_and_between(
    every: int | None, steps: int, expected: list[int]
) -> None:
    recipe = replace(EVALUATED, eval_every=every)
    assert [step for step in range(steps + 1) if recipe.is_evaluated(step, steps)] == expected
    assert not Recipe("digest").is_evaluated(0, steps)


def test_of_very_many_evaluations_some_are_recorded() -> None:
    """The server keeps 1,000 events of a run; half of them may be samples."""
    recipe = replace(EVALUATED, eval_every=1)
    for steps, count in ((499, 500), (500, 251), (10_000, 478)):  # each, every 2nd, every 21st
        recorded = [step for step in range(steps + 1) if recipe.is_recorded(step, steps)]
        assert (recorded[0], recorded[-1], len(recorded)) == (0, steps, count)
