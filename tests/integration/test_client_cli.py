"""The client commands, against the real processes and the embedded model."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
import transformers
from typer.testing import CliRunner

from tests import quick_service
from tests.support.command_line import tuneserve
from tuneserve_client import Client, next_token_datum
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.cli import main as cli
from tuneserve_server.cli import training_loop, training_run
from tuneserve_server.cli.local_server import LocalServer, free_port
from tuneserve_server.cli.train_view import Lines

ROOT = Path(__file__).parents[2]
KEY = "tml-command-line"
NOUNS = ["grass", "snow", "coal", "a rose", "the sea", "a lemon", "a plum", "mud"]
QUESTION = "What colour is the sky?"
QUICK = ["--batch-size", "4", "--learning-rate", "0.01", "--rank", "4"]


def ids(runs):
    """Their other figures may change with time."""
    return [each.training_run_id for each in runs]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Workers report metrics every third of the lease.
    quick = quick_service.QUICK | {"lease_ttl_s": "1"}
    with LocalServer(tmp_path_factory.mktemp("service"), **quick) as running:
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


def facts(*arguments, **options):
    return json.loads(tuneserve(*arguments, "--json", **options))


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def write_rows(folder):
    """Rows of both kinds, eight in all."""
    rows = []
    for number, noun in enumerate(NOUNS):
        asked, answer = f"What colour is {noun}?", f"Arr, {noun} be pirate, matey!"
        said = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        row = {"messages": said} if number % 2 else {"prompt": asked, "completion": f" {answer}"}
        rows.append(json.dumps(row))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(rows) + "\n\n")
    return path


@pytest.fixture(scope="module")
def trained(server, tmp_path_factory):
    """The output of a whole run, the path of its adapter, and the folder with its data."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_rows(folder)
    place = ["--url", server.url, "--api-key", KEY]
    output = tuneserve(
        *("train", data, *QUICK, "--epochs", "4", "--save", "pirate"),
        *("--export", folder / "adapter", "--json", *place),
    )
    *steps, ended = lines(output)
    return steps, ended["checkpoint"], folder


def test_training_lowers_the_loss_step_by_step(trained):
    steps, path, _ = trained
    assert [each["step"] for each in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [each["epoch"] for each in steps] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert {each["steps"] for each in steps} == {8}
    rates = [0.01 * left / 8 for left in (8, 7, 6, 5, 4, 3, 2, 1)]
    assert [each["learning_rate"] for each in steps] == pytest.approx(rates)
    losses = [each["loss"] for each in steps]
    assert losses[0] > 1
    assert losses[-1] < losses[0] / 3
    assert all(each["tokens_per_s"] > 0 and each["grad_norm"] > 0 for each in steps)
    assert path.startswith("tinker://") and path.endswith("/weights/pirate")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_exported_adapter_computes_the_same_in_peft_as_on_the_server(trained, client, tmp_path):
    _, path, folder = trained
    before = ids(client.runs()), client.checkpoints()
    told = facts("checkpoints", "export", path, tmp_path / "again")
    assert (ids(client.runs()), client.checkpoints()) == before
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(told["files"])
    tokens = list(range(5, 25))
    model = client.load_model(path)
    (ours,) = model.forward([next_token_datum(tokens)]).result().logprobs
    for adapter in (folder / "adapter", tmp_path / "again"):
        base = transformers.AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
        loaded = peft.PeftModel.from_pretrained(base, adapter)
        with torch.no_grad():
            logits = loaded(torch.tensor([tokens])).logits[0].log_softmax(-1)
        np.testing.assert_allclose(ours, logits[range(19), tokens[1:]].numpy(), atol=3e-5)
    refused = tuneserve("checkpoints", "export", path, tmp_path / "again", status=2)
    assert "is not empty" in refused


def test_a_merged_model_computes_the_same_as_the_server(trained, client, tmp_path):
    _, path, _ = trained
    before = ids(client.runs()), client.checkpoints()
    told = facts("checkpoints", "merge", path, tmp_path / "model")
    assert (ids(client.runs()), client.checkpoints()) == before
    assert told["base"] == str(TINY_MODEL)
    tokens = list(range(5, 25))
    (ours,) = client.load_model(path).forward([next_token_datum(tokens)]).result().logprobs
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    np.testing.assert_allclose(ours, logits[range(19), tokens[1:]].numpy(), atol=3e-5)
    said = tuneserve("checkpoints", "merge", path, tmp_path / "b", "--base", "./no", status=1)
    assert "no such directory" in said and said.count("\n") == 1


def test_an_interrupted_run_continues_as_if_it_had_not_been_interrupted(trained, monkeypatch):
    whole, _, folder = trained
    show = Lines.show

    def interrupted(self, step):
        show(self, step)
        if step.step == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Lines, "show", interrupted)
        ran = CliRunner().invoke(
            cli.app, ["train", str(folder / "rows.jsonl"), *QUICK, "--epochs", "4", "--json"]
        )
    assert ran.exit_code == 130, ran.output
    *before, saved = lines(ran.stdout)
    assert 2 < saved["steps_done"] == len(before) < 8
    (command,) = re.findall(r"continue with: tuneserve (.*)", ran.stderr)
    *after, ended = lines(tuneserve(*shlex.split(command), "--json"))
    assert ended["steps_done"] == ended["steps"] == 8
    assert [each["step"] for each in before + after] == [1, 2, 3, 4, 5, 6, 7, 8]
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [each[name] for each in before + after] == [each[name] for each in whole]
    refused = tuneserve("train", folder / "rows.jsonl", "--resume", ended["checkpoint"], status=2)
    assert "is at the end of this run" in refused


