"""``tuneserve compile`` leaves nothing to compile to a worker with the same settings."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.precompile import __main__ as precompile
from tuneserve_engine.backend.jax.precompile import absent_gpu, closed_set
from tuneserve_engine.backend.jax.programs.cache import mark
from tuneserve_engine.backend.jax.target import target_platform

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
    given["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # compiles sooner
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
    first, *lines, last = process(tmp_path, *command).splitlines()
    count = len(lines)
    assert first.startswith("programs of tuneserve=")
    assert any(line.startswith("train_micro_batch (4, 1, ") for line in lines)
    assert last.startswith(f"{count} programs in {out}: {count} compiled in ")
    assert last.endswith(" s, 0 already compiled, 0 failed")
    assert len(list(out.iterdir())) == count

    facts = json.loads(process(tmp_path, *command, "--json"))
    assert facts["folder"] == str(out) and len(facts["programs"]) == count
    assert f"programs of {facts['program_id']}" == first
    assert not any(each["is_new"] or each["error"] for each in facts["programs"])

    found = process(tmp_path, "-c", WORKER, COMPILE_CACHE=str(out))
    assert found.split() == [str(count), str(count)]


IDENTITIES = """
from pathlib import Path

from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.memory.device import default_device
from tuneserve_engine.backend.jax.memory.planner import plan
from tuneserve_engine.backend.jax.model.weights import read_config
from tuneserve_engine.backend.jax.precompile.closed_set import worker_programs
from tuneserve_engine.backend.jax.target import compiling_for
from tuneserve_engine.settings.worker import WorkerSettings

def identities(programs):
    shapes = programs.shapes()
    return sorted(each._program._identity(each._key, each._specs()) for each in shapes)

settings = WorkerSettings()
with compiling_for("gpu"):
    there = identities(JaxBackend.from_options(settings.backend_options).programs)
    config = read_config(Path(settings.base_model))
    found = plan(config, default_device(), settings.plan_request)
    assert found.dtype == "bfloat16"
    assert identities(worker_programs(config, found)) == there and there
print("prefill" in str(there) and "unstacked" not in str(there))
"""


def test_programs_from_shapes_alone_are_those_of_a_worker_on_a_gpu(tmp_path: Path) -> None:
    """Which reads the layers' weights where they are. Nothing is compiled."""
    asked = {"DTYPE": "bfloat16", "COMPILE_AHEAD": "false"}
    assert process(tmp_path, "-c", IDENTITIES, **asked) == "True\n"


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
    assert printed.out.partition("\n")[2] == (
        f"score 8: 0.0 s\n2 programs in {tmp_path}/data/compiled: 1 compiled in 0 s, "
        "0 already compiled, 1 failed\n"
    )


def test_settings_that_no_worker_can_use_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compiled(tmp_path, DEVICE_MEMORY_BYTES="1000") == 2
    assert capsys.readouterr().err.startswith("tuneserve compile: the base model needs at least ")


def test_an_absent_gpu_needs_the_plugin_that_compiles_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent_gpu, "_is_installed", lambda package: False)
    assert compiled(tmp_path, "--device", "h200", "--out", str(tmp_path / "data")) == 2
    assert "CUDA plugin, which compiles for a GPU, is not installed" in capsys.readouterr().err
    assert target_platform() == "cpu"
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--driver", "570"), "--driver is that of an absent GPU: add --device"),
        (("--device", "h200"), "--device compiles for another machine: add --out"),
    ],
)
def test_options_that_need_others_are_refused_without_them(
    arguments: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory of the worker's own programs is not for those of another machine."""
    with pytest.raises(SystemExit) as status:
        compiled(tmp_path, *arguments)
    assert status.value.code == 2
    assert reason in capsys.readouterr().err


def test_results_name_the_programs_of_an_absent_gpu(tmp_path: Path, base_model: Path) -> None:
    """Because XLA may have chosen other kernels for them."""
    backend = partial(JaxBackend, str(base_model), name="tiny", tokenizer_id="t")
    plain = backend(compile_cache_dir=tmp_path / "programs").numerics_id
    mark(tmp_path / "programs")
    marked = backend(compile_cache_dir=tmp_path / "programs").numerics_id
    assert marked == f"{plain} programs=absent-gpu"


@pytest.mark.nightly
def test_programs_for_an_absent_gpu_are_compiled_once(tmp_path: Path) -> None:
    """By the JAX of the GPU image, also for two of them. Nothing here can load them."""
    subprocess.run(["make", ".gpu-compile/stamp"], cwd=ROOT, check=True)
    given = environment(tmp_path) | {"PYTHONPATH": "clients:engine:server"}
    command = [".gpu-compile/bin/python", "-m", precompile.__package__, "--device", "h200"]
    command += ["--out", str(tmp_path / "programs")]

    def summary(*arguments: str, **settings: str) -> str:
        run = [*command, *arguments]
        asked = given | {f"TUNESERVE_{name}": value for name, value in settings.items()}
        printed = subprocess.check_output(run, cwd=ROOT, env=asked, text=True, timeout=400)
        return printed.splitlines()[-1]

    first, second, other = summary(), summary(), summary("--driver", "570")
    of_two = summary(DEVICES="2")
    assert of_two.endswith(" s, 0 already compiled, 0 failed")
    assert first.endswith(" s, 0 already compiled, 0 failed")
    assert ": 0 compiled in " in second and second.endswith(", 0 failed")
    assert other.endswith(" s, 0 already compiled, 0 failed")
