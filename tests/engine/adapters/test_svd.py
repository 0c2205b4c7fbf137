"""The base weights' decomposition is exact, stored whole or not at all, and never replaced."""

import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.engine.adapters.osft_case import config_of
from tests.engine.backend.jax.model.test_decoder import CONFIG
from tests.support.decoders import random_decoder
from tuneserve_engine.adapters.svd import BaseWeightSvd
from tuneserve_engine.adapters.svd_process import SvdProcess
from tuneserve_engine.backend.jax.adapters import device_svd as frozen
from tuneserve_engine.backend.jax.adapters.arrays import host_zeros, target_shapes
from tuneserve_engine.core.adapter import PROJECTIONS, AdapterConfig
from tuneserve_engine.core.errors import ServerError, UserError
from tuneserve_engine.process import permissions

SHAPES = {"q_proj": (2, 12, 8), "o_proj": (2, 8, 12), "up_proj": (3, 8, 8), "unembed": (8, 31)}
"""[L, D, F]. The unembedding has no layers and is left alone."""
DECOMPOSED = ("q_proj", "o_proj", "up_proj")
CRASHING = """
import json, os, sys
import numpy as np
from pathlib import Path
from tests.engine.adapters.test_svd import SHAPES, weights_of
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.adapters.svd import BaseWeightSvd

folder, dies = Path(sys.argv[1]), sys.argv[2]

def layers(name):
    for weight in weights_of(name):
        yield weight
        if name == dies:
            os._exit(7)

made = BaseWeightSvd(lambda: folder, SHAPES, layers)
made.prepare()
print(json.dumps(made.id))
"""


def weights_of(name: str) -> list[np.ndarray]:
    random = np.random.default_rng(list(SHAPES).index(name))
    return list(random.standard_normal(SHAPES[name]).astype(np.float32))


def made(folder: Path, layers: Any = weights_of) -> BaseWeightSvd:
    decomposition = BaseWeightSvd(lambda: folder, SHAPES, layers)
    decomposition.prepare()
    return decomposition


def files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Marks of each file that change if it is written again."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    stats = {str(path.relative_to(folder)): path.stat() for path in found}
    return {name: (s.st_ino, s.st_mtime_ns, s.st_size) for name, s in stats.items()}


@pytest.mark.parametrize("name", DECOMPOSED)
def test_directions_equal_numpys_with_the_weakest_first(name: str, tmp_path: Path):
    u, s, v = made(tmp_path).arrays(name)
    layers, inputs, outputs = SHAPES[name]
    assert {x.dtype for x in (u, s, v)} == {np.dtype(np.float32)}
    assert (u.shape, s.shape, v.shape) == ((layers, 8, outputs), (layers, 8), (layers, 8, inputs))
    assert (np.diff(s, axis=1) > 0).all()
    for layer, weight in enumerate(weights_of(name)):
        left, values, right = np.linalg.svd(weight.T.astype(np.float64), full_matrices=False)
        np.testing.assert_allclose(s[layer], values[::-1], rtol=1e-6)
        for rank in (1, 3, 8):  # a direction's sign is free, but the span of several is not
            mine, theirs = u[layer, :rank], left[:, -rank:]
            np.testing.assert_allclose(mine.T @ mine, theirs @ theirs.T, atol=1e-6)
            mine, theirs = v[layer, :rank], right[-rank:]
            np.testing.assert_allclose(mine.T @ mine, theirs.T @ theirs, atol=1e-6)
        np.testing.assert_allclose((u[layer].T * s[layer]) @ v[layer], weight.T, atol=1e-5)


