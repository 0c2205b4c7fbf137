"""The commands about runs, against the real processes and the embedded model."""

import csv
import json
import math
import os

import numpy as np
import pytest

from tests import quick_service
from tests.support.command_line import tuneserve
from tuneserve_client import Client, next_token_datum
from tuneserve_server.cli.local_server import LocalServer

KEY = "tml-runs"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    os.environ["HF_HUB_OFFLINE"] = "1"
    with LocalServer(tmp_path_factory.mktemp("service"), **quick_service.QUICK) as running:
        yield running


@pytest.fixture(autouse=True)
def place(server, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNESERVE_URL", server.url)
    monkeypatch.setenv("TUNESERVE_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)


def facts(*arguments):
    return json.loads(tuneserve(*arguments, "--json"))


def mean_nll(outputs, datums):
    """The mean loss, from the logprobs that the server returned."""
    weights = np.concatenate([each.inputs["weights"] for each in datums])
    return float(-(np.concatenate(outputs) * weights).sum() / weights.sum())


@pytest.fixture(scope="module")
def looped(server):
    """A run of two steps with an evaluation before, between and behind them: its id and losses."""
    with Client(server.url, KEY, name="notebook") as client:
        config = json.dumps({"steps": 2, "learning_rate": 0.01, "data": "made up"})
        model = client.create_model(rank=4, seed=1, name="first", user_metadata={"config": config})
        train = [next_token_datum([3, 4, 5, 6, 7]), next_token_datum([8, 9, 10])]
        held_out = [next_token_datum([5, 6, 7, 8]), next_token_datum([20, 30])]
        evaluations, losses = [], []
        for step in range(3):
            told = model.forward(held_out).result()
            evaluations.append(mean_nll(told.logprobs, held_out))
            if step < 2:
                trained = model.forward_backward(train).result()
                losses.append(mean_nll(trained.logprobs, train))
                model.optim_step(0.01).result()
        samples = [{"prompt": "a", "completion": "b\nc"}]
        client.add_run_event(model.id, "samples", 2, {"samples": samples})
        client.add_run_event(model.id, "verdict", 2, {"verdict": "held-out loss improved"})
        client.update_run(model.id, {"outcome": "finished"})
        path = model.save("kept").result()
        yield model.id, losses, evaluations, path


def test_show_tells_losses_configuration_verdict_and_samples(looped):
    run_id, losses, evaluations, path = looped
    told = facts("runs", "show", "first")
    assert told["run"]["training_run_id"] == run_id
    assert told["run"]["state"] == "finished"
    assert (told["run"]["step"], told["run"]["steps"]) == (2, 2)
    assert told["last_loss"] == pytest.approx(losses[-1], rel=1e-6)
    assert told["held_out_loss"] == pytest.approx(evaluations[-1], rel=1e-6)
    assert told["best_held_out_loss"] == pytest.approx(min(evaluations), rel=1e-6)
    assert told["best_step"] == int(np.argmin(evaluations))
    assert told["config"]["data"] == "made up"
    assert [each["kind"] for each in told["events"]] == ["samples", "verdict"]
    shown = tuneserve("runs", "show", "first")
    for text in (
        *("state          finished", "step           2 of 2", "learning_rate = 0.01"),
        *("held-out loss improved", r"'a' -> 'b\nc'", path, f"{evaluations[-1]:.4f}"),
    ):
        assert text in shown


def test_the_curve_is_written_as_csv(looped, tmp_path):
    run_id, losses, evaluations, _ = looped
    tuneserve("runs", "curve", run_id, "--csv", tmp_path / "curve.csv")
    rows = list(csv.DictReader((tmp_path / "curve.csv").read_text().splitlines()))
    assert [each["step"] for each in rows] == ["0", "1", "2"]
    held_out = [float(each["held_out_loss"]) for each in rows]
    assert held_out == pytest.approx(evaluations, rel=1e-6)
    assert [float(each["loss"]) for each in rows[1:]] == pytest.approx(losses, rel=1e-6)
    assert all(math.isfinite(float(each["grad_norm"])) for each in rows[1:])
    assert tuneserve("runs", "curve", run_id) == (tmp_path / "curve.csv").read_text()


def test_runs_are_found_by_tag_text_and_state_and_archived(server):
    with Client(server.url, KEY) as client:
        ids = [client.create_model(rank=4, name=name).id for name in ("red fox", "red hen")]
        tuneserve("runs", "tag", "red fox", "animal,quick", "canine")
        tuneserve("runs", "tag", "red fox", "quick", "--remove")
        tuneserve("runs", "note", "red fox", "jumps over")
        assert client.run(ids[0]).user_metadata["tags"] == "animal,canine"
        for options in (["--tag", "animal"], ["--search", "JUMPS"], ["--search", "fox"]):
            assert [each["training_run_id"] for each in facts("runs", *options)] == ids[:1]
        by_name = ["runs", "list", "--search", "red", "--sort", "name", "--state", "running"]
        names = [[each["name"] for each in facts(*by_name, *more)] for more in ([], ["--reverse"])]
        assert names == [["red fox", "red hen"], ["red hen", "red fox"]]
        assert facts("runs", "--search", "red", "--state", "failed") == []
        tuneserve("runs", "archive", "red hen")
        assert [each["name"] for each in facts("runs", "--search", "red")] == ["red fox"]
        assert len(facts("runs", "--search", "red", "--archived")) == 2
        tuneserve("runs", "archive", "red hen", "--undo")
        tuneserve("runs", "rename", "red hen", "old hen")
        assert {each["name"] for each in facts("runs", "--tag", "animal")} == {"red fox"}
        assert [each["name"] for each in facts("runs", "--search", "old hen")] == ["old hen"]
        (row,) = [line for line in tuneserve("runs").splitlines() if ids[0] in line]
        assert row.startswith("red fox") and " running " in row


def test_a_comparison_shows_what_differs(server, looped):
    with Client(server.url, KEY) as client:
        config = json.dumps({"steps": 2, "learning_rate": 0.5, "data": "made up"})
        client.create_model(rank=8, name="second", user_metadata={"config": config})
        shown = tuneserve("runs", "compare", "first", "second").splitlines()
        assert shown[0].split() == ["first", "second"]
        rows = {line.split("  ")[0]: line for line in shown[1:]}
        assert rows["learning_rate"].split()[1:] == ["0.01", "0.5"]
        assert rows["state"].split()[1:] == ["finished", "running"]
        assert "data" not in rows and "of rank 8" in rows["base model"]
        told = facts("runs", "compare", "first", "second")
        assert [each["run"]["name"] for each in told] == ["first", "second"]
    assert "two runs or more" in tuneserve("runs", "compare", "first", status=2)


def test_an_unknown_run_or_figure_is_named(looped):
    assert "no run has the name 'third'" in tuneserve("runs", "note", "third", "x", status=1)
    assert "'size' is not one of" in tuneserve("runs", "--sort", "size", status=2)
