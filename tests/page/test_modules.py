"""The dashboard's modules without a view: curves, answers, addresses and conversations.

Each runs in the browser as the page loads it. The expected values are worked by hand.
"""

import csv
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.page.stage import open_api
from tuneserve_engine.core.usage import stride

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_api(tmp_path_factory.mktemp("api")) as url:
        found = browser.new_page()
        found.goto(f"{url}/page/")
        yield found
        found.close()


@pytest.fixture
def call(page: Page) -> Call:
    """Calls a function of a module of the page with JSON arguments."""

    def call_function(module: str, name: str, *arguments: Any) -> Any:
        return page.evaluate(
            "async ([module, name, given]) => "
            "(await import(new URL(module, location.origin + '/page/')))[name](...given)",
            [module, name, list(arguments)],
        )

    return call_function


def at(second: float) -> str:
    return f"2026-01-01T00:{int(second) // 60:02}:{int(second) % 60:02}Z"


def step(number: int, second: float, *, loss: float, tokens: int = 100) -> list[dict[str, Any]]:
    """The points of a step whose loss is a mean over half of its tokens."""
    weight = tokens / 2
    return [
        {
            "kind": "forward_backward",
            "time": at(second),
            "loss_sum": loss * weight,
            "tokens": tokens,
            "weight": weight,
        },
        {
            "kind": "optim_step",
            "time": at(second),
            "step": number,
            "learning_rate": 0.1,
            "grad_norm": 1.5,
        },
    ]


def held_out(second: float, loss_sum: float, weight: float) -> dict[str, Any]:
    return {
        "kind": "forward",
        "time": at(second),
        "loss_sum": loss_sum,
        "tokens": 10,
        "weight": weight,
    }


# --- curves ---------------------------------------------------------------------------------------


def test_rows_hold_the_loss_the_tokens_and_the_rates_of_each_step(call: Call) -> None:
    points = [*step(1, 10, loss=4), *step(2, 12, loss=3, tokens=300)]
    first, second = call("series.js", "rowsFrom", points)
    assert (first["step"], first["loss"], first["tokens"]) == (1, 4, 100)
    assert (first["step_time_s"], first["tokens_per_s"]) == (None, None)
    assert (second["loss"], second["tokens"]) == (3, 400)
    assert (second["step_time_s"], second["tokens_per_s"]) == (2, 150)
    assert (second["learning_rate"], second["grad_norm"]) == (0.1, 1.5)


def test_a_held_out_loss_belongs_to_the_step_before_it(call: Call) -> None:
    points = [
        held_out(0, 50, 10),
        *step(1, 10, loss=4),
        held_out(11, 30, 10),
        held_out(12, 10, 10),
        *step(2, 20, loss=3),
    ]
    rows = call("series.js", "rowsFrom", points)
    found = [(row["step"], row["held_out_loss"]) for row in rows]
    assert found == [(0, 5), (1, 2), (2, None)]  # (30 + 10) / (10 + 10)


def test_an_evaluation_before_the_first_step_of_a_resumed_run_is_of_the_step_before(
    call: Call,
) -> None:
    points = [held_out(0, 50, 10), *step(51, 100, loss=4), *step(52, 102, loss=3)]
    rows = call("series.js", "rowsFrom", points)
    assert [(row["step"], row["held_out_loss"]) for row in rows] == [
        (50, 5),
        (51, None),
        (52, None),
    ]
    assert [row["step_time_s"] for row in rows] == [None, None, 2]
    assert [row["tokens"] for row in rows] == [0, 100, 200]
    assert call("answers.js", "leftS", rows, 54, 102) == 4  # two steps of 2 s
    assert call("answers.js", "leftS", rows[:2], 54, 102) is None
    assert call("series.js", "rowsFrom", points[:1])[0]["step"] == 0


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([{"loss_sum": 30, "weight": 10, "tokens": 20}], 2.5),  # (20 + 30) / (10 + 10)
        ([{"loss_sum": 60, "weight": 0, "tokens": 30}], 2),  # (20 + 60) / (10 + 30)
        ([{"loss_sum": 60, "weight": None, "tokens": 30}], 2),
        ([{"loss_sum": 0, "weight": 0, "tokens": 30}], 2),  # 20 / 10
        ([{"loss_sum": 0, "weight": 10, "tokens": 30}], 1),  # 20 / (10 + 10)
    ],
)
def test_each_gradient_counts_by_its_weight_else_by_its_tokens(
    call: Call, others: list[dict[str, Any]], expected: float
) -> None:
    gradient = {"kind": "forward_backward", "time": at(1), "loss_sum": 20, "weight": 10}
    points = [*(gradient | each for each in ({}, *others)), step(1, 2, loss=1)[1]]
    assert call("series.js", "rowsFrom", points)[0]["loss"] == expected


