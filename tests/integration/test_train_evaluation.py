"""Evaluation in ``tuneserve train``, against a real service and the embedded model."""

import io
import json
import os
import re
import shlex
import signal
import threading
import time
from types import SimpleNamespace

import datasets
import numpy as np
import peft
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from rich.console import Console

from tests import quick_service
from tests.support.command_line import called
from tuneserve_client import Client, next_token_datum, sft_datum
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.cli import evaluation, training_loop, training_run
from tuneserve_server.cli.local_server import LocalServer
from tuneserve_server.cli.train_recipe import Recipe
from tuneserve_server.cli.train_view import Lines, view_of
from tuneserve_server.cli.training_loop import TrainingLoop
from tuneserve_server.cli.verdict import Diverged, DivergenceWatch

KEY = "tml-evaluation"
NOUNS = ["grass", "snow", "coal", "a rose", "the sea", "a lemon", "a plum", "mud"]
QUICK = ["--batch-size", "4", "--rank", "4"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    os.environ["HF_HUB_OFFLINE"] = "1"
    with LocalServer(tmp_path_factory.mktemp("service"), **quick_service.QUICK) as running:
        yield running


@pytest.fixture(autouse=True)
def place(server, tmp_path_factory, tmp_path, monkeypatch):
    """The folder and the environment of the commands."""
    monkeypatch.setenv("TUNESERVE_URL", server.url)
    monkeypatch.setenv("TUNESERVE_API_KEY", KEY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def client(server):
    with Client(server.url, KEY) as made:
        yield made


def trained(*arguments, status=0):
    """The steps, the evaluations and the end of a run, as JSON."""
    return parts(called("train", *arguments, "--json", status=status).stdout)


def parts(output):
    *told, ended = map(json.loads, output.splitlines())
    evaluations = [each for each in told if "held_out_loss" in each]
    return [each for each in told if "loss" in each], evaluations, ended


def write(folder, name, rows):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answered(noun, answer):
    return {"prompt": f"What colour is {noun}?", "completion": f" Arr, {noun} be {answer}!"}


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path, "rows.jsonl", [answered(noun, "pirate, matey") for noun in NOUNS])


@pytest.fixture
def others(tmp_path):
    """Rows that begin as those of ``rows`` do, and end otherwise."""
    held = [answered("snow", "a kraken"), answered("a very old lemon", "a kraken of the sea")]
    return write(tmp_path, "others.jsonl", [*held, answered("mud", "rum")])


def examples(path):
    """The tokens of each row, and the place of the first one that is trained on."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_MODEL)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        yield [*prompt, *answer, tokenizer.eos_token_id], len(prompt)


def loss_in_torch(model, path):
    """The mean loss per token of the answers, by transformers and torch."""
    total, count = 0.0, 0
    for tokens, first in examples(path):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].double()
        each = torch.nn.functional.cross_entropy(
            logits[first - 1 : -1], torch.tensor(tokens[first:]), reduction="sum"
        )
        total, count = total + float(each), count + len(tokens) - first
    return total / count


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_the_held_out_loss_is_that_of_torch(rows, others, tmp_path, monkeypatch):
    """Before the first step it is the base model's, after the last one the exported adapter's."""
    monkeypatch.setattr(evaluation, "_ROWS", 1)  # of three rows of different lengths
    monkeypatch.setattr(evaluation, "_AT_ONCE", 1)
    _, told, _ = trained(
        *(rows, *QUICK, "--learning-rate", "0.01", "--eval-file", others, "--eval-every", 2),
        *("--export", tmp_path / "adapter"),
    )
    assert [each["step"] for each in told] == [0, 2]
    base = transformers.AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    assert told[0]["held_out_loss"] == pytest.approx(loss_in_torch(base, others), rel=1e-5)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert told[1]["held_out_loss"] == pytest.approx(loss_in_torch(adapted, others), rel=1e-5)


def test_evaluations_change_no_step(rows, others):
    options = [rows, *QUICK, "--learning-rate", "0.01", "--epochs", "3"]
    plain, none, _ = trained(*options)
    steps, told, _ = trained(*options, "--eval-file", others, "--eval-every", 1)
    assert none == [] and [each["step"] for each in told] == [0, 1, 2, 3, 4, 5, 6]
    for name in ("loss", "grad_norm"):
        assert [each[name] for each in steps] == [each[name] for each in plain]


def test_an_over_fitted_run_stops_early_and_keeps_its_best_checkpoint(rows, others, client):
    options = [rows, *QUICK, "--learning-rate", "0.01", "--epochs", "50", "--save", "fit"]
    options += ["--eval-file", others, "--eval-every", 1, "--patience", 3]
    steps, told, ended = trained(*options)
    losses = [each["held_out_loss"] for each in told]
    best = losses.index(min(losses))
    assert 0 < best == len(losses) - 4  # three evaluations after the best
    assert ended["steps_done"] == len(steps) == told[-1]["step"] < ended["steps"] == 100
    assert [each["step"] for each in told if each["is_best"]][-1] == best
    assert (ended["outcome"], ended["best_step"], ended["best_loss"]) == (
        "finished",
        best,
        losses[best],
    )
    assert re.search(
        r"improved from .* at step \d+, then rose from .*: over-fitting; the best "
        r"checkpoint is tinker://\S+/weights/fit-best",
        ended["verdict"],
    )
    names = [each.tinker_path for each in client.checkpoints(ended["checkpoint"].split("/")[2])]
    assert sorted(names) == [ended["checkpoint"], ended["best_checkpoint"]]
    tokenizer = client.tokenizer()
    data = [
        sft_datum(tokenizer, row["prompt"], row["completion"])
        for row in map(json.loads, others.read_text().splitlines())
    ]
    logprobs = client.load_model(ended["best_checkpoint"]).forward(data).result().logprobs
    weights = np.concatenate([each.inputs["weights"] for each in data])
    expected = -np.dot(np.concatenate(logprobs), weights) / weights.sum()
    assert ended["best_loss"] == pytest.approx(expected, rel=1e-6)
    refused = called("train", rows, "--resume", ended["checkpoint"], status=2).stderr
    assert "stopped after 3 evaluations without improvement; raise --patience, now 3" in refused


def test_a_resumed_run_holds_out_the_same_rows_and_evaluates_the_same(
    rows, monkeypatch, tmp_path, client
):
    options = [rows, *QUICK, "--learning-rate", "0.01", "--epochs", "4", "--eval-split", "0.3"]
    options += ["--eval-every", "3", "--sample-prompt", "Ahoy", "--sample-tokens", "3"]
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    options += ["--name", "held", "--export", out, "--force"]
    steps, told, ended = trained(*options)
    assert [each["step"] for each in told] == [0, 3, 6, 8]
    assert len(steps) == 8  # of two batches: six of eight rows
    show = Lines.show

    def interrupted(self, step):
        show(self, step)
        if step.step == 4:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Lines, "show", interrupted)
        patched.setattr(training_loop, "_AHEAD", 0)
        stopped = called("train", *options, "--json", status=130)
    before = [json.loads(line) for line in stopped.stdout.splitlines()]
    assert (before[-1]["steps_done"], before[-1]["outcome"]) == (4, "stopped")
    (command,) = re.findall(r"continue with: tuneserve train (.*)", stopped.stderr)
    resumed = called("train", *shlex.split(command), "--json")
    assert resumed.stderr == ""
    assert client.search_runs(sort="created", limit=1).training_runs[0].name == "held"
    later, told_later, ended_later = parts(resumed.stdout)
    assert [each["step"] for each in later] == [5, 6, 7, 8]
    both = [each for each in before if "loss" in each] + later
    assert [each["loss"] for each in both] == [each["loss"] for each in steps]
    both = [each for each in before if "held_out_loss" in each] + told_later
    assert both == told
    other = called(
        "train", rows, "--resume", ended["checkpoint"], "--eval-split", "0.5", "--dry-run"
    )
    assert "may have been trained on the rows that are now held out" in other.stderr
    assert "4 rows, 4 more held out" in other.stdout
    for name in ("verdict", "best_step", "best_loss", "outcome"):
        assert ended_later[name] == ended[name]


@pytest.mark.filterwarnings("ignore::Warning")
def test_splits_of_a_dataset_are_trained_on_and_held_out(rows, others, tmp_path, monkeypatch):
    """The losses are those of the same rows in two files, also of a run that was resumed."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    for name, path in (("train_sft", rows), ("test_sft", others)):
        table = pyarrow.Table.from_pylist([*map(json.loads, path.read_text().splitlines())])
        pyarrow.parquet.write_table(table, str(tmp_path / "set" / f"{name}.parquet"))
    (tmp_path / "set" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - {split: train_sft, path: train_sft.parquet}\n"
        "  - {split: test_sft, path: test_sft.parquet}\n"
        "- config_name: other\n  data_files: train_sft.parquet\n---\n"
    )
    options = [*QUICK, "--learning-rate", "0.01", "--epochs", "2", "--eval-every", "2"]
    steps, told, _ = trained(rows, *options, "--eval-file", others)
    part = ["--config", "main", "--split", "train_sft"]
    refused = called("train", "set", *part, "--eval-split", "train_sft", status=2).stderr
    assert "--eval-split train_sft is the split to train on" in refused
    show = Lines.show

    def interrupted(self, step):
        show(self, step)
        if step.step == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Lines, "show", interrupted)
        patched.setattr(training_loop, "_AHEAD", 0)
        command = ["train", "set", *part, *options, "--eval-split", "test_sft", "--json"]
        stopped = called(*command, status=130)
    (command,) = re.findall(r"continue with: tuneserve train (.*)", stopped.stderr)
    assert "--config main --split train_sft" in command
    before, told_before, _ = parts(stopped.stdout)
    later, told_later, _ = trained(*shlex.split(command))
    assert [each["loss"] for each in before + later] == [each["loss"] for each in steps]
    assert told_before + told_later == told


