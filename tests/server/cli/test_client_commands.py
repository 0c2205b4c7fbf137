"""The client commands, as far as they can be tested without a server."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from rich.console import Console
from typer.testing import CliRunner

from tuneserve_client.wire import types
from tuneserve_client.wire.tokenizer import Tokenizer
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.cli import main as cli
from tuneserve_server.cli.output import size, sparkline
from tuneserve_server.cli.runs import _loss
from tuneserve_server.cli.top import TopSample, TopWindow
from tuneserve_server.cli.train_recipe import Recipe
from tuneserve_server.cli.train_rows import BadRows, encode, read_rows
from tuneserve_server.cli.train_view import Step, view_of

TOKENIZER = Tokenizer.from_folder(TINY_MODEL)
FORGETFUL = (
    "{% for m in messages %}{{ m.role }}:"
    "{{ m.content if loop.last else m.content.split('|')[-1] }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A chat template that leaves out the thoughts before the last answer, as Qwen3's does."""


def file_of(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in rows)
    )
    return path


def learnt(datum: Any) -> str:
    targets = datum.targets[datum.inputs["weights"] > 0]
    return TOKENIZER.decode(targets.tolist(), skip_special=False)


def said(*texts: str) -> dict[str, Any]:
    """A conversation in which user and assistant take turns."""
    roles = ["user", "assistant"] * len(texts)
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]}


# --- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it is list; it must be an object"),
        ("[" * 200_000, "it is nested too deeply"),
        ({"prompt": "a"}, 'there is no "completion"'),
        ({"completion": "a"}, 'there is no "prompt"'),
        ({"prompt": 7, "completion": "a"}, '"prompt" is not a string'),
        ({"messages": "hello"}, '"messages" is not a list'),
        ({"messages": [{"role": "user"}]}, "message 1 needs a string"),
        (said("hello"), 'no message with the role "assistant"'),
    ],
)
def test_a_bad_row_is_named_by_its_line_and_reason(tmp_path: Path, row: Any, reason: str) -> None:
    good = {"prompt": "a", "completion": "b"}
    path = file_of(tmp_path, good, "", row, good, row)
    with pytest.raises(BadRows, match=r"rows.jsonl line 3: ") as refused:
        read_rows(path)
    assert reason in str(refused.value)
    assert "(and 1 other rows are bad)" in str(refused.value)


@pytest.mark.parametrize(
    "row", [{"prompt": "a", "completion": "\ud800 b"}, said("a\udfff", "b")], ids=["text", "chat"]
)
def test_half_of_a_surrogate_pair_is_a_bad_row(tmp_path: Path, row: Any) -> None:
    rows = read_rows(file_of(tmp_path, {"prompt": "a", "completion": "b"}, row))
    with pytest.raises(BadRows, match="line 2: the text has half of a surrogate pair"):
        encode(rows, TOKENIZER, limit=100, cut=False)


def test_bytes_that_are_not_utf8_are_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(BadRows, match="line 1: it is not UTF-8"):
        read_rows(path)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRows, match="has no rows"):
        read_rows(file_of(tmp_path, "", " "))


def test_only_answers_are_learnt(tmp_path: Path) -> None:
    rows = read_rows(
        file_of(
            tmp_path,
            {"prompt": "The sky is", "completion": " blue."},
            said("Hello", "Ahoy!", "And you?", "Arr."),
        )
    )
    text, chat = encode(rows, TOKENIZER, limit=100, cut=False)
    end = TOKENIZER.decode([TOKENIZER.eos_token_id or 0], skip_special=False)
    assert learnt(text) == f" blue.{end}"
    assert learnt(chat) == f"Ahoy!{end}Arr.{end}"


def test_if_the_template_rewrites_past_answers_each_answer_gets_its_own_datum(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer((TINY_MODEL / "tokenizer.json").read_text(), template=FORGETFUL)
    rows = read_rows(file_of(tmp_path, said("Hi", "hm|Ahoy", "And?", "so|Arr")))
    first, second = encode(rows, tokenizer, limit=100, cut=False)
    assert learnt(first).startswith("hm|Ahoy")
    assert learnt(second).startswith("so|Arr")
    assert "hm" not in tokenizer.decode(second.tokens.tolist())


def test_a_row_that_is_too_long_is_refused_or_cut(tmp_path: Path) -> None:
    rows = read_rows(file_of(tmp_path, {"prompt": "The sky is", "completion": " blue." * 50}))
    with pytest.raises(BadRows, match=r"line 1: it has \d+ tokens, and at most 20 fit"):
        encode(rows, TOKENIZER, limit=20, cut=False)
    (whole,) = encode(rows, TOKENIZER, limit=1000, cut=False)
    (cut,) = encode(rows, TOKENIZER, limit=20, cut=True)
    assert len(cut) == 20
    np.testing.assert_array_equal(cut.targets, whole.targets[:20])
    with pytest.raises(BadRows, match="line 1: there is nothing to learn"):
        encode(rows, TOKENIZER, limit=2, cut=True)


# --- the recipe -----------------------------------------------------------------------------------


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


# --- on the screen --------------------------------------------------------------------------------


def test_a_sparkline_shows_means_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 2, 8, 8, 1, 1], 3) == "▁█▁"
    assert sparkline([5, 5], 4) == "▁▁"
    assert sparkline([], 4) == ""