def test_a_step_whose_gradients_have_neither_weight_nor_loss_has_no_loss(call: Call) -> None:
    points = [*step(1, 10, loss=4), *step(2, 12, loss=0)]
    points[2]["weight"] = 0
    assert [row["loss"] for row in call("series.js", "rowsFrom", points)] == [4, None]


def thinned(steps: int, gradients: int, forwards: int = 0) -> list[dict[str, Any]]:
    """The kept points of steps with so many requests each; a gradient has 100 tokens."""
    points: list[dict[str, Any]] = []
    for number in range(1, steps + 1):
        gradient, stepped = step(number, 0, loss=4)
        told = [gradient] * gradients + [stepped] + [held_out(0, 10, 10)] * forwards
        points += [dict(each) for each in told]
    for place, each in enumerate(points):
        each["seq_id"] = place
    kept: list[dict[str, Any]] = []
    for kind in ("forward_backward", "forward", "optim_step"):
        own = [each for each in points if each["kind"] == kind]
        kept += own[:: stride(len(own) - 1)] if own else []
    return sorted(kept, key=lambda each: int(each["seq_id"]))


@pytest.mark.parametrize(
    ("steps", "gradients", "forwards"),
    [
        (2000, 1, 0),  # all points are kept
        (3000, 1, 0),
        (3000, 1, 1),
        (3000, 4, 0),
        (1500, 8, 0),  # only gradients are left out
        (300, 10, 0),
        (400, 4, 8),  # gradients and evaluations are
        (1000, 1, 8),  # only evaluations are
    ],
)
def test_tokens_of_a_thinned_curve_are_those_of_all_gradients(
    call: Call, steps: int, gradients: int, forwards: int
) -> None:
    rows = call("series.js", "rowsFrom", thinned(steps, gradients, forwards))
    found = [row["tokens"] / (100 * gradients * row["step"]) for row in rows]
    assert found == pytest.approx([1] * len(rows), rel=0.01)


def test_a_step_loaded_from_a_checkpoint_is_no_gap_of_a_thinned_curve(call: Call) -> None:
    points = [*step(1, 0, loss=4), *step(50, 10, loss=3), *step(51, 20, loss=2)]
    points = [each | {"seq_id": place} for place, each in enumerate(points)]
    assert [row["tokens"] for row in call("series.js", "rowsFrom", points)] == [100, 200, 300]


def test_a_step_that_counts_from_1_again_goes_on(call: Call) -> None:
    points = [*step(7, 0, loss=4), *step(1, 1, loss=3), *step(2, 2, loss=2)]
    assert [row["step"] for row in call("series.js", "rowsFrom", points)] == [7, 8, 9]


@pytest.mark.parametrize(
    ("axis", "places"), [("step", [1, 2]), ("tokens", [100, 400]), ("time", [0, 2])]
)
def test_a_column_is_placed_by_step_tokens_or_time(
    call: Call, axis: str, places: list[float]
) -> None:
    points = [*step(1, 10, loss=4), *step(2, 12, loss=3, tokens=300)]
    rows = call("series.js", "rowsFrom", points)
    assert call("series.js", "pointsFrom", rows, "loss", axis) == [
        [place, loss] for place, loss in zip(places, (4, 3), strict=True)
    ]


def test_smoothing_is_a_mean_that_forgets(call: Call) -> None:
    points = [[1, 8], [2, 2], [3, 2]]
    assert call("series.js", "smoothed", points, 0) == points
    found = call("series.js", "smoothed", points, 0.5)
    # Weights 1/2, 1/4 and 1/8 from the newest back, divided by their sum.
    assert [y for _, y in found] == pytest.approx([8, 4, 20 / 7])


