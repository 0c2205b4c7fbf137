"""T14: bugs that tests must notice, planted one at a time into a copy of the code.

Each bug is a small edit of one file. The named tests run on the copy and must fail there: a test
that passes with the bug in place guards nothing.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ("clients", "server", "engine", "tests", "examples", "pyproject.toml")
ENGINE = "engine/tuneserve_engine"
SIMULATION = ("tests/faults/test_simulation.py", "-m", "not nightly")
LONGER = ("tests/faults/test_simulation.py", "-m", "nightly", "-k", "longer")
JAX_KILLS = ("tests/faults/test_kills_jax.py", "-m", "not nightly")


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    was: str
    becomes: str
    tests: tuple[str, ...]


BUGS = (
    Bug(
        "a sampler that draws from hidden randomness",
        "tests/support/fake_samples.py",
        "first = 0 if request.temperature == 0 else request.seed + index",
        "first = __import__('random').randrange(60)",
        SIMULATION,
    ),
    Bug(
        "an adapter that starts from hidden randomness",
        f"{ENGINE}/adapters/checkpoint_format.py",
        "key=np.array([seed % 2**64, index], np.uint64)",
        "key=np.random.default_rng().integers(2**63, size=2, dtype=np.uint64)",
        JAX_KILLS,
    ),
    Bug(
        "the accumulator is missing from the point",
        f"{ENGINE}/worker/execution/executor.py",
        "optimizer=True, accumulator=True",
        "optimizer=True",
        SIMULATION,
    ),
    Bug(
        "the second moment is missing from the point",
        f"{ENGINE}/adapters/checkpoint.py",
        '"second_moment", "accumulator")',
        '"accumulator")',
        SIMULATION,
    ),
    Bug(
        "the step count is missing from the point",
        f"{ENGINE}/adapters/checkpoint.py",
        'step=int(metadata["step"])',
        "step=0",
        JAX_KILLS,
    ),
    Bug(
        "a point before the results that it has the effect of",
        f"{ENGINE}/worker/models/recovery_points.py",
        "        await self._services.unstored.wait(model_id, position)\n",
        "",
        SIMULATION,
    ),
    Bug(
        "a point that claims one request more than it has",
        f"{ENGINE}/worker/execution/executor.py",
        "model.position = job.position + 1",
        "model.position = job.position + 2",
        SIMULATION,
    ),
    Bug(
        "outcomes count as stored before they are",
        f"{ENGINE}/worker/unstored.py",
        "            await queue.finish(epoch, batch)\n",
        "            self._outcomes = self._outcomes[len(batch) :]\n"
        "            await queue.finish(epoch, batch)\n"
        "            batch = []\n",
        SIMULATION,
    ),
    Bug(
        "no check of the epoch",
        f"{ENGINE}/store/sqlite/placement.py",
        'if tx.execute("SELECT 1 FROM workers WHERE epoch = ?", epoch).fetchone() is None:',
        "if False:",
        ("tests/support/test_memory_store.py", "tests/faults/test_leases.py"),
    ),
    Bug(
        "a file is not synced before it is renamed",
        f"{ENGINE}/store/files.py",
        "        fs.fsync(descriptor)\n    ",
        "        pass\n    ",
        ("tests/faults/test_crash_states.py",),
    ),
    Bug(
        "the renamed directory's parent is not synced",
        f"{ENGINE}/store/files.py",
        "killed before this sync.\n        self._sync_directory(self._root)",
        "killed before this sync.",
        ("tests/faults/test_crash_states.py",),
    ),
    Bug(
        "a resend is a request of its own",
        f"{ENGINE}/store/sqlite/jobs.py",
        "    if known is not None:",
        "    if known is not None and job.kind != JobKind.FORWARD_BACKWARD:",
        SIMULATION,
    ),
    Bug(
        "takes go on while a model is released",
        f"{ENGINE}/worker/worker.py",
        "            async with self._taking:\n                await call()\n",
        "            if True:\n                self._pause.clear()\n                await call()\n",
        LONGER,
    ),
    Bug(
        "the fallback point's log is trimmed",
        f"{ENGINE}/store/sqlite/recovery_points.py",
        "_drop_payloads(tx, point.model_id, position)",
        "_drop_payloads(tx, point.model_id, point.position)",
        ("tests/engine/worker/models/test_recovery.py", "tests/support/test_memory_store.py"),
    ),
    Bug(
        "the last step is missing from the log",
        f"{ENGINE}/worker/execution/outcomes.py",
        'return replace(in_json(job, {"metrics": finite}), changed=True, point=point)',
        'return replace(in_json(job, {"metrics": finite}), point=point)',
        SIMULATION,
    ),
    Bug(
        "replay forgets in what halves a request ran",
        f"{ENGINE}/worker/pending.py",
        "halvings=entry.halvings",
        "halvings=0",
        ("tests/engine/worker/models/test_recovery.py",),
    ),
    Bug(
        "a gradient that failed stays in the accumulator",
        f"{ENGINE}/backend/jax/training/adapter_slots.py",
        "jnp.where(finite, new, old), total",
        "new, total",
        ("tests/engine/backend/jax/training/test_adapter_slots.py",),
    ),
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("__pycache__", "compat")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(copy: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    paths = [str(copy / each) for each in ("engine", "server", "clients")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tests", sorted({bug.tests for bug in BUGS}), ids=" ".join)
def test_the_tests_pass_on_a_copy_without_a_bug(copy: Path, tests: tuple[str, ...]) -> None:
    ran = run(copy, tests)
    assert ran.returncode == 0, ran.stdout[-3000:]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, copy: Path) -> None:
    path = copy / bug.file
    sound = path.read_text()
    path.write_text(sound.replace(bug.was, bug.becomes))
    try:
        ran = run(copy, bug.tests)
    finally:
        path.write_text(sound)
    assert ran.returncode == 1, f"no test noticed {bug.name!r}:\n{ran.stdout[-3000:]}"