def test_samples_are_the_greedy_continuations_of_the_weights_of_that_step(rows, others, client):
    options = [rows, *QUICK, "--learning-rate", "0.01", "--epochs", "3", "--eval-file", others]
    _, told, ended = trained(*options, "--sample-tokens", "6")
    assert [each["prompt"] for each in told[-1]["samples"]] == [
        "What colour is snow?",
        "What colour is a very old lemon?",
    ]
    for weights, shown in ((None, told[0]), (ended["checkpoint"], told[-1])):
        sampler = client.sampler(weights)
        for each in shown["samples"]:
            drawn = sampler.sample(each["prompt"], max_tokens=6, temperature=0).result()
            assert each["completion"] == drawn.text
    assert told[0]["samples"] != told[-1]["samples"]
    *samples, _ = client.run_events(ended["checkpoint"].split("/")[2])
    assert [each.kind for each in samples] == ["samples"] * len(told)
    assert [(each.step, each.data["samples"]) for each in samples] == [
        (each["step"], each["samples"]) for each in told
    ]
    shown = called("train", *options, "--sample-prompt", "What colour is rum?").stdout
    assert re.search(
        r"^step 0/6  held-out loss \d\.\d{4}\n  'What colour is rum\?' → ", shown, re.M
    )
    assert re.search(r"^verdict: held-out loss improved from ", shown, re.M)
    assert "8 rows, 3 more held out, " in shown