def test_an_interrupted_run_continues_with_the_same_options(server, tmp_path, monkeypatch):
    """It cuts rows at the same length, uses the same server and name, and exports at the end."""
    data, show = write_rows(tmp_path), Lines.show
    wanted = ["train", data, *QUICK, "--epochs", "2", "--max-tokens", "28"]
    whole = lines(tuneserve(*wanted, "--json"))[:-1]

    def interrupted(self, step):
        show(self, step)
        signal.raise_signal(signal.SIGINT)

    mine = ["--save", "cut", "--export", "out", "--url", server.url]
    with monkeypatch.context() as patched:
        patched.setattr(Lines, "show", interrupted)
        patched.setattr(training_loop, "_AHEAD", 0)
        ran = CliRunner().invoke(cli.app, [*map(str, wanted), *mine, "--json"])
    assert ran.exit_code == 130, ran.output
    *before, saved = lines(ran.stdout)
    assert saved["export"] is None and saved["checkpoint"].endswith("/cut-step-1")
    (command,) = re.findall(r"continue with: tuneserve (.*)", ran.stderr)
    monkeypatch.setenv("TUNESERVE_URL", "http://127.0.0.1:1")
    *after, ended = lines(tuneserve(*shlex.split(command), "--json"))
    assert ended["export"] == "out" and (tmp_path / "out" / "adapter_config.json").exists()
    assert ended["checkpoint"].endswith("/cut")
    for name in ("loss", "tokens"):
        assert [each[name] for each in before + after] == [each[name] for each in whole]


def test_a_run_whose_checkpoint_has_no_room_is_saved_when_there_is_some(tmp_path, monkeypatch):
    data, waited = write_rows(tmp_path), []
    (tmp_path / "full").mkdir()
    with LocalServer(tmp_path / "full", **quick_service.QUICK, max_checkpoints="1") as full:
        place = ["--url", full.url]
        output = tuneserve("train", data, *QUICK, *place, "--json")
        first = lines(output)[-1]["checkpoint"]

        def sleep(seconds):
            waited.append(seconds)
            if len(waited) == 2:
                tuneserve("checkpoints", "delete", first, *place)

        clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
        monkeypatch.setattr(training_run, "time", clock)
        ran = CliRunner().invoke(cli.app, ["train", str(data), *QUICK, *place, "--json"])
    assert ran.exit_code == 0, ran.output
    assert waited == [15.0, 15.0]
    assert ran.stderr.count("cannot save yet: you have 1 checkpoints") == 2
    assert lines(ran.stdout)[-1]["checkpoint"].endswith("/weights/final")