def test_sizes_are_shown_in_units_of_1024() -> None:
    assert [size(each) for each in (None, 5, 2048, 3 * 2**20, 5 * 2**29)] == [
        "-",
        "5 B",
        "2 KiB",
        "3 MiB",
        "2.5 GiB",
    ]


def test_a_terminal_shows_a_bar_and_the_curve() -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=120)
    with view_of(console, steps=10, done=0, as_json=False) as view:
        for step, loss in ((1, 2.0), (2, 0.5)):
            view.show(Step(step, 10, 1, loss, 0.1, 1e-3, 100, 1234.5))
    text = drawn.getvalue()
    for part in ("2/10", "loss 0.5000", "1.00e-03", "1,234 tokens/s", "█▁  2.000 → 0.500"):
        assert part in text


def test_rates_are_means_over_the_last_twenty_seconds() -> None:
    watch = TopWindow()

    def at(second: float, busy_s: float, tokens: float) -> dict[str, Any]:
        told = {"device_seconds_total": busy_s, "tokens_trained_total": tokens}
        watch.add_counters(TopSample(second, {}, {}, {("tiny", ""): told}))
        (worker,) = watch.facts()["workers"]
        return dict(worker)

    assert at(100, 50, 1000)["device_busy"] is None
    assert at(110, 55, 1300)["trained_tokens_per_s"] == pytest.approx(30)
    assert at(120, 65, 1300)["device_busy"] == pytest.approx(15 / 20)
    assert at(130, 75, 1300)["device_busy"] == pytest.approx(20 / 20)  # since 110
    assert at(131, 1, 0)["device_busy"] is None  # another process under the same name


# --- wrong arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["runs", "--url", "localhost:8410"], "must begin with http"),
        (["checkpoints", "ttl", "tinker://a/weights/b", "soon"], "a whole number, or none"),
        (["train", "rows.jsonl", "--resume", "tinker://a/weights/b", "--rank", "4"], "--resume"),
        (["train", "rows.jsonl", "--resume", "tinker://a/weights/b", "--form", "core"], "--resume"),
        (["train", "rows.jsonl", "--export", "."], "is not empty"),
    ],
)
def test_a_wrong_argument_is_explained_in_one_line(
    arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_of(tmp_path, {"prompt": "a", "completion": "b"})
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(cli.app, arguments)
    assert ran.exit_code == 2
    assert reason in ran.stderr
    assert ran.stderr.startswith("tuneserve: ") and ran.stderr.count("\n") == 1


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    ran = CliRunner().invoke(cli.app, ["train", str(tmp_path / "none.jsonl")])
    assert ran.exit_code == 2
    assert "does not exist" in ran.stderr


@pytest.mark.parametrize(
    ("loss_sum", "weight", "tokens", "mean"),
    [(200.0, 100.0, 400, 2.0), (-30.0, 0.0, 1000, -0.03), (-30.0, None, 1000, -0.03)],
)
def test_a_runs_loss_is_the_mean_over_weights_or_else_over_tokens(
    loss_sum: float, weight: float | None, tokens: int, mean: float
) -> None:
    point = types.CurvePointResponse(
        kind="forward_backward",
        seq_id=1,
        time=datetime.now(UTC),
        loss_sum=loss_sum,
        weight=weight,
        tokens=tokens,
    )
    assert _loss(point) == mean


def leaves(command: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command without subcommands."""
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from leaves(each, *names, name)
    else:
        yield names, command


def test_every_command_but_those_that_print_a_log_can_print_json() -> None:
    without = {
        names
        for names, command in leaves(typer.main.get_command(cli.app))
        if "--json" not in [option for each in command.params for option in each.opts]
    }
    assert without == {("up",), ("api",), ("worker",)}