def test_the_csv_has_each_step_of_each_run_and_no_formulas(call: Call) -> None:
    rows = call("series.js", "rowsFrom", [*step(1, 10, loss=4), *step(2, 12, loss=3)])
    names = ['=HYPERLINK("x")', 'a "b", c']
    text = call("series.js", "csvOf", [[name, rows] for name in names])
    table = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [(row["run"], row["step"], row["loss"]) for row in table] == [
        ("'" + names[0], "1", "4"),
        ("'" + names[0], "2", "3"),
        (names[1], "1", "4"),
        (names[1], "2", "3"),
    ]
    assert table[1]["time"] == "2026-01-01T00:00:12.000Z"
    assert (table[0]["held_out_loss"], table[1]["step_time_s"]) == ("", "2")


def test_a_point_is_marked_only_while_it_is_the_only_one(page: Page) -> None:
    marked = page.evaluate(
        """async () => {
            const { Chart } = await import(new URL("chart.js", location.origin + "/page/"));
            const place = document.body.appendChild(document.createElement("div"));
            place.style.width = place.style.height = "200px";
            const chart = new Chart(place, { format: String });
            return [1, 2].map(count => {
                const points = Array.from({ length: count }, (_, index) => [index, index]);
                chart.show([{ id: "a", name: "a", colour: "--line-1", dash: [], points }]);
                return chart.plot.series[1].points.show(chart.plot, 1);
            });
        }"""
    )
    assert marked == [True, False]


# --- answers --------------------------------------------------------------------------------------


def rows_with(column: str, values: list[float]) -> list[dict[str, Any]]:
    return [{"step": 10 * (n + 1), "time_s": 20.0 * n, column: v} for n, v in enumerate(values)]


@pytest.mark.parametrize(
    ("column", "values", "word"),
    [
        ("held_out_loss", [2.0, 1.5, 1.0], "Improving"),
        ("held_out_loss", [2.0, 1.0, 1.5], "Overfitting since step 20"),
        ("held_out_loss", [1.0, 1.5, 2.0], "Getting worse"),
        ("held_out_loss", [2.0, 1.99, 1.995], "Flat"),
        ("held_out_loss", [1.0, 0.995, 1.006], "Flat"),
        ("held_out_loss", [1.0, 0.995, 1.02], "Getting worse"),
        ("held_out_loss", [1.0, 0.98, 1.02], "Overfitting since step 20"),
        ("held_out_loss", [1.0, 0.98, 0.985], "Improving"),
        ("held_out_loss", [2.0], "First measurement"),
        ("loss", [2.0, 1.5, 1.0], "Improving"),
        ("loss", [1.0, 1.5, 2.0], "Getting worse"),
        ("loss", [], "Not known yet"),
    ],
)
def test_a_run_is_judged_by_its_held_out_loss_else_by_its_loss(
    call: Call, column: str, values: list[float], word: str
) -> None:
    found = call("answers.js", "isGood", {"state": "running"}, rows_with(column, values), None)
    assert found["word"] == word
    is_hinted = "--eval-split" in found["note"]
    assert is_hinted == (column == "loss" and bool(values))


def test_a_verdict_and_a_divergence_come_first(call: Call) -> None:
    rows = rows_with("held_out_loss", [2.0, 1.0])
    verdict = {"verdict": "improved by 50 %, best at step 20"}
    running = call("answers.js", "isGood", {"state": "finished"}, rows, verdict)
    assert (running["word"], running["note"]) == ("Improving", verdict["verdict"])
    diverged = call("answers.js", "isGood", {"state": "diverged", "loss": 40.0}, rows, None)
    assert (diverged["word"], diverged["number"]) == ("Diverged", "40.0000")


def test_the_time_left_follows_the_rate_of_the_last_steps(call: Call) -> None:
    rows = rows_with("loss", [3.0, 2.0, 1.0])  # steps 10, 20, 30 at 0, 20 and 40 s
    assert call("answers.js", "leftS", rows, 50, 40) == 40  # 20 steps of 2 s
    assert call("answers.js", "leftS", rows, 50, 41) == 39
    assert call("answers.js", "leftS", rows, 30, 40) == 0
    assert call("answers.js", "leftS", rows, None, 40) is None
    assert call("answers.js", "leftS", rows[:1], 50, 40) is None
    assert call("answers.js", "leftS", rows, 50, 99) == 38
    assert call("answers.js", "leftS", rows, 50, 101) is None  # nothing for a minute
    slow = [row | {"time_s": 10 * row["time_s"]} for row in rows]  # 20 s a step, until 400 s
    assert call("answers.js", "leftS", slow, 50, 799) == 380
    assert call("answers.js", "leftS", slow, 50, 801) is None  # nothing for 20 steps


