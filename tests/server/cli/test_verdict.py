"""Verdicts on runs, and the rule by which a run has diverged. Expected numbers are worked by hand.

A vocabulary of 1024 tokens has a uniform guess of ln 1024 = 10 ln 2 = 6.93.
"""

import math

import pytest

from tuneserve_server.cli.verdict import (
    Diverged,
    DivergenceWatch,
    HeldOut,
    Verdict,
    training_text,
)


def watched(*losses: float, vocabulary: int = 1024) -> DivergenceWatch:
    watch = DivergenceWatch(vocabulary)
    for step, loss in enumerate(losses, 1):
        watch.see_step(step, loss, 0.5)
    return watch


def held_out(*losses: float) -> HeldOut:
    """The losses of evaluations at steps 0, 10, 20, …"""
    found = HeldOut.began(0, losses[0])
    for number, loss in enumerate(losses[1:], 1):
        found = found.with_loss(10 * number, loss)
    return found


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_numbers_that_are_not_finite_diverge_at_once(bad: float) -> None:
    watch = watched(4.0)
    with pytest.raises(Diverged, match="diverged at step 2: loss"):
        watch.see_step(2, bad, 0.5)
    with pytest.raises(Diverged, match="diverged at step 2: gradient norm"):
        watch.see_step(2, 4.0, bad)
    with pytest.raises(Diverged, match="diverged at step 2: held-out loss"):
        watch.see_held_out(2, bad, 4.0)


def test_a_run_diverges_where_three_steps_are_no_better_than_a_uniform_guess() -> None:
    """The means of steps 2 to 4 are 6.90 and 6.94; the limit is max(6.93, 1.5 * 4 = 6) * 0.999."""
    watched(4.0, 6.9, 6.9, 6.9)
    with pytest.raises(Diverged, match=r"step 4: loss 6.94, after 4 at the start; .* 6.931"):
        watched(4.0, 6.92, 6.95, 6.95)
    watched(4.0, 20.0)  # one step may have odd rows
    watched(4.0, 0.1, 20.0, 0.1)  # a mean of 6.73


def test_a_run_that_begins_above_a_uniform_guess_diverges_at_half_as_much_again() -> None:
    """It begins at 8, so its limit is 1.5 * 8 = 12, times 0.999 for rounding: 11.988."""
    watched(8.0, 11.9, 11.9, 11.9)
    with pytest.raises(Diverged):
        watched(8.0, 12.0, 12.0, 12.0)


def test_a_uniform_guess_without_a_gradient_diverges_even_after_a_worse_start() -> None:
    watch = watched(7.87)
    watch.see_step(2, math.log(1024), 0.1)  # a model may pass by there
    with pytest.raises(Diverged, match=r"step 3: loss 6\.931, that of a uniform guess"):
        watch.see_step(3, math.log(1024), 0.0)


def test_a_run_diverges_where_ten_steps_have_far_more_loss_than_the_first_three() -> None:
    """The first three have a mean of 2, so the limit is 2 * 2 + 4 = 8, below ln 151669 = 11.93."""
    watched(1.0, 2.0, 3.0, *[7.9] * 50, vocabulary=151_669)
    watched(1.0, 2.0, 3.0, *[9.0] * 9, vocabulary=151_669)
    with pytest.raises(Diverged, match=r"step 13: loss 9 in ten steps, after 2 at the start"):
        watched(1.0, 2.0, 3.0, *[9.0] * 10, vocabulary=151_669)


def test_the_last_steps_of_a_short_run_are_judged_at_its_end() -> None:
    watch = watched(4.0, 7.0)
    with pytest.raises(Diverged, match="step 2: loss 7"):
        watch.finish()
    watched(7.0).finish()  # its only loss is from before any step
    watched(4.0, 3.0).finish()


def test_one_held_out_loss_is_enough_except_before_the_first_step() -> None:
    watch = DivergenceWatch(1024)
    watch.see_held_out(0, 7.0, 7.0)
    watch.see_held_out(10, 6.9, 4.0)
    with pytest.raises(Diverged, match=r"step 10: held-out loss 6\.94"):
        watch.see_held_out(10, 6.94, 4.0)


def test_the_best_loss_is_kept_and_evaluations_since_it_are_counted() -> None:
    found = held_out(2.31, 1.9, 1.87, 1.95, 1.9)
    assert (found.first_loss, found.last_loss, found.last_step) == (2.31, 1.9, 40)
    assert (found.best_loss, found.best_step, found.since_best) == (1.87, 20, 2)
    assert held_out(2.0, 2.0, 2.0).since_best == 2  # no improvement


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ((2.31, 2.0, 1.87), "held-out loss improved from 2.31 to 1.87, best at step 20"),
        # 1.88 is less than a hundredth above 1.87
        ((2.31, 1.87, 1.88), "held-out loss improved from 2.31 to 1.87, best at step 10"),
        (
            (2.31, 1.87, 2.05),
            "held-out loss improved from 2.31 to 1.87 at step 10, then rose from 1.87 to 2.05: "
            "over-fitting; the best checkpoint is not saved",
        ),
        ((2.31, 2.4, 2.5), "held-out loss rose from 2.31 to 2.5 and never fell"),
        ((2.31, 2.3, 2.305), "held-out loss stayed at 2.305, 2.31 at the start"),
        ((2.31,), "held-out loss was 2.31 in the only evaluation, at step 0"),
    ],
)
def test_held_out_losses_are_put_into_words(losses: tuple[float, ...], text: str) -> None:
    assert held_out(*losses).text.startswith(text)


@pytest.mark.parametrize(
    ("losses", "steps_per_epoch", "text"),
    [
        # the tenths of 20 steps are two steps each, with means of 3.5 and 1.5
        ([4.0, 3.0] + [2.0] * 16 + [1.0, 2.0], 20, "training loss fell from 3.5 to 1.5, first and"),
        ([1.0] * 10 + [2.0] * 10, 20, "training loss rose from 1 to 2"),
        ([2.0] * 19 + [2.01] * 2, 21, "training loss stayed from 2 to 2.01"),
        # two epochs of three steps have the same rows: means of 3 and 2; the seventh is of a third
        ([4.0, 3.0, 2.0, 3.0, 2.0, 1.0, 9.0], 3, "training loss fell from 3 to 2, epochs 1 and 2"),
        ([1.0] * 19, 20, "too few steps"),
        ([2.0], 1, "too few steps"),
    ],
)
def test_without_held_out_rows_epochs_or_tenths_of_the_training_loss_are_compared(
    losses: list[float], steps_per_epoch: int, text: str
) -> None:
    told = training_text(losses, steps_per_epoch)
    assert told.startswith(text)
    assert Verdict.on("finished", losses, None, steps_per_epoch).verdict == told


@pytest.mark.parametrize(("rate", "lower"), [(1e9, "0.0002"), (3e-4, "0.0001")])
def test_a_diverged_run_is_advised_to_lower_its_rate(rate: float, lower: str) -> None:
    """Far above the default, 2e-4, it is the default; else it is a third."""
    found = Verdict.on_diverged(Diverged(40, "loss inf"), rate, held_out(2.31, 1.87))
    assert found.verdict == (
        "diverged at step 40: loss inf; lower the learning rate, for example "
        f"--learning-rate {lower}"
    )
    assert (found.outcome, found.best_step, found.best_loss) == ("diverged", 10, 1.87)
