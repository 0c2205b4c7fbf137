"""Training on a terminal."""

import io

from rich.console import Console

from tuneserve_server.cli.train_view import Step, view_of


def test_a_terminal_shows_a_bar_and_the_curve() -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=120)
    with view_of(console, steps=10, done=0, as_json=False) as view:
        for step, loss in ((1, 2.0), (2, 0.5)):
            view.show(Step(step, 10, 1, loss, 0.1, 1e-3, 100, 1234.5))
    text = drawn.getvalue()
    for part in ("2/10", "loss 0.5000", "1.00e-03", "1,234 tokens/s", "█▁  2.000 → 0.500"):
        assert part in text
