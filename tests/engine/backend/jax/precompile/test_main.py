"""``tuneserve compile`` leaves nothing to compile to a worker with the same settings."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from tuneserve_engine.backend.jax.precompile import __main__ as precompile
from tuneserve_engine.backend.jax.precompile import closed_set

ROOT = Path(__file__).parents[5]
SMALL = {"MAX_RANK": "4", "CHUNK_TOKENS": "64", "BATCH_TOKENS": "256", "SAMPLE_ROWS": "2"}
WORKER = """
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.settings.worker import WorkerSettings

programs = JaxBackend.from_options(WorkerSettings().backend_options).programs
assert programs.wait(60)
print(len(programs.shapes()), programs.kept.loaded)
"""


def environment(folder: Path, **settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "TUNESERVE_COMPILE_CACHE"}
    given = {f"TUNESERVE_{name}": value for name, value in (SMALL | settings).items()}
    return kept | given | {"TUNESERVE_DATA_DIR": str(folder / "data")}


def process(folder: Path, *arguments: str, **settings: str) -> str:
    """Run Python in a process of its own: shapes do not pass the type checks of tests."""
    return subprocess.check_output(
        [sys.executable, *arguments], env=environment(folder, **settings), text=True, timeout=200
    )


def compiled(folder: Path, *arguments: str, **settings: str) -> int:
    with (
        mock.patch.dict(os.environ, environment(folder, **settings), clear=True),
        mock.patch.object(sys, "argv", ["compile", *arguments]),
    ):
        return precompile.main()


def test_a_worker_finds_every_program_that_was_compiled_for_it(tmp_path: Path) -> None:
    out = tmp_path / "programs"
    command = "-m", "tuneserve_server", "compile", "--out", str(out)
    *lines, last = process(tmp_path, *command).splitlines()
    count = len(lines)
    assert any(line.startswith("train_micro_batch (4, 1, ") for line in lines)
    assert last.startswith(f"{count} programs in {out}: {count} compiled in ")
    assert last.endswith(" s, 0 were there, 0 failed")
    assert len(list(out.iterdir())) == count

    facts = json.loads(process(tmp_path, *command, "--json"))
    assert facts["folder"] == str(out) and len(facts["programs"]) == count
    assert not any(each["is_new"] or each["error"] for each in facts["programs"])

    found = process(tmp_path, "-c", WORKER, COMPILE_CACHE=str(out))
    assert found.split() == [str(count), str(count)]


class Shape:
    """A program that can be compiled, or not."""

    def __init__(self, name: str, *, is_good: bool) -> None:
        self.name, self.order, self._is_good = name, 0, is_good

    def keep(self, place: None) -> bool:
        if not self._is_good:
            raise MemoryError("too large\nby far")
        return True


def test_a_program_that_cannot_be_compiled_is_named_and_the_others_are_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [Shape("copy ()", is_good=False), Shape("score 8", is_good=True)]
    programs = SimpleNamespace(shapes=lambda: shapes)
    monkeypatch.setattr(closed_set, "worker_programs", lambda *_, **__: programs)
    assert compiled(tmp_path) == 1
    printed = capsys.readouterr()
    assert printed.err == "copy (): MemoryError: too large\n"
    assert printed.out == (
        f"score 8: 0.0 s\n2 programs in {tmp_path}/data/compiled: 1 compiled in 0 s, "
        "0 were there, 1 failed\n"
    )


def test_settings_that_no_worker_can_use_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compiled(tmp_path, DEVICE_MEMORY_BYTES="1000") == 2
    assert capsys.readouterr().err.startswith("tuneserve compile: the base model needs at least ")


def test_an_absent_gpu_needs_the_plugin_that_compiles_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compiled(tmp_path, "--device", "h200") == 2
    assert "JAX's CUDA plugin, which compiles for a GPU, is missing; " in capsys.readouterr().err


@pytest.mark.nightly
def test_programs_for_an_absent_gpu_are_compiled_once(tmp_path: Path) -> None:
    """By the JAX of the GPU image. Nothing here can load them."""
    subprocess.run(["make", ".gpu-compile/stamp"], cwd=ROOT, check=True)
    given = environment(tmp_path) | {"PYTHONPATH": "clients:engine:server"}
    command = [".gpu-compile/bin/python", "-m", precompile.__package__, "--device", "h200"]

    def summary(*arguments: str) -> str:
        run = [*command, *arguments]
        printed = subprocess.check_output(run, cwd=ROOT, env=given, text=True, timeout=400)
        return printed.splitlines()[-1]

    first, second, other = summary(), summary(), summary("--driver", "570")
    assert first.endswith(" s, 0 were there, 0 failed")
    assert ": 0 compiled in " in second and second.endswith(", 0 failed")
    assert other.endswith(" s, 0 were there, 0 failed")