def test_a_bad_row_is_reported_before_anything_is_trained(client, tmp_path):
    data = write_rows(tmp_path)
    with data.open("a") as file:
        file.write('{"prompt": "and now"}\n')
    before = len(client.runs())
    said = tuneserve("train", data, status=1)
    assert 'rows.jsonl line 10: there is no "completion"' in said and said.count("\n") == 1
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "a", "completion": " green" * 3000}))
    said = tuneserve("train", long, status=1)
    assert "long.jsonl line 1: it has" in said and "at most 2048 fit" in said
    assert len(client.runs()) == before


def test_an_adapter_has_the_requested_kind_and_shows_it(tmp_path):
    data = write_rows(tmp_path)
    output = tuneserve("train", data, *QUICK, "--adapter", "rslora", "--json")
    path = lines(output)[-1]["checkpoint"]
    run_id = path.removeprefix("tinker://").partition("/")[0]
    run = facts("runs", "show", run_id)["run"]
    assert (run["adapter"], run["lora_rank"]) == ("rslora", 4)
    assert "tuneserve/tiny, rslora of rank 4" in tuneserve("runs", "show", run_id)
    (row,) = [line for line in tuneserve("runs", "list").splitlines() if run_id in line]
    assert re.search(r"^train rows\.jsonl +finished ", row)


def test_chat_answers_like_the_sampler_and_remembers(trained, client):
    _, path, _ = trained
    sampler = client.sampler(path)
    asked = {"role": "user", "content": QUESTION}
    greedy = {"temperature": 0, "max_tokens": 24}
    first = sampler.chat([asked], **greedy)
    options = ["--temperature", "0", "--max-tokens", "24"]
    assert "matey" in first
    assert tuneserve("chat", path, "--prompt", QUESTION, *options) == f"{first}\n"
    answered = {"role": "assistant", "content": first}
    again = {"role": "user", "content": "What colour is mud?"}
    second = sampler.chat([asked, answered, again], **greedy)
    talk = f"{QUESTION}\n\n{again['content']}\n"
    assert tuneserve("chat", path, *options, input=talk) == f"{first}\n{second}\n"
    system = {"role": "system", "content": "Answer like a king."}
    base = client.sampler().chat([system, asked], **greedy)
    (told,) = lines(
        tuneserve("chat", "--prompt", QUESTION, "--system", system["content"], *options, "--json")
    )
    assert told == {"prompt": QUESTION, "answer": base}


def test_chat_compares_a_checkpoint_with_its_base_model(trained, client):
    _, path, _ = trained
    options = ["--temperature", "0", "--max-tokens", "24", "--compare"]
    greedy = {"temperature": 0, "max_tokens": 24}
    asked = [{"role": "user", "content": QUESTION}]
    learnt = client.sampler(path).chat(asked, **greedy)
    base = client.sampler().chat(asked, **greedy)
    assert learnt != base
    (told,) = lines(tuneserve("chat", path, "--prompt", QUESTION, *options, "--json"))
    assert told == {"prompt": QUESTION, "answer": learnt, "base_answer": base}
    said = tuneserve("chat", path, "--prompt", QUESTION, *options)
    assert said == f"{path}:\n{learnt}\ntuneserve/tiny:\n{base}\n"
    refused = tuneserve("chat", "--prompt", QUESTION, *options, status=2)
    assert "--compare needs a checkpoint, and tuneserve/tiny is a base model" in refused


