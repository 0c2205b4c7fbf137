"""The tokens that a plan has left; commands test the rest of plans."""

from typing import Any, cast

from tuneserve_server.cli.train_plan import TrainPlan
from tuneserve_server.cli.train_recipe import Recipe


def test_the_tokens_that_are_left_are_those_of_the_steps_from_the_first_on() -> None:
    """By hand: two epochs of 600 tokens in four steps."""
    left = [
        TrainPlan(
            recipe=Recipe("digest", epochs=2, batch_size=1),
            first=first,
            base_model="base",
            resume=None,
            rows=cast(Any, None),
            data=[cast(Any, [0] * 100), cast(Any, [0] * 500)],
            held_out=None,
            losses=None,
            vocabulary=2,
        ).tokens_left
        for first in (0, 3)
    ]
    assert left == [1200, 300]
