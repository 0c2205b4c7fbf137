"""The hashes of requirements/: complete, for the pinned versions, and independent of a registry."""

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
LOCKS = sorted(path.stem for path in FOLDER.glob("*.txt"))
UNHASHED = {"torch", "setuptools"}
"""Packages without hashes.

The file of torch depends on the machine, and torch is only a reference in tests. It needs
setuptools, which a new environment of Python 3.11 has.
"""


def pins(text: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


CONSTRAINTS = pins((ROOT / "constraints.txt").read_text())
ON_A_GPU = pins((ROOT / "constraints-gpu.txt").read_text())
GPU_LOCKS = {"cuda", "cuda13", "gpu-compile"}


def closure(extra: str) -> set[str]:
    """Names of all packages that the extra installs here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    todo = [Requirement(each) for each in [*project["dependencies"], *extras[extra]]]
    found: set[str] = set()
    while todo:
        needed = todo.pop()
        name = canonicalize_name(needed.name)
        if name == "tuneserve":
            todo += [Requirement(each) for other in needed.extras for each in extras[other]]
            continue
        if name in found:
            continue
        found.add(name)
        chosen = needed.extras or {""}
        for each in map(Requirement, distribution(name).requires or ()):
            if not each.marker or any(each.marker.evaluate({"extra": one}) for one in chosen):
                todo.append(each)
    return found


def test_every_kind_of_install_has_a_lock() -> None:
    assert LOCKS == ["build", "cuda", "cuda13", "demo", "dev", "engine", "gpu-compile", "server"]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_pinned_versions_with_hashes_and_no_address(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    entries = text.replace("\\\n", " ").splitlines()
    assert entries
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==\S+( +--hash=sha256:[0-9a-f]{64})+", entry), entry[:200]
    expected = CONSTRAINTS | ON_A_GPU if name in GPU_LOCKS else CONSTRAINTS
    assert pins(text).items() <= expected.items()


@pytest.mark.parametrize("extra", ["server", "engine", "demo"])
def test_a_lock_has_exactly_what_its_extra_needs(extra: str) -> None:
    assert pins((FOLDER / f"{extra}.txt").read_text()).keys() == closure(extra)


@pytest.mark.parametrize("name", ["engine", "cuda", "cuda13"])
def test_the_locks_of_a_server_and_of_a_worker_can_be_installed_together(name: str) -> None:
    server, worker = (pins((FOLDER / f"{each}.txt").read_text()) for each in ("server", name))
    assert not {each for each in server.keys() & worker.keys() if server[each] != worker[each]}


@pytest.mark.parametrize(
    ("name", "added"),
    [("cuda", "jax-cuda12-|nvidia-"), ("cuda13", "jax-cuda13-|nvidia-"), ("gpu-compile", "jax-")],
)
def test_a_lock_for_a_gpu_adds_its_own_packages_to_the_engine_s(name: str, added: str) -> None:
    engine, lock = (pins((FOLDER / f"{each}.txt").read_text()) for each in ("engine", name))
    assert engine.keys() < lock.keys()
    assert all(re.match(added, each) for each in lock.keys() - engine.keys())
    changed = {each for each in engine if lock[each] != engine[each]}
    assert changed == ON_A_GPU.keys() & engine.keys()


def test_only_a_reference_of_the_tests_is_installed_without_a_hash() -> None:
    locked = pins((FOLDER / "dev.txt").read_text()).keys()
    assert closure("dev") - locked == UNHASHED
    for name in ("server", "engine", "cuda", "cuda13", "demo"):
        assert not UNHASHED & pins((FOLDER / f"{name}.txt").read_text()).keys()