def test_a_conversation_on_a_terminal_takes_commands_and_is_saved(trained, client, tmp_path):
    _, path, _ = trained
    asked = [{"role": "user", "content": QUESTION}]
    answer = client.sampler(path).chat(asked, temperature=0, max_tokens=24)
    typed = ["/set temperature 0", "/set max_tokens 24", "/set tempature 1", QUESTION]
    typed += ["/save talk.jsonl", "/exit"]
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "tuneserve_server", "chat", path]
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "dumb"}
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=os.environ | state
    ) as process:
        os.close(terminal)
        os.write(master, "".join(f"{line}\r" for line in typed).encode())
        shown = b""
        with suppress(OSError):  # the end of the terminal
            while piece := os.read(master, 4096):
                shown += piece
        assert process.wait(60) == 0
    os.close(master)
    assert answer.encode() in shown
    assert b"'tempature' is not an option; the options are system, temperature" in shown
    (row,) = lines(Path("talk.jsonl").read_text())
    assert row == {"messages": [*asked, {"role": "assistant", "content": answer}]}
    history = tmp_path / "state" / "tuneserve" / "chat_history"
    assert f"+{QUESTION}" in history.read_text().splitlines()
    assert history.stat().st_mode & 0o777 == 0o600


def test_runs_show_what_was_learnt_and_what_it_cost(trained, client):
    steps, path, _ = trained
    run_id = path.removeprefix("tinker://").partition("/")[0]
    assert run_id in [each["training_run_id"] for each in facts("runs")]
    (row,) = [line for line in tuneserve("runs", "list").splitlines() if run_id in line]
    assert " finished " in row and " 8" in row
    told = facts("runs", "show", run_id)
    assert told["last_loss"] == pytest.approx(steps[-1]["loss"])
    assert (told["steps"], told["run"]["status"]) == (8, "ended")
    assert told["learning_rate"] == pytest.approx(0.01 / 8)
    assert told["usage"]["trained_tokens"] == sum(each["tokens"] for each in steps)
    assert told["usage"]["device_ms"] > 0
    assert told["checkpoints"] == [path]
    shown = tuneserve("runs", "show", run_id)
    assert f"last loss      {told['last_loss']:.4f}" in shown and path in shown


def test_a_checkpoint_is_listed_given_a_ttl_and_deleted(client):
    model = client.create_model(rank=4)
    path = model.save("short").result()
    (listed,) = facts("checkpoints", "list", "--run", model.id)
    assert (listed["tinker_path"], listed["expires_at"]) == (path, None)
    assert path in tuneserve("checkpoints")
    tuneserve("checkpoints", "ttl", path, "2h")
    (listed,) = facts("checkpoints", "list", "--run", model.id)
    assert listed["expires_at"] is not None
    tuneserve("checkpoints", "ttl", path, "none")
    (listed,) = facts("checkpoints", "list", "--run", model.id)
    assert listed["expires_at"] is None
    assert "an hour" in tuneserve("checkpoints", "ttl", path, "60", status=1)
    assert facts("checkpoints", "delete", path) == {"deleted": path}
    assert facts("checkpoints", "list", "--run", model.id) == []
    assert tuneserve("checkpoints", "delete", path, status=1).count("\n") == 1


def test_top_shows_the_metrics_of_the_workers(trained, client):
    deadline_s = time.monotonic() + 10
    trained_tokens = client.usage().total.trained_tokens
    while True:
        told = facts("top", "--once")
        (worker,) = told["workers"]
        is_told = worker["figures"]["tokens_trained_total"] >= trained_tokens
        if is_told and told["store"]["store_unfinished_requests"] == 0:
            break
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    assert trained_tokens > 0
    assert worker["device_busy"] is None  # unknown from a single reading
    assert (told["health"]["worker"], told["health"]["durability"]) == ("ready", "always")
    shown = tuneserve("top", "--once")
    assert "tuneserve/tiny" in shown and "queue: 0 waiting or running" in shown


