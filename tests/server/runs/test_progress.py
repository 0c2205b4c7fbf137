"""The newest losses and steps of a run, and its best evaluation."""

from tuneserve_engine.core.usage import CurvePoint
from tuneserve_server.runs.progress import Progress


def gradient(position: int, loss_sum: float, weight: float) -> CurvePoint:
    return CurvePoint("forward_backward", position, loss_sum=loss_sum, tokens=9, weight=weight)


def forward(position: int, loss_sum: float, weight: float) -> CurvePoint:
    return CurvePoint("forward", position, loss_sum=loss_sum, tokens=9, weight=weight)


def step(position: int, number: int) -> CurvePoint:
    return CurvePoint("optim_step", position, step=number)


POINTS = [
    *(forward(1, 8.0, 2.0), forward(2, 4.0, 2.0)),  # 12 / 4 before the first step
    *(gradient(3, 6.0, 3.0), gradient(4, 2.0, 1.0), step(5, 1)),  # 8 / 4
    *(gradient(6, 1.0, 2.0), step(7, 2), forward(8, 2.0, 4.0)),  # 1 / 2, then 2 / 4
    *(gradient(9, 1.0, 4.0), step(10, 3), forward(11, 6.0, 4.0)),  # 1 / 4, then 6 / 4
]


def test_losses_are_means_of_the_newest_step_and_the_newest_evaluation() -> None:
    progress = Progress()
    progress.add_points(POINTS[:2])
    assert (progress.step, progress.loss, progress.held_out_loss) == (None, None, 3.0)
    assert progress.best == (3.0, 0)
    progress.add_points(POINTS)
    assert (progress.step, progress.loss, progress.held_out_loss) == (3, 0.25, 1.5)
    assert progress.best == (0.5, 2)
    assert progress.position == 11


def test_points_are_counted_once() -> None:
    once, twice = Progress(), Progress()
    once.add_points(POINTS)
    for _ in range(2):
        twice.add_points(POINTS)
    assert vars(once).keys() == vars(twice).keys()
    assert (once.loss, once.held_out_loss, once.best) == (
        *(twice.loss, twice.held_out_loss, twice.best),
    )


def test_an_evaluation_counts_until_the_next_step_and_the_first_best_stays() -> None:
    progress = Progress()
    progress.add_points([step(1, 1), forward(2, 2.0, 2.0)])
    assert progress.held_out_loss == 1.0
    progress.add_points([forward(3, 4.0, 1.0)])  # the same evaluation goes on: 6 / 3
    assert (progress.held_out_loss, progress.best) == (2.0, (2.0, 1))
    progress.add_points([step(4, 2), forward(5, 4.0, 2.0)])
    assert progress.best == (2.0, 1)
    progress.add_points([step(6, 3)])
    assert (progress.held_out_loss, progress.loss) == (2.0, None)


def test_an_evaluation_before_the_first_step_is_of_the_step_before() -> None:
    """A run that resumes begins at the step of its checkpoint."""
    progress = Progress()
    progress.add_points([forward(1, 2.0, 2.0)])
    assert progress.best == (1.0, 0)
    progress.add_points([step(2, 51), forward(3, 4.0, 2.0)])
    assert (progress.step, progress.best) == (51, (1.0, 50))


def test_steps_only_grow_when_the_optimizer_begins_anew() -> None:
    progress = Progress()
    progress.add_points([step(1, 1), step(2, 2), step(3, 1), forward(4, 1.0, 1.0)])
    assert (progress.step, progress.best) == (3, (1.0, 3))


def test_a_request_whose_tokens_all_weigh_nothing_does_not_count() -> None:
    progress = Progress()
    progress.add_points([gradient(1, 10.0, 10.0), gradient(2, 0.0, 0.0), step(3, 1)])
    assert progress.loss == 1.0
    progress.add_points([gradient(4, -18.0, 0.0), step(5, 2)])  # a loss without weights: 9 tokens
    assert progress.loss == -2.0
