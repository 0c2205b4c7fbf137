"""Training on a terminal."""

import io
import json

import pytest
from rich.console import Console

from tuneserve_server.cli.train_view import Evaluated, Step, time_text, view_of

EVALUATED = Evaluated(2, 10, 1.87, True, [{"prompt": "a" * 60 + "\n?", "completion": " Ahoy"}])


def test_a_terminal_shows_a_bar_and_the_curve() -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=120)
    with view_of(console, steps=10, done=0, as_json=False) as view:
        for step, loss in ((1, 2.0), (2, 0.5)):
            view.show(Step(step, 10, 1, loss, 0.1, 1e-3, 100, 1234.5, 130.0))
        view.show_evaluation(EVALUATED)
    text = drawn.getvalue()
    assert "step 2/10  held-out loss 1.8700  (best)" in text
    for part in (
        "2/10",
        "loss 0.5000",
        "1.00e-03",
        "1,234 tokens/s",
        "about 2 minutes left",
        "█▁  2.000 → 0.500",
    ):
        assert part in text


def test_lines_show_an_evaluation_and_the_ends_of_its_prompts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console(file=io.StringIO())
    for as_json in (False, True):
        view_of(console, steps=10, done=0, as_json=as_json).show_evaluation(EVALUATED)
    first, sample, told = capsys.readouterr().out.splitlines()
    assert first == "step 2/10  held-out loss 1.8700  (best)"
    assert sample == f"  '…{'a' * 46}\\n?' → 'Ahoy'"
    assert json.loads(told) == {
        "step": 2,
        "steps": 10,
        "held_out_loss": 1.87,
        "is_best": True,
        "samples": EVALUATED.samples,
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (59, "less than a minute"),
        (60, "about 1 minute"),
        (90.5, "about 2 minutes"),
        (3600, "about 60 minutes"),
        (9000, "about 2.5 hours"),
    ],
)
def test_an_estimated_time_is_put_into_words(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
