"""Compiled programs on disk are found by processes of the same numerics. Damage is detected."""

import hashlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tuneserve_engine.backend.jax.programs.cache import ProgramCache
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry

ONES = np.ones(3, np.float32)
USE = """
import sys, jax, numpy as np
from pathlib import Path
from tuneserve_engine.backend.jax.programs.cache import ProgramCache
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
np.asarray(jax.jit(lambda x: x - 1)(np.float32(1)))  # settles that JAX's own cache is used
def steps(x, y):
    print("traced")
    return jax.lax.fori_loop(0, 5, lambda i, x: x.at[i].set(x[i] @ y + 1), x), (y @ y).sum()
program = ProgramRegistry(ProgramCache(Path(sys.argv[1]), sys.argv[2])).add_program(
    "steps", steps, use="tests", donate=(0,)
)
x = jax.numpy.full((8, 16, 16), 0.1, np.float32)
done, total = program("key", x, np.eye(16, dtype=np.float32) / 3)
print(x.is_deleted(), np.asarray(done).tobytes().hex(), float(total))
"""


def used(folder: Path, program_id: str = "n", **environment: str) -> list[str]:
    """The output of a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", USE, str(folder), program_id],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def programs(folder: Path, seen: list[str], program_id: str = "n") -> Any:
    def double(x: Any) -> Any:
        seen.append("traced")
        return x + x

    return ProgramRegistry(ProgramCache(folder, program_id)).add_program(
        "double", double, use="tests"
    )


def test_another_process_finds_the_program_and_gets_the_same_bits(tmp_path: Path) -> None:
    first, *others = (used(tmp_path) for _ in range(3))
    assert first[0] == "traced" and first[1].startswith("True ")
    assert others == [first[1:]] * 2


def test_jaxs_own_cache_is_not_used_beside_it(tmp_path: Path) -> None:
    """On a CPU, a program from JAX's cache runs, but not once it is stored and read again."""
    own = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax")}
    first = used(tmp_path / "first", **own)
    used(tmp_path / "second", **own)
    assert used(tmp_path / "second", **own) == first[1:]


def test_a_program_of_another_program_id_is_not_found(tmp_path: Path) -> None:
    seen: list[str] = []
    for program_id in ("one", "other", "one"):
        programs(tmp_path, seen, program_id)("key", ONES)
    assert seen == ["traced"] * 2


def test_keys_and_shapes_are_distinguished(tmp_path: Path) -> None:
    seen: list[str] = []
    for _ in range(2):
        for key, size in (("a", 3), ("b", 3), ("b", 4)):
            program = programs(tmp_path, seen)
            np.testing.assert_array_equal(program(key, np.ones(size, np.float32)), [2.0] * size)
    assert seen == ["traced"] * 3


def test_programs_without_arguments_are_distinguished_by_their_results(tmp_path: Path) -> None:
    """A worker with another plan has buffers of other sizes under the same names and keys."""
    for size in (2, 3):
        program = ProgramRegistry(ProgramCache(tmp_path, "n")).add_program(
            "zeros", partial(jnp.zeros, size), use="tests"
        )
        assert program(()).shape == (size,)


def test_names_and_structures_are_distinguished(tmp_path: Path) -> None:
    seen: list[str] = []
    for name, argument in (("one", {"a": ONES}), ("other", {"a": ONES}), ("one", {"b": ONES})):

        def run(x: Any, name: str = name) -> Any:
            seen.append(name)
            return sum(x.values()) + float(name == "other")

        program = ProgramRegistry(ProgramCache(tmp_path, "n")).add_program(name, run, use="tests")
        np.testing.assert_array_equal(program("key", argument), ONES + (name == "other"))
    assert seen == ["one", "other", "one"]


def test_the_program_cache_leaves_the_reserved_disk_space_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = ProgramCache(tmp_path, "n", min_free_bytes=2**60)
    program = ProgramRegistry(kept).add_program("double", lambda x: x + x, use="tests")
    np.testing.assert_array_equal(program("key", ONES), ONES + ONES)
    assert list(tmp_path.iterdir()) == []
    assert "cannot be kept" in caplog.text and "(min_free_bytes)" in caplog.text


def test_a_program_first_used_after_ready_counts_though_it_was_cached(tmp_path: Path) -> None:
    """Otherwise a request without a declared program would be noticed only once."""
    late = []
    for _ in range(2):
        programs = ProgramRegistry(ProgramCache(tmp_path, "n"))
        program = programs.add_program("double", lambda x: x + x, use="tests")
        program.declare("declared", ONES)
        programs.compile_ahead(threads=1)
        assert programs.wait(60)
        program("declared", ONES)
        assert programs.compilations_after_ready == 0
        program("forgotten", np.ones(5, np.float32))
        late.append(programs.compilations_after_ready)
    assert late == [1, 1]


UNREADABLE = b"no pickle"
DAMAGED = [b"", b"x" * 100, hashlib.sha256(UNREADABLE).digest() + UNREADABLE, None]


@pytest.mark.parametrize("content", DAMAGED, ids=["empty", "other", "unreadable", "cut"])
def test_a_damaged_file_is_compiled_again_and_replaced(
    tmp_path: Path, content: bytes | None
) -> None:
    seen: list[str] = []
    programs(tmp_path, seen)("key", ONES)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    for _ in range(2):
        np.testing.assert_array_equal(programs(tmp_path, seen)("key", ONES), [2, 2, 2])
    assert seen == ["traced"] * 2
    assert list(tmp_path.iterdir()) == [path]


def test_an_unusable_folder_only_costs_compilation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "file"
    place.write_text("no directory")
    seen: list[str] = []
    for _ in range(2):
        np.testing.assert_array_equal(programs(place, seen)("key", ONES), [2, 2, 2])
    assert seen == ["traced"] * 2
    assert "cannot be kept" in caplog.text