@pytest.mark.parametrize("more", [[], ["--eval-split", "0.3"]], ids=["training", "held out"])
def test_a_far_too_large_learning_rate_ends_as_diverged(rows, client, more):
    options = [rows, *QUICK, "--learning-rate", "1e9", "--epochs", "4", *more]
    steps, _, ended = trained(*options, status=1)
    assert len(steps) < 8
    assert (ended["outcome"], ended["checkpoint"]) == ("diverged", None)
    said = called("train", *options, status=1).stderr
    assert re.search(
        r"^tuneserve: diverged at step \d: .*; lower the learning rate, for example "
        r"--learning-rate 0\.0002; nothing was saved$",
        said,
        re.M,
    )


def test_rows_that_the_model_finds_worse_than_a_guess_diverge_too(tmp_path):
    text = " ".join(chr(97 + 7 * n % 26) * 3 for n in range(20))
    rows = write(tmp_path, "odd.jsonl", [{"prompt": "?", "completion": text}] * 3)
    options = [rows, "--rank", "4", "--learning-rate", "1e9", "--epochs", "20"]
    steps, _, ended = trained(*options, status=1)
    assert steps[0]["loss"] > np.log(1024) and len(steps) < 20
    assert (ended["outcome"], ended["checkpoint"]) == ("diverged", None)


def test_a_gradient_that_the_server_finds_not_finite_ends_as_diverged(client):
    """Its weight overflows float32."""
    datum = next_token_datum([5, 6, 7], weights=[0, 3e38, 3e38])
    loop = TrainingLoop(
        client.create_model(rank=4), Recipe("digest"), [datum], 0, DivergenceWatch(1024)
    )
    view = view_of(Console(file=io.StringIO()), steps=1, done=0, as_json=False)
    with pytest.raises(Diverged, match="step 1: the loss or its gradient is not finite"):
        loop.go(view, threading.Event())


