"""Every changed bit of a file is detected: recovery points, checkpoints of every kind, exports."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, save

from tests.engine.adapters.test_checkpoint import CONFIG, assert_same_bits, on_disk, state, tensors
from tests.engine.adapters.test_peft_import import CONFIG as PEFT_CONFIG
from tests.engine.adapters.test_peft_import import INFO as PEFT_INFO
from tests.engine.adapters.test_peft_import import checked
from tests.engine.adapters.test_peft_import import tensors as peft_tensors
from tests.engine.worker.models.test_recovery import OFTEN, finish_round, pointed
from tests.support.worker_bench import Bench, run
from tuneserve_engine.adapters import checkpoint, export_files
from tuneserve_engine.adapters.checkpoint_format import MEMBER, metadata_of
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.adapters.tensor_file import Damaged
from tuneserve_engine.backend.base import DeviceFailed
from tuneserve_engine.backend.jax.adapters.spill_files import SpillFile
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import FileDamaged
from tuneserve_engine.store.base import RecoveryPoint

PLACES = 200
CONFIG_NAME, WEIGHTS_NAME = export_files.CONFIG, export_files.WEIGHTS


def flips(data: bytes, first: int = 0, count: int = PLACES) -> Iterator[bytes]:
    """The content with one bit changed, at random positions from ``first`` on.

    Half of the positions are in the header, which random positions would rarely hit.
    """
    rng = np.random.default_rng(first)
    header = 8 + int.from_bytes(data[:8], "little")
    places = [*rng.integers(0, header, count // 2), *rng.integers(header, len(data), count // 2)]
    for at in map(int, places):
        yield data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]


def accumulating() -> AdapterState:
    saved = state()
    return AdapterState(
        saved.config,
        saved.weights,
        7,
        saved.first_moment,
        saved.second_moment,
        accumulator=tensors(CONFIG, 3),
    )


def osft() -> AdapterState:
    """A state with arbitrary arrays. The file format knows names and numbers only."""
    config = AdapterConfig(3, 1.0, 0, kind="osft", options={"form": "factors"}, frozen="abc")
    rng = np.random.default_rng(4)
    arrays = {f"q_proj.{part}": rng.standard_normal((2, 3, 8)).astype("f4") for part in "USV"}
    return AdapterState(config, arrays, 2, arrays, arrays)


STATES: dict[str, Callable[[], AdapterState]] = {
    "recovery point": accumulating,
    "training checkpoint": state,
    "sampler checkpoint": lambda: state(moments=False),
    "osft": osft,
}


@pytest.mark.parametrize("of", STATES)
def test_no_flipped_bit_of_a_state_is_loaded(tmp_path: Path, of: str) -> None:
    saved = STATES[of]()
    name = "tinker://m/weights/a"
    on_disk(tmp_path, checkpoint.to_members(saved, "base", name=name))
    path = tmp_path / MEMBER
    data = path.read_bytes()
    for changed in flips(data):
        path.write_bytes(changed)
        with pytest.raises(FileDamaged, match=f"{tmp_path.name}/{MEMBER}: .*; load another"):
            checkpoint.read_checkpoint(tmp_path, "base")
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FileDamaged, match=f"checkpoint {name} is damaged.* have its checksum"):
        checkpoint.read_checkpoint(tmp_path, "base")
    path.write_bytes(data)
    loaded = checkpoint.read_checkpoint(tmp_path, "base")
    for group in ("weights", "first_moment", "second_moment", "accumulator"):
        assert_same_bits(getattr(loaded, group), getattr(saved, group))


def test_no_flipped_bit_of_an_imported_adapter_is_loaded(tmp_path: Path) -> None:
    data = save(peft_tensors(("q_proj", "unembed")))
    targets = {"target_modules": ["q_proj", "lm_head"]}
    adapter = checked(tmp_path, data, PEFT_CONFIG | targets)
    adapter.write(tmp_path / MEMBER)
    path = tmp_path / MEMBER
    for changed in flips(path.read_bytes()):
        path.write_bytes(changed)
        with pytest.raises(FileDamaged):
            checkpoint.read_checkpoint(tmp_path, PEFT_INFO.name)


@pytest.mark.parametrize("member", [CONFIG_NAME, WEIGHTS_NAME])
def test_no_flipped_bit_of_an_export_is_sent(tmp_path: Path, member: str) -> None:
    members = checkpoint.peft_members(state(), "base")
    on_disk(tmp_path, members)
    for name in members:
        export_files.check_member(tmp_path, name)
    path = tmp_path / member
    data = path.read_bytes()
    is_config = member == CONFIG_NAME
    places = flips_anywhere(data) if is_config else flips(data)
    for changed in places:
        path.write_bytes(changed)
        with pytest.raises(Damaged):
            export_files.check_member(tmp_path, member)


def flips_anywhere(data: bytes) -> Iterator[bytes]:
    rng = np.random.default_rng(1)
    for at in map(int, rng.integers(0, len(data), PLACES)):
        yield data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]


def test_files_of_releases_without_checksums_are_read_and_sent(tmp_path: Path) -> None:
    saved = state(moments=False)
    old = save(
        {f"weights/{n}": x for n, x in saved.weights.items()}, metadata_of(CONFIG, "base", 0)
    )
    (tmp_path / MEMBER).write_bytes(old)
    assert_same_bits(checkpoint.read_checkpoint(tmp_path, "base").weights, saved.weights)
    (tmp_path / WEIGHTS_NAME).write_bytes(save({"x": np.zeros(2, "f4")}, {"format": "pt"}))
    (tmp_path / CONFIG_NAME).write_bytes(b"{}")
    for member in (WEIGHTS_NAME, CONFIG_NAME, "adapter_model.safetensors.age"):
        export_files.check_member(tmp_path, member)


def test_a_file_with_its_checksums_removed_is_not_taken_for_an_old_one(tmp_path: Path) -> None:
    data = checkpoint.to_members(state(), "base", name="tinker://m/weights/a")[MEMBER]
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for missing in ("xxh3", "header_xxh3"):
        kept = {k: v for k, v in header["__metadata__"].items() if k != missing}
        text = json.dumps(header | {"__metadata__": kept}).encode()
        (tmp_path / MEMBER).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
        with pytest.raises(FileDamaged, match="header"):
            checkpoint.read_checkpoint(tmp_path, "base")


def test_other_libraries_read_a_file_with_checksums(tmp_path: Path) -> None:
    saved = state()
    on_disk(tmp_path, checkpoint.to_members(saved, "base"))
    with safe_open(tmp_path / MEMBER, framework="numpy") as file:
        assert file.metadata()["step"] == "7"
    found = load((tmp_path / MEMBER).read_bytes())
    weights = {n.removeprefix("weights/"): x for n, x in found.items() if n.startswith("weights/")}
    assert_same_bits(weights, saved.weights)


def test_no_flipped_bit_of_a_spilled_adapter_is_loaded(tmp_path: Path) -> None:
    page = SpillFile.write(tmp_path / "1", accumulating())
    assert_same_bits(page.read().weights, state().weights)
    data = page.path.read_bytes()
    for changed in flips(data, count=40):
        page.path.write_bytes(changed)
        with pytest.raises(DeviceFailed, match="could not be read"):
            page.read()


def test_a_flipped_bit_in_a_recovery_point_costs_replay_and_changes_no_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bits flip at random places of the newest point, again and again during training."""
    rounds = 20
    states: list[list[list[Any]]] = [[], []]

    async def train_on(bench: Bench, flip: bool) -> None:
        rng = np.random.default_rng(7)
        damaged: set[str] = set()
        await bench.ok(await bench.create("a"))
        await pointed(bench)
        for number in range(rounds):
            states[flip].append(await finish_round(bench, "a"))
            if not flip:
                continue
            points = await undamaged_points(bench, damaged)
            await bench.kill()
            path = bench.root / "files" / points[0].file_id / MEMBER
            data = bytearray(path.read_bytes())
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
            path.write_bytes(data)
            damaged.add(points[0].file_id)
            bench.start()
            assert caplog.text.count("and the log take its place") == number

    for flip in (False, True):
        root = tmp_path / str(flip)
        run(root, lambda bench, flip=flip: train_on(bench, flip), OFTEN)  # type: ignore[misc]
    assert states[0] == states[1]


async def undamaged_points(bench: Bench, damaged: set[str]) -> list[RecoveryPoint]:
    """The two stored points, once this test has damaged the files of neither."""
    while True:
        await pointed(bench, count=2)
        points = await bench.store.recovery_points(bench.worker.session.epoch, "a")
        if damaged.isdisjoint(point.file_id for point in points):
            return points
        await asyncio.sleep(0.01)
