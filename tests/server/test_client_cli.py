"""The commands for those who use a server: what needs no server to be seen."""

import io
import json
import socket
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tuneserve_client.tokenizer import Tokenizer
from tuneserve_engine.config import TINY_MODEL
from tuneserve_server import checks, cli
from tuneserve_server.client_cli.recipe import Recipe
from tuneserve_server.client_cli.rows import BadRows, encode, read_rows
from tuneserve_server.client_cli.top import Look, Watch
from tuneserve_server.client_cli.train_view import Step, view_of
from tuneserve_server.local import free_port
from tuneserve_server.screen import size, sparkline
from tuneserve_server.settings import ApiSettings

TOKENIZER = Tokenizer.from_folder(TINY_MODEL)
FORGETFUL = (
    "{% for m in messages %}{{ m.role }}:"
    "{{ m.content if loop.last else m.content.split('|')[-1] }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A chat template that leaves out what was thought before the last answer, as Qwen3's does."""


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
        ({"prompt": "a"}, 'there is no "completion"'),
        ({"completion": "a"}, 'there is no "prompt"'),
        ({"prompt": 7, "completion": "a"}, '"prompt" is no text'),
        ({"messages": "hello"}, '"messages" is no list'),
        ({"messages": [{"role": "user"}]}, "message 1 needs a text"),
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


def test_bytes_that_are_no_text_are_a_bad_row(tmp_path: Path) -> None:
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


def test_where_past_answers_are_written_otherwise_each_is_a_datum_of_its_own(
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


def test_every_epoch_has_each_row_once_in_another_order() -> None:
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


def test_a_checkpoint_remembers_what_comes_next() -> None:
    recipe = Recipe("digest", seed=3, epochs=2, batch_size=3, learning_rate=3e-5)
    assert Recipe.remembered(recipe.metadata(17)) == (recipe, 17)
    assert Recipe.remembered({}) is None
    assert Recipe.remembered({**recipe.metadata(17), "tuneserve_train_seed": "x"}) is None
    assert recipe.changed({"epochs": 9, "seed": None}) == replace(recipe, epochs=9)
    assert recipe.has_order_of(replace(recipe, epochs=9, learning_rate=1.0))
    assert not recipe.has_order_of(replace(recipe, batch_size=4))


# --- on the screen --------------------------------------------------------------------------------


def test_a_sparkline_shows_means_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 2, 8, 8, 1, 1], 3) == "▁█▁"
    assert sparkline([5, 5], 4) == "▁▁"
    assert sparkline([], 4) == ""


def test_sizes_are_said_in_units_of_1024() -> None:
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
    watch = Watch()

    def at(second: float, busy_s: float, tokens: float) -> dict[str, Any]:
        told = {"device_seconds_total": busy_s, "tokens_trained_total": tokens}
        watch.add(Look(second, {}, {}, {("tiny", ""): told}))
        (worker,) = watch.facts()["workers"]
        return dict(worker)

    assert at(100, 50, 1000)["device_busy"] is None
    assert at(110, 55, 1300)["trained_tokens_per_s"] == pytest.approx(30)
    assert at(120, 65, 1300)["device_busy"] == pytest.approx(15 / 20)
    assert at(130, 75, 1300)["device_busy"] == pytest.approx(20 / 20)  # since 110
    assert at(131, 1, 0)["device_busy"] is None  # another process under the name