def test_the_server_knows_the_configuration_the_losses_and_the_outcome(rows, client):
    options = [rows, *QUICK, "--learning-rate", "0.01", "--eval-split", "0.3", "--seed", "5"]
    _, told, ended = trained(*options, "--epochs", "2", "--name", "known")
    run = client.run(ended["checkpoint"].split("/")[2])
    assert (run.name, run.state, run.step, run.steps) == ("known", "finished", 4, 4)
    assert run.held_out_loss == pytest.approx(told[-1]["held_out_loss"], rel=1e-6)
    assert run.best_step == ended["best_step"]
    assert run.best_held_out_loss == pytest.approx(ended["best_loss"], rel=1e-6)
    config = json.loads(run.user_metadata["config"])
    expected = {"data": str(rows), "rows": 6, "held_out_rows": 2, "epochs": 2, "batch_size": 4}
    expected |= {"learning_rate": 0.01, "seed": 5, "steps": 4, "eval_split": 0.3, "rank": 4}
    assert config.items() >= expected.items()
    verdict = client.run_events(run.training_run_id)[-1]
    assert (verdict.kind, verdict.step, verdict.data["verdict"]) == ("verdict", 4, ended["verdict"])
    assert verdict.data["best_checkpoint"] == ended["best_checkpoint"]
    shown = called("runs", "show", "known").stdout
    assert ended["verdict"] in shown and told[-1]["samples"][0]["completion"].strip() in shown
    assert f"{told[-1]['held_out_loss']:.4f}" in shown
    called("train", *options, "--learning-rate", "1e9", "--name", "lost", status=1)
    (lost,) = client.search_runs("lost").training_runs
    assert lost.state == "diverged"
    assert "lower the learning rate" in client.run_events(lost.training_run_id)[-1].data["verdict"]


def test_a_run_without_room_for_checkpoints_goes_on_and_says_so(rows, server, monkeypatch):
    """A tenant may keep one checkpoint, and has one until the run has ended."""
    monkeypatch.setenv("TUNESERVE_API_KEY", "tml-full")
    with Client(server.url, "tml-full") as full:
        model = full.create_model(rank=4)
        taken = model.save("taken").result()
        place = ["--data-dir", server.data_dir]
        tenant = full.run(model.id).model_owner
        called("tenants", "set", tenant, "--max-checkpoints", "1", *place)
        clock = SimpleNamespace(monotonic=time.monotonic)
        clock.sleep = lambda seconds: full.delete_checkpoint(taken)
        monkeypatch.setattr(training_run, "time", clock)
        options = [*QUICK, "--learning-rate", "0.01", "--eval-split", "0.3", "--json"]
        result = called("train", rows, *options)
    told = [json.loads(line) for line in result.stdout.splitlines()]
    evaluations = [each for each in told if "held_out_loss" in each]
    assert [each["is_best"] for each in evaluations] == [False, True, True]
    assert (told[-1]["best_checkpoint"], told[-1]["outcome"]) == (None, "finished")
    refused = r"cannot save the best checkpoint, of step \d+: you have 1 checkpoints"
    assert len(re.findall(refused, result.stderr)) == 2
    assert all(each["samples"] == [] for each in evaluations)
    assert result.stderr.count("cannot sample: you have 1 checkpoints") == 3


def test_a_run_with_json_output_names_columns_that_are_not_used(tmp_path):
    rows = write(tmp_path, "rows.jsonl", [{**answered("snow", "white"), "id": 7, "system": "Arr"}])
    said = called("train", rows, *QUICK, "--json").stderr
    assert said == "columns not used: id, system\n"


def test_without_evaluation_the_verdict_is_on_the_training_loss(rows):
    steps, _, ended = trained(rows, *QUICK, "--learning-rate", "0.01", "--epochs", "4")
    losses = [each["loss"] for each in steps]  # two steps an epoch
    first, last = sum(losses[:2]) / 2, sum(losses[-2:]) / 2
    told = f"training loss fell from {first:.4g} to {last:.4g}, epochs 1 and 4; "
    assert ended["verdict"].startswith(told)
    assert (ended["outcome"], ended["best_checkpoint"]) == ("finished", None)
    assert all(each["left_s"] >= 0 for each in steps[1:]) and steps[-1]["left_s"] == 0


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--eval-split", "1"], 2, "--eval-split is 1; it must be above 0 and below 1"),
        (["--eval-split", "0.1", "--eval-file", "rows.jsonl"], 2, "leave one out"),
        (["--eval-file", "nope.jsonl"], 2, "--eval-file: nope.jsonl does not exist"),
        (["--eval-file", "bad.jsonl"], 1, 'bad.jsonl line 1: there is no "completion"'),
        (["--eval-split", " "], 2, "--eval-split is empty"),
        (["--eval-split", "test"], 2, "is a file, which has no splits and no configurations"),
        (["--eval-split", "train"], 2, "--eval-split train is the split to train on"),
        (["--eval-split", "0.1", "--eval-config", "main"], 2, "--eval-config needs --eval-file"),
        (["--split", "train"], 2, "is a file, which has no splits"),
        (["--patience", "3"], 2, "--patience needs held-out rows: give --eval-split 0.05 or"),
        (["--sample-prompt", "Hi"], 2, "--sample-prompt needs held-out rows"),
    ],
)
def test_impossible_evaluations_are_refused_before_training(
    rows, client, tmp_path, options, status, words
):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n')
    before = len(client.runs())
    said = called("train", rows, *options, status=status).stderr
    assert words in said and said.count("\n") == 1
    assert len(client.runs()) == before