def test_an_unfinished_run_tells_its_share_and_an_ended_one_when(call: Call) -> None:
    rows = rows_with("loss", [3.0, 2.0])
    run = {"state": "running", "step": 20, "steps": 80, "duration_s": 20}
    found = call("answers.js", "isDone", run, rows, 20)
    assert (found["number"], found["share"]) == ("in 2 min", 0.25)
    assert "step 20 of 80" in found["note"]
    killed = call("answers.js", "isDone", run, rows, 110)
    assert (killed["number"], killed["share"]) == ("not known", 0.25)
    assert killed["note"].endswith("no step for 1 min 30 s")
    ended = call("answers.js", "isDone", run | {"state": "stopped"}, rows, 20)
    assert (ended["word"], ended["share"]) == ("stopped", None)


def test_the_cost_is_device_time_and_tokens(call: Call) -> None:
    found = call("answers.js", "whatCost", {"device_s": 90, "tokens": 45_000})
    assert found["number"] == "1 min 30 s"
    assert found["word"] == "of device time, without samples"
    tokens = "45.0 k tokens in gradients and forward passes"
    assert found["note"] == f"{tokens} · 500 tokens per device second"


# --- addresses and conversations ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "run", "query"),
    [
        ("overview", "", {}),
        ("runs", "", {"q": "a&b=ü #1", "sort": "loss", "page": "3"}),
        ("runs", "s-0:train:1", {"x": "time", "from": "1.5"}),
        ("compare", "", {"runs": "s-0:train:1,s-1:train:0"}),
    ],
)
def test_an_address_keeps_its_state(call: Call, view: str, run: str, query: dict[str, str]) -> None:
    written = call("route.js", "format", view, run, query)
    assert call("route.js", "parse", written) == {"view": view, "id": run, "query": query}


def test_an_unknown_address_opens_the_overview_and_an_anchor_nothing(call: Call) -> None:
    assert call("route.js", "parse", "#/nothing?q=1")["view"] == "overview"
    assert call("route.js", "parse", "#/runs/%zz")["id"] == "%zz"
    assert call("route.js", "parse", "#main") is None


def test_each_model_sees_the_system_prompt_and_its_own_answers(call: Call) -> None:
    turns = [
        {"user": "Hi", "answers": {"chosen": "Ahoy", "base": "Hello"}},
        {"user": "Failed", "answers": {}},
        {"user": "Bye", "answers": {}},
    ]
    settings = {"model": "m", "isChat": True, "system": "Be short.", "maxTokens": 5}
    path, body = call("conversation.js", "requestOf", turns, "base", settings)
    assert (path, body["max_tokens"]) == ("v1/chat/completions", 5)
    assert body["separate_reasoning"] is False, "answers are shown as they were drawn"
    assert [(each["role"], each["content"]) for each in body["messages"]] == [
        ("system", "Be short."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Bye"),
    ]
    path, body = call("conversation.js", "requestOf", turns, "chosen", settings | {"isChat": False})
    assert (path, body["prompt"]) == ("v1/completions", "Bye")


def test_samples_are_grouped_by_prompt_with_the_newest_first(call: Call) -> None:
    def samples(number: int, **completions: str) -> dict[str, Any]:
        told = [{"prompt": prompt, "completion": text} for prompt, text in completions.items()]
        return {"kind": "samples", "step": number, "data": {"samples": told}}

    events = [
        samples(10, a="one", b="x"),
        {"kind": "note", "step": 11, "data": {"text": "?"}},
        samples(20, a="two"),
    ]
    assert call("run_parts.js", "byPrompt", events) == [
        {
            "prompt": "a",
            "samples": [{"step": 20, "completion": "two"}, {"step": 10, "completion": "one"}],
        },
        {"prompt": "b", "samples": [{"step": 10, "completion": "x"}]},
    ]