def test_directions_of_tiny_singular_values_are_orthogonal_too(tmp_path: Path):
    """The weight has rank 5 in float32: three of its singular values are rounding."""
    random = np.random.default_rng(0)
    low = random.standard_normal((12, 5)) @ random.standard_normal((5, 8))
    weight = low.astype(np.float32)
    kept = BaseWeightSvd(lambda: tmp_path, {"q_proj": (1, 12, 8)}, lambda _: [weight])
    kept.prepare()
    u, s, v = (np.asarray(x[0], np.float64) for x in kept.arrays("q_proj"))
    assert s[2] < 1e-5 < s[3]
    np.testing.assert_allclose(u @ u.T, np.eye(8), atol=3e-7)
    np.testing.assert_allclose(v @ v.T, np.eye(8), atol=3e-7)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_weights_of_any_float_type_are_decomposed_exactly(dtype: Any, tmp_path: Path):
    def layers(name: str) -> list[np.ndarray]:
        return [weight.astype(dtype) for weight in weights_of(name)]

    u, s, v = made(tmp_path, layers).arrays("q_proj")
    for layer, weight in enumerate(layers("q_proj")):
        rebuilt = (u[layer].T * s[layer]) @ v[layer]
        np.testing.assert_allclose(rebuilt, weight.T.astype(np.float64), atol=2e-6)


def test_an_adapter_gets_as_many_directions_as_its_rank(tmp_path: Path):
    kept = made(tmp_path)
    for config, rank in ((config_of(3), 3), (config_of(1, unfreeze_ratio="0.25"), 2)):
        frozen = kept.frozen(config, "o_proj")
        np.testing.assert_array_equal(frozen.trainable_mask, [1.0] * rank + [0.0] * (8 - rank))
        np.testing.assert_array_equal(frozen.lowest(rank)[1], kept.arrays("o_proj")[1][:, :rank])


def test_progress_is_reported_weight_by_weight(tmp_path: Path):
    seen: list[tuple[int, bool, bool]] = []

    def layers(name: str) -> Any:
        for weight in weights_of(name):
            seen.append((kept.done, kept.is_whole, kept.is_kept))
            yield weight

    kept = BaseWeightSvd(lambda: tmp_path, SHAPES, layers)
    assert (kept.weights, kept.done, kept.is_whole, kept.is_kept) == (7, 0, False, False)
    kept.prepare()
    assert seen == [(done, False, False) for done in range(7)]
    assert (kept.done, kept.is_whole, kept.is_kept) == (7, True, True)
    again = BaseWeightSvd(lambda: tmp_path, SHAPES, layers)
    assert (again.done, again.is_whole, again.is_kept) == (0, False, True)
    again.prepare()
    assert (again.done, len(seen)) == (7, 7)