# --- asked wrongly --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["runs", "--url", "localhost:8410"], "must begin with http"),
        (["checkpoints", "ttl", "tinker://a/weights/b", "soon"], "a whole number, or none"),
        (["train", "rows.jsonl", "--resume", "tinker://a/weights/b", "--rank", "4"], "--resume"),
        (["train", "rows.jsonl", "--export", "."], "is not empty"),
    ],
)
def test_what_is_asked_wrongly_is_told_in_one_line(
    arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_of(tmp_path, {"prompt": "a", "completion": "b"})
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(cli.app, arguments)
    assert ran.exit_code == 2
    assert reason in ran.stderr
    assert ran.stderr.startswith("tuneserve: ") and ran.stderr.count("\n") == 1


def test_a_file_that_is_not_there_is_a_wrong_usage(tmp_path: Path) -> None:
    ran = CliRunner().invoke(cli.app, ["train", str(tmp_path / "none.jsonl")])
    assert ran.exit_code == 2
    assert "does not exist" in ran.stderr


# --- the doctor -----------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> ApiSettings:
    return ApiSettings(data_dir=tmp_path / "data", port=free_port(), min_free_bytes=1)


def changed(settings: ApiSettings, **fields: Any) -> ApiSettings:
    return settings.model_copy(update=fields)


def test_an_empty_place_that_will_do_is_found_healthy_and_left_empty(
    place: ApiSettings, tmp_path: Path
) -> None:
    found = [
        checks._directory("data dir", place.data_dir, place),
        checks._disk(place),
        checks._port(place, {}),
        checks._store(place, {}),
        checks._model(place),
    ]
    assert [each.level for each in found] == ["OK"] * 5
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_fails(place: ApiSettings, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = changed(place, data_dir=tmp_path / "file" / "data")
    found = checks._directory("data dir", settings.data_dir, settings)
    assert found.level == "FAIL" and "choose another with --data-dir" in found.text


def test_sqlite_on_a_network_file_system_fails_and_files_do_not(
    place: ApiSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"host:/export {tmp_path.resolve()} nfs4 rw 0 0\n")
    monkeypatch.setattr(checks, "_MOUNTS", mounts)
    found = checks._directory("data dir", place.data_dir, place)
    assert found.level == "FAIL" and "network file system (nfs4)" in found.text
    assert checks._directory("files dir", place.files_dir, place).level == "OK"


def test_little_disk_space_is_told(place: ApiSettings) -> None:
    found = checks._disk(changed(place, min_free_bytes=2**60))
    assert found.level == "FAIL" and "make room" in found.text


def test_a_port_that_somebody_else_has_fails(place: ApiSettings) -> None:
    with socket.socket() as other:
        other.bind((place.host, place.port))
        other.listen()
        found = checks._port(place, {})
    assert found.level == "FAIL" and "--port" in found.text


def test_a_service_whose_worker_is_absent_or_whose_store_is_vouched_for_is_a_warning(
    place: ApiSettings,
) -> None:
    health = {"worker": "absent", "store": "redis", "durability": "asserted"}
    assert checks._port(place, health).level == "WARN"
    assert checks._store(place, health).level == "WARN"


def test_a_redis_that_is_not_there_fails(place: ApiSettings) -> None:
    settings = changed(place, store=f"redis://:secret@127.0.0.1:{free_port()}/0")
    found = checks._store(settings, {})
    assert found.level == "FAIL" and "secret" not in found.text


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import time; time.sleep(60)", "within 0 s"),
        ("raise SystemExit('no driver')", "no driver"),
        ("import os; os.kill(os.getpid(), 9)", "it said nothing"),
    ],
)
def test_a_device_that_hangs_or_fails_is_told(program: str, words: str) -> None:
    found = checks._device({}, program, 0.4 if "sleep" in program else 20)
    assert found.level == "FAIL" and words in found.text


def test_the_device_is_named_with_its_memory() -> None:
    told = {"platform": "gpu", "kind": "H100", "count": 2, "bytes": 80 * 2**30}
    found = checks._device({}, f"print('noise'); print('''{json.dumps(told)}''')")
    assert found == checks.Finding("device", "OK", "2 x H100 (gpu), 80.0 GiB")


def test_a_gpu_that_jax_does_not_see_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_NVIDIA", tmp_path)
    told = {"platform": "cpu", "kind": "cpu", "count": 1, "bytes": 2**30}
    found = checks._device({}, f"print('''{json.dumps(told)}''')")
    assert found.level == "WARN" and "tuneserve[cuda]" in found.text


def test_a_model_that_is_not_whole_fails_and_one_of_the_hub_is_a_warning(
    place: ApiSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text("{}")
    model = changed(place, base_model=str(tmp_path))
    assert "holds no *.safetensors" in checks._model(model).text
    (tmp_path / "model.safetensors").write_bytes(b"x")
    found = checks._model(model)
    assert found.level == "FAIL" and "tokenizer.json cannot be read" in found.text
    absent = checks._model(changed(place, base_model="nobody/no-such-model"))
    assert absent.level == "WARN" and "hub" in absent.text
    assert checks._model(changed(place, base_model="a/b/c/d")).level == "FAIL"


def test_what_is_not_installed_is_told_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "_ENGINE", ("jax", "no_such_package"))
    found = checks._engine()
    assert found.level == "FAIL"
    assert "no_such_package not installed" in found.text and "tuneserve[engine]" in found.text


def test_the_doctors_exit_status_is_1_if_something_fails(
    place: ApiSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ["--data-dir", str(tmp_path / "data"), "--port", str(place.port)]
    monkeypatch.setattr(checks, "_device", lambda _: checks.Finding("device", "FAIL", "none"))
    ran = CliRunner().invoke(cli.app, ["doctor", *where])
    assert ran.exit_code == 1
    assert "FAIL  device     none" in ran.stdout.splitlines()
    told = json.loads(CliRunner().invoke(cli.app, ["doctor", *where, "--json"]).stdout)
    assert not told["healthy"]
    assert [each["name"] for each in told["checks"] if each["level"] == "FAIL"] == ["device"]
