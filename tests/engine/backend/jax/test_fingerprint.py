"""The parts of the numerics id, and the settings that make numbers agree with it."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import tuneserve_engine
from tuneserve_engine.backend.jax import fingerprint
from tuneserve_engine.backend.jax.fingerprint import driver_branch
from tuneserve_engine.backend.jax.target import compiling_for
from tuneserve_engine.core.shapes import StaticShapes

ROOT = Path(tuneserve_engine.__path__[0])
STARTS = (
    "worker.execution.gradients",
    "worker.codecs.sampling",
    "backend.jax.training.trainer",
    "backend.jax.sampling.sampler",
)
# Results have the same bits at any speed of the device: see test_interruptions.py.
NO_NUMBERS = {
    ROOT / name
    for name in (
        *("core/errors.py", "core/jobs.py", "core/usage.py", "core/policies.py"),
        *("core/sampling_options.py", "core/misspelt.py"),
        *("core/backend_options.py", "core/recordings.py", "settings/common.py"),
        "worker/scheduling/pace.py",
        *("telemetry/logs.py", "telemetry/log_throttle.py"),
        *("process/disk_room.py", "process/permissions.py"),
        *("worker/execution/device_timer.py", "worker/execution/outcomes.py"),
    )
}


def imports_of(path: Path) -> Iterator[Path]:
    """The engine's modules that this one imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tuneserve_engine."):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                found = ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")
                if found.is_file():
                    yield found


def test_the_digest_covers_every_module_that_a_result_passes_through():
    waiting = [ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in STARTS]
    reached = set(waiting)
    while waiting:
        new = set(imports_of(waiting.pop())) - reached - NO_NUMBERS
        reached |= new
        waiting += new
    names = {path.relative_to(ROOT).as_posix() for path in reached}
    covered = {part.decode() for part in list(fingerprint._code())[::2]}
    assert names <= covered
    assert {"core/adapter.py", "backend/base.py", "backend/jax/sampling/adapter_slots.py"} <= names


@pytest.mark.parametrize("pattern", fingerprint._CODE)
def test_every_pattern_of_the_digest_matches_a_file(pattern: str):
    assert list(ROOT.glob(pattern))


def test_the_id_has_the_compiler_options(monkeypatch: pytest.MonkeyPatch):
    assert "xla_allow_excess_precision=False" in fingerprint._flags()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "xla_gpu_dot_merger_threshold_mb=0" in fingerprint._flags()


def test_the_id_names_the_installed_libraries_that_compute_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
):
    assert "none" not in fingerprint._packages().values()
    installed = {"nvidia-cublas-cu12": "12.9.3.13", "jax": "0.12.0.1"}
    monkeypatch.setattr(fingerprint, "_version", lambda name: installed.get(name, "none"))
    assert fingerprint._packages() == {
        "tuneserve": "none",
        "jax": "0.12.0.1",
        "jaxlib": "none",
        "flax": "none",
        "numpy": "none",
        "llguidance": "none",
        "nvidia-cublas-cu12": "12.9.3.13",
    }


def test_the_id_says_whether_layers_loop_over_chunks(base_model: Path):
    """With 4,096 tokens in a bin either way."""

    def numerics_id(tokens: int) -> str:
        shapes = StaticShapes(64, chunk=4096, requested_tokens=tokens)
        assert shapes.bin_tokens == 4096
        return fingerprint.numerics_id(
            base_model, fingerprint.NumericChoices("float32", shapes, "dots", 8)
        )

    one, *longer = (numerics_id(tokens) for tokens in (4096, 8192, 12_288))
    assert longer[0] == longer[1] != one


def test_the_id_says_which_datums_are_divided_and_among_how_many_devices(base_model: Path):
    def numerics_id(tokens: int, per_datum: int) -> str:
        shapes = StaticShapes(4096, requested_tokens=tokens, devices_per_datum=per_datum)
        choices = fingerprint.NumericChoices("float32", shapes, "dots", 8, devices=4)
        return fingerprint.numerics_id(base_model, choices)

    assert numerics_id(4096, 1) == numerics_id(8192, 1)
    ids = {numerics_id(*given) for given in ((4096, 1), (1024, 4), (2048, 4), (2048, 2))}
    assert len(ids) == 4


@pytest.mark.parametrize(
    ("text", "branch"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 27 2025\n", "580"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Rel\n", "570"),
        ("something else", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_id_names_the_branch_of_a_gpus_driver(text: str | None, branch: str, tmp_path: Path):
    file = tmp_path / "version"
    if text is not None:
        file.write_text(text)
    assert fingerprint.driver_branch(file) == branch


def test_programs_for_an_absent_gpu_have_the_id_of_those_of_a_worker_there(
    base_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The worker knows that its programs are of that kind. Otherwise its own CUDA counts, too."""
    choices = fingerprint.NumericChoices(
        "bfloat16", StaticShapes(64), "dots", 8, is_for_absent_gpu=True
    )
    with compiling_for("gpu"):
        absent = fingerprint.program_id(base_model, choices, absent_gpu="NVIDIA H200; driver 580")
    file = tmp_path / "version"
    file.write_text("Kernel Module  580.82.07")
    cuda = SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    there = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", client=cuda)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [there])
    monkeypatch.setattr(fingerprint, "driver_branch", lambda: driver_branch(file))
    assert fingerprint.program_id(base_model, choices) == absent
    assert "device=gpu(NVIDIA H200; driver 580)" in absent
    whole = "device=gpu(NVIDIA H200; driver 580; PJRT C API cuda 13000)"
    assert whole in fingerprint.numerics_id(base_model, choices)
    own = fingerprint.program_id(base_model, choices._replace(is_for_absent_gpu=False))
    assert whole in own


@pytest.fixture
def precision() -> Iterator[None]:
    before = jax.config.jax_default_matmul_precision
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize(
    ("device", "dtype", "wanted"),
    [("gpu", "float32", "highest"), ("gpu", "bfloat16", None), ("cpu", "float32", None)],
)
def test_a_gpu_is_set_to_exact_float32_products(
    device: str, dtype: str, wanted: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    fingerprint.ask_for_float32(dtype)
    assert jax.config.jax_default_matmul_precision == wanted