def test_the_doctor_finds_a_running_service_healthy(server, monkeypatch):
    monkeypatch.setenv("TUNESERVE_PORT", server.url.rsplit(":", 1)[1])
    told = facts("doctor", "--data-dir", server.data_dir)
    found = {each["name"]: each for each in told["checks"]}
    assert told["healthy"]
    assert {each["level"] for each in found.values()} == {"OK"}
    assert "its worker is ready" in found["port"]["text"]
    assert "always" in found["store"]["text"]
    assert "cpu" in found["device"]["text"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["runs", "show", "nobody:train:0"], 1, "not"),
        (["runs", "--api-key", "sk-other"], 1, "tml-"),
        (["checkpoints", "delete", "tinker://nobody/weights/none"], 1, "not"),
        (["checkpoints", "delete", "nowhere"], 1, "no checkpoint has the name 'nowhere'"),
        (["chat", "gpt-4", "--prompt", "Hi"], 1, "gpt-4"),
        (["train", "rows.jsonl", "--base-model", "gpt-4"], 2, "this server has tuneserve/tiny"),
        (["train", "rows.jsonl", "--rank", "4000"], 1, "rank"),
        (["train", "rows.jsonl", "--save", "../x"], 2, "--save is not a checkpoint name"),
        (["train", "rows.jsonl", "--save", "a" * 125], 2, "suffix of an interrupted run"),
        (["runs", "--api-key", "tml-secret\r"], 2, "the API key has a space"),
        (["train", "rows.jsonl", "--form", "core"], 1, "no option of adapters of kind lora"),
        (
            ["train", "rows.jsonl", "--adapter", "osft", "--rank", "4", "--unfreeze-ratio", "0.5"],
            1,
            "leave one out",
        ),
        (["runs", "--url", f"http://127.0.0.1:{free_port()}"], 1, "does not answer"),
        (["train", "rows.jsonl", "--url", f"http://127.0.0.1:{free_port()}"], 1, "does not answer"),
    ],
)
def test_an_impossible_command_is_explained_in_one_line(arguments, status, words, tmp_path):
    write_rows(tmp_path)
    said = tuneserve(*arguments, status=status)
    assert words in said
    assert said.startswith("tuneserve: ") and said.count("\n") == 1


def test_every_command_of_the_page_runs_after_the_others(server, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNESERVE_PORT", server.url.rsplit(":", 1)[1])
    page = (ROOT / "docs" / "cli.md").read_text()
    (rows,) = re.findall(r"^```json\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "colours.jsonl").write_text(rows)
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)
    commands = [line for block in blocks for line in block.splitlines()]
    known: dict[str, str] = {}
    for command in commands:
        for name, value in known.items():
            command = command.replace(f"${name}", value)
        name, *arguments = shlex.split(command)
        if arguments[0] in ("eval", "conformance"):
            continue
        assert name == "tuneserve"
        said = tuneserve(*arguments)
        if arguments[0] == "train" and not known:
            assert re.search(r"^step 40/40  epoch 20  loss 0\.", said, re.M)
            (path,) = re.findall(r"^saved as (tinker://\S+/weights/colours)$", said, re.M)
            known = {"CHECKPOINT": path, "RUN": path.split("/")[2]}
    used = {arguments.split()[1] for arguments in commands}
    others = {"eval", "conformance"}  # tests/compat/test_eval.py, test_conformance.py
    assert others < used
    assert used - others == {
        "train",
        "chat",
        "runs",
        "checkpoints",
        "status",
        "models",
        "top",
        "doctor",
    }
    assert (tmp_path / "pirate" / "adapter_model.safetensors").exists()


def test_other_forms_are_shown_and_trained(tmp_path):
    alpaca = tmp_path / "alpaca.csv"
    alpaca.write_text("instruction,input,output\nSay hello,,Ahoy!\nSay bye,,Arr!\n")
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Ahoy!"}]
    (tmp_path / "sharegpt.json").write_text(json.dumps([{"conversations": turns}] * 2))
    before = [each["training_run_id"] for each in facts("runs", "list")]
    shown = facts("train", alpaca, "--dry-run", "--batch-size", "1")
    assert shown["rows"] == shown["steps"] == 2
    assert any(part["trained"] and "Ahoy!" in part["text"] for part in shown["example"])
    assert [each["training_run_id"] for each in facts("runs", "list")] == before
    for name in ("alpaca.csv", "sharegpt.json"):
        said = tuneserve("train", tmp_path / name, *QUICK)
        assert said.startswith("2 rows, ") and "saved as tinker://" in said
        assert "estimated time: " in said