def run(folder: Path, dies: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-c", CRASHING, str(folder), dies],
        cwd=Path(__file__).parents[3],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_after_a_crash_only_missing_targets_are_decomposed(tmp_path: Path):
    with run(tmp_path, "o_proj") as process:
        process.communicate()
    assert process.returncode == 7
    before = files(tmp_path / "q_proj")
    assert set(before) == {"u.npy", "s.npy", "v.npy", "id", "xxh3"}
    assert not (tmp_path / "o_proj").exists()
    asked: list[str] = []

    def layers(name: str) -> list[np.ndarray]:
        asked.append(name)
        return weights_of(name)

    kept = BaseWeightSvd(lambda: tmp_path, SHAPES, layers)
    assert not kept.is_kept
    kept.prepare()
    assert asked == ["o_proj", "up_proj"]
    assert files(tmp_path / "q_proj") == before
    assert kept.id == made(tmp_path / "other").id
    assert {path.name for path in tmp_path.iterdir()} == {*DECOMPOSED, "other"}


def test_two_concurrent_processes_have_the_same_directions(tmp_path: Path):
    processes = [run(tmp_path, "") for _ in range(2)]
    ids = [json.loads(process.communicate()[0]) for process in processes]
    assert ids[0] == ids[1] == made(tmp_path).id
    assert {path.name for path in tmp_path.iterdir()} == set(DECOMPOSED)


def test_the_second_process_takes_the_stored_directions(tmp_path: Path):
    """The first process negates a weight, which shows whose directions are stored."""

    def negated(name: str) -> list[np.ndarray]:
        return [-weight for weight in weights_of(name)]

    first = BaseWeightSvd(lambda: tmp_path, SHAPES, negated)

    def late(name: str) -> list[np.ndarray]:
        first.prepare()
        return weights_of(name)

    second = made(tmp_path, late)
    assert second.id == first.id != made(tmp_path / "other").id
    for mine, theirs in zip(second.arrays("q_proj"), first.arrays("q_proj"), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert {path.name for path in tmp_path.iterdir()} == {*DECOMPOSED, "other"}


def test_threads_decompose_once(tmp_path: Path):
    asked: list[str] = []

    def layers(name: str) -> list[np.ndarray]:
        asked.append(name)
        return weights_of(name)

    kept = BaseWeightSvd(lambda: tmp_path, SHAPES, layers)
    threads = [threading.Thread(target=kept.prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == list(DECOMPOSED)


def test_files_are_never_replaced(tmp_path: Path):
    kept = made(tmp_path)
    before = files(tmp_path)

    def other(name: str) -> list[np.ndarray]:
        raise AssertionError(f"{name} is there")

    assert made(tmp_path, other).id == kept.id
    assert files(tmp_path) == before


def test_the_id_is_a_hash_of_the_contents(tmp_path: Path):
    def nudged(name: str) -> list[np.ndarray]:
        weights = weights_of(name)
        if name == "up_proj":
            weights[2][0, 0] *= 1.001
        return weights

    first, again, other = (
        made(tmp_path / folder, layers)
        for folder, layers in (("a", weights_of), ("b", weights_of), ("c", nudged))
    )
    assert first.id == again.id != other.id
    for target, is_same in (("q_proj", True), ("up_proj", False)):
        pairs = zip(first.arrays(target), other.arrays(target), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs) == is_same


def test_an_adapter_trained_beside_other_directions_is_refused(tmp_path: Path):
    kept = made(tmp_path)
    kept.check(config_of(3))
    kept.check(with_frozen(kept.id))
    with pytest.raises(UserError, match=rf"\(0123456789ab\) than this server has \({kept.id}\)"):
        kept.check(with_frozen("0123456789ab"))


def with_frozen(name: str) -> AdapterConfig:
    return replace(config_of(3), frozen=name)


def short(name: str) -> Sequence[np.ndarray]:
    return weights_of(name)[:-1]


def long(name: str) -> Sequence[np.ndarray]:
    return [*weights_of(name), weights_of(name)[0]]


def turned(name: str) -> Sequence[np.ndarray]:
    return [weight.T for weight in weights_of(name)]


@pytest.mark.parametrize("layers", [short, long, turned])
def test_weights_of_other_shapes_are_refused_and_leave_nothing(layers: Any, tmp_path: Path):
    with pytest.raises(ServerError, match="directions cannot be kept"):
        made(tmp_path, layers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_named(number: float, tmp_path: Path):
    def layers(name: str) -> list[np.ndarray]:
        weights = weights_of(name)
        weights[1][3, 4] = number
        return weights

    with pytest.raises(ServerError, match=r"decomposed \(q_proj of layer 1: .*use lora"):
        made(tmp_path, layers)
    assert list(tmp_path.iterdir()) == []


def test_files_of_another_shape_are_refused(tmp_path: Path):
    made(tmp_path)
    other = {**SHAPES, "o_proj": (2, 8, 16)}
    with pytest.raises(ServerError, match=r"o_proj has arrays of .* not .*\(2, 8, 16\).*remove it"):
        BaseWeightSvd(lambda: tmp_path, other, weights_of).prepare()


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", None], ids=["empty", "cut", "gone"])
def test_a_damaged_file_is_refused(content: bytes | None, tmp_path: Path):
    made(tmp_path)
    file = tmp_path / "o_proj" / "s.npy"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(ServerError, match="directions cannot be kept"):
        made(tmp_path)


@pytest.mark.parametrize("member", ["u.npy", "s.npy", "v.npy", "id", "xxh3"])
def test_no_flipped_bit_of_a_target_is_used(member: str, tmp_path: Path):
    made(tmp_path)
    file = tmp_path / "o_proj" / member
    data = file.read_bytes()
    random = np.random.default_rng(0)
    for at in map(int, random.integers(0, len(data), 40)):
        file.write_bytes(
            data[:at] + bytes([data[at] ^ (1 << int(random.integers(8)))]) + data[at + 1 :]
        )
        with pytest.raises(ServerError, match=str(tmp_path)):
            made(tmp_path).arrays("o_proj")
    file.write_bytes(data)
    made(tmp_path).arrays("o_proj")


def test_a_target_stored_by_a_release_without_checksums_is_used(tmp_path: Path):
    before = made(tmp_path)
    (tmp_path / "o_proj" / "xxh3").unlink()
    assert made(tmp_path).id == before.id
    np.testing.assert_array_equal(made(tmp_path).arrays("o_proj")[0], before.arrays("o_proj")[0])


def test_an_unwritable_folder_is_reported(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerError, match=r"cannot be kept in .*file.*ask the operator"):
        made(tmp_path / "file")


def test_a_decomposition_can_be_retried_after_an_error(tmp_path: Path):
    folder = tmp_path / "folder"
    folder.write_text("")
    kept = BaseWeightSvd(lambda: folder, SHAPES, weights_of)
    with pytest.raises(ServerError):
        kept.prepare()
    assert not kept.is_whole
    folder.unlink()
    kept.prepare()
    assert kept.is_whole


def full_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the disk when this target's ``v`` is written."""
    opens = permissions.open_shared

    def opened(path: Path, *args: Any, **options: Any) -> Any:
        is_full = path.name == "v.npy" and path.parent.name.startswith(f"{name}.")
        return Path("/dev/full").open("wb") if is_full else opens(path, *args, **options)

    monkeypatch.setattr(permissions, "open_shared", opened)


def test_a_full_disk_is_reported_and_leaves_no_half_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kept = BaseWeightSvd(lambda: tmp_path, SHAPES, weights_of)
    with monkeypatch.context() as patched:
        full_at("o_proj", patched)
        for _ in range(3):
            with pytest.raises(ServerError, match=r"No space left .* make room there, and ask aga"):
                kept.prepare()
            assert (kept.done, kept.weights) == (2, 7)
            assert {path.name for path in tmp_path.iterdir()} == {"q_proj"}
    kept.prepare()
    assert (kept.done, kept.id) == (7, made(tmp_path / "other").id)


def size_in(text: str) -> int:
    found = re.search(r"it has (\d+) bytes", text)
    assert found
    return int(found[1])


def test_a_decomposition_without_spare_disk_space_is_not_started(tmp_path: Path):
    def never(name: str) -> Any:
        raise AssertionError("it was begun")

    whole = made(tmp_path / "whole")
    size = sum(each.stat().st_size for each in (tmp_path / "whole").rglob("*.npy"))
    kept = BaseWeightSvd(lambda: tmp_path / "new", SHAPES, never, min_free_bytes=2**60)
    with pytest.raises(ServerError, match=r"it has (\d+) bytes, and .* \(min_free_bytes\)") as told:
        kept.prepare()
    assert size - 4096 < size_in(str(told.value)) <= size
    there = BaseWeightSvd(lambda: tmp_path / "whole", SHAPES, never, min_free_bytes=2**60)
    there.prepare()
    assert there.id == whole.id


def test_progress_after_a_failure_counts_the_stored_weights(tmp_path: Path):
    seen: list[int] = []

    def layers(name: str) -> Any:
        for layer, weight in enumerate(weights_of(name)):
            seen.append(kept.done)
            if name == "up_proj" and layer == 2 and len(seen) < 11:
                raise OSError("not now")
            yield weight

    kept = BaseWeightSvd(lambda: tmp_path, SHAPES, layers)
    for _ in range(2):
        with pytest.raises(ServerError, match="not now"):
            kept.prepare()
        assert kept.done == 4
    kept.prepare()
    assert seen == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6]
    assert kept.done == 7


def test_a_decomposition_is_at_work_only_while_it_computes(tmp_path: Path):
    seen: list[bool] = []

    def layers(name: str) -> list[np.ndarray]:
        seen.append(kept.is_at_work)
        if len(seen) == 2:
            raise OSError("not now")
        return weights_of(name)

    kept = BaseWeightSvd(lambda: tmp_path, SHAPES, layers)
    assert not kept.is_at_work
    with pytest.raises(ServerError):
        kept.prepare()
    assert not kept.is_at_work
    kept.prepare()
    assert not kept.is_at_work
    assert seen == [True] * 4


def test_requiring_the_directions_computes_nothing(tmp_path: Path):
    asked: list[str] = []

    def layers(name: str) -> list[np.ndarray]:
        asked.append(name)
        with pytest.raises(ServerError, match="not there yet; ask again in a moment"):
            kept.require()
        if len(asked) == 2:
            raise OSError("not now")
        return weights_of(name)

    kept = BaseWeightSvd(lambda: tmp_path, SHAPES, layers)
    for ask in (kept.require, lambda: kept.arrays("q_proj"), lambda: frozen_of(kept)):
        with pytest.raises(ServerError, match="not there yet; ask again in a moment"):
            ask()
    assert asked == []
    with pytest.raises(ServerError):
        kept.prepare()
    for ask in (kept.require, lambda: kept.arrays("q_proj"), lambda: frozen_of(kept)):
        with pytest.raises(ServerError, match=r"cannot be kept in .*not now; .* and ask again"):
            ask()
    assert asked == ["q_proj", "o_proj"]
    kept.prepare()
    kept.require()
    assert asked == ["q_proj", "o_proj", "o_proj", "up_proj"]


def frozen_of(kept: BaseWeightSvd) -> Any:
    return kept.frozen(config_of(3), "q_proj")


def test_requiring_the_directions_opens_the_stored_ones(tmp_path: Path):
    first = made(tmp_path)

    def other(name: str) -> list[np.ndarray]:
        raise AssertionError(f"{name} is there")

    kept = BaseWeightSvd(lambda: tmp_path, SHAPES, other)
    kept.require()
    assert (kept.is_whole, kept.id, kept.done) == (True, first.id, 7)
    (tmp_path / "o_proj" / "s.npy").write_bytes(b"")
    with pytest.raises(ServerError, match="directions cannot be kept"):
        BaseWeightSvd(lambda: tmp_path, SHAPES, other).require()


def test_targets_of_another_process_are_opened_while_a_thread_computes(tmp_path: Path):
    def late(name: str) -> list[np.ndarray]:
        if name == "up_proj":
            made(tmp_path)
            kept.require()
            np.testing.assert_array_equal(kept.arrays(name)[1], made(tmp_path).arrays(name)[1])
            assert kept.is_at_work
        return weights_of(name)

    kept = BaseWeightSvd(lambda: tmp_path, SHAPES, late)
    kept.prepare()
    assert (kept.done, kept.id) == (7, made(tmp_path).id)
    np.testing.assert_array_equal(kept.arrays("up_proj")[1], made(tmp_path).arrays("up_proj")[1])


def test_a_dead_writers_files_are_removed_before_computing(tmp_path: Path):
    with run(tmp_path, "q_proj") as process:
        process.communicate()
    left = {path.name for path in tmp_path.iterdir()}
    assert {name.split(".")[-1] for name in left} == {"partial", "lock"}
    seen: list[set[str]] = []

    def layers(name: str) -> list[np.ndarray]:
        seen.append({path.name for path in tmp_path.iterdir()})
        return weights_of(name)

    made(tmp_path, layers)
    assert len(seen) == 3
    assert not any(left & names for names in seen)


def test_a_living_writers_files_are_left_alone(tmp_path: Path):
    """Another process starts while this one is at work, and finishes first."""

    def layers(name: str) -> list[np.ndarray]:
        if name == "q_proj":
            mine = {path.name for path in tmp_path.iterdir()}
            with run(tmp_path, "") as process:
                process.communicate()
            assert process.returncode == 0
            assert {path.name for path in tmp_path.iterdir()} == mine | set(DECOMPOSED)
        return weights_of(name)

    kept = made(tmp_path, layers)
    assert {path.name for path in tmp_path.iterdir()} == set(DECOMPOSED)
    assert kept.id == made(tmp_path / "other").id


@pytest.mark.parametrize("gone", [["id"], ["id", "u.npy"], ["id", "u.npy", "s.npy", "v.npy"]])
def test_a_half_deleted_target_is_made_again(gone: list[str], tmp_path: Path):
    first = made(tmp_path)
    before = files(tmp_path / "q_proj")
    for name in gone:
        (tmp_path / "o_proj" / name).unlink()
    there: list[bool] = []

    def layers(name: str) -> list[np.ndarray]:
        there.append((tmp_path / name).exists())
        return weights_of(name)

    again = made(tmp_path, layers)
    assert there == [False]
    assert again.id == first.id
    assert files(tmp_path / "q_proj") == before
    assert {path.name for path in tmp_path.iterdir()} == set(DECOMPOSED)


def test_too_little_memory_is_reported_with_the_need_of_a_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ten arrays of 1024 * 1024 numbers of 8 bytes. The kernel kills a process that takes too much.

    A retry with enough memory succeeds.
    """
    started = SvdProcess._started

    def killed(self: SvdProcess) -> Any:
        process = started(self)
        process.kill()
        return process

    weights = [np.zeros((1024, 1024), np.float32)]
    kept = BaseWeightSvd(lambda: tmp_path, {"q_proj": (1, 1024, 1024)}, lambda _: weights)
    with monkeypatch.context() as patched:
        patched.setattr(SvdProcess, "_started", killed)
        with pytest.raises(ServerError, match=r"takes up to 80\.0 MiB .*ask again, or use lora"):
            kept.prepare()
    assert list(tmp_path.iterdir()) == []
    kept.prepare()
    assert kept.is_whole


def test_a_truncated_file_is_named(tmp_path: Path):
    made(tmp_path)
    path = tmp_path / "o_proj" / "v.npy"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ServerError, match=r"/o_proj cannot be read \(.*\): remove it"):
        made(tmp_path)


def test_the_host_holds_the_padded_arrays_of_one_target_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = random_decoder(CONFIG)
    shapes = target_shapes(CONFIG)
    shared = frozen.DeviceSvd(tmp_path, lambda name: np.asarray(model.layers[name][...]), shapes, 4)
    shared.decomposition.prepare()
    given: list[weakref.ref[Any]] = []
    most = 0

    def counted(shape: tuple[int, ...]) -> Any:
        nonlocal most
        array = host_zeros(shape)
        given.append(weakref.ref(array))
        most = max(most, sum(each() is not None for each in given))
        return array

    monkeypatch.setattr(frozen, "host_zeros", counted)
    found = shared.on_device(config_of(3))
    assert found is not None
    assert set(found) == set(PROJECTIONS)
    assert len(given) == 3 * len(PROJECTIONS)
    assert most <= 3


def test_an_unexpected_error_is_remembered_as_the_reason_too(tmp_path: Path):
    def broken(name: str) -> Any:
        raise RuntimeError("the device is on fire")

    kept = BaseWeightSvd(lambda: tmp_path, SHAPES, broken)
    with pytest.raises(RuntimeError, match="on fire"):
        kept.prepare()
    with pytest.raises(ServerError, match="could not be computed; ask the operator"):
        kept.require()
