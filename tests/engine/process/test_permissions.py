"""The service's files are private to its own user, under any umask."""

import asyncio
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.adapters.test_checkpoint import state
from tests.engine.adapters.test_peft_import import checked, save, tensors
from tests.engine.adapters.test_svd import made
from tuneserve_engine.adapters import checkpoint
from tuneserve_engine.adapters.checkpoint_format import MEMBER
from tuneserve_engine.backend.jax.adapters.spill_files import SpillFile, SpillFolder
from tuneserve_engine.backend.jax.programs.cache import _write
from tuneserve_engine.process import permissions
from tuneserve_engine.process.lock import lock_name
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store.files import FileStore, new_file_id
from tuneserve_engine.store.open import open_store, settle_permissions


@pytest.fixture(params=[0o022, 0o000], ids=["umask 022", "umask 000"])
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)
    permissions.share_with_group(False)


def modes(root: Path) -> dict[str, str]:
    """Permissions of everything below the directory."""
    found = {}
    for path in root.rglob("*"):
        found[str(path.relative_to(root))] = f"{stat.S_IMODE(path.lstat().st_mode):o}"
    return found


def write_everything(root: Path, folder: Path) -> SpillFolder:
    """Write every kind of file that processes leave in a data directory."""
    files = FileStore(root / "files")
    files.write(new_file_id(), checkpoint.to_members(state(), "base"))
    files.write(new_file_id(), checkpoint.peft_members(state(), "base"))
    with files.staging() as staged:
        adapter = checked(folder, save(tensors()))
        adapter.write(staged / MEMBER)
        files.publish(staged, new_file_id())
    unused = new_file_id()
    files.write(unused, checkpoint.to_members(state(), "base"))
    files.set_aside(unused, "20260101T000000Z")
    files.leave_note(".of-a")
    lock_name(root, "worker", timeout_s=0).close()
    made(root / "decompositions" / "abc")
    permissions.make_folder(root / "compiled")
    _write(root / "compiled" / "a.program", b"code")
    pages = SpillFolder(root / "pages")
    SpillFile.write(pages.path / "1", state())
    return pages


async def write_store(root: Path) -> dict[str, str]:
    store = await open_store(CommonSettings(data_dir=root, store_reserve_bytes=4096))
    await store.secret()
    found = modes(root)
    await store.close()
    return found


@pytest.mark.usefixtures("_umask")
def test_every_file_is_private_to_its_owner(tmp_path: Path) -> None:
    root = tmp_path / "new" / "data"
    # first, because a new store requires a directory without files
    found = asyncio.run(write_store(root))
    pages = write_everything(root, tmp_path)
    found |= modes(tmp_path / "new")
    assert len(found) > 30 and {"store.db", "store.db-wal", "store.reserve"} <= set(found)
    assert any(name.endswith(".page") for name in found)
    for name, mode in found.items():
        folders = {root / name, root.parent / name}
        assert mode == ("700" if any(map(Path.is_dir, folders)) else "600"), f"{name} has {mode}"
    del pages


@pytest.mark.usefixtures("_umask")
def test_with_group_access_the_group_can_read_and_write(tmp_path: Path) -> None:
    settle_permissions(CommonSettings(data_dir=tmp_path, group_access=True))
    permissions.make_folder(tmp_path / "data")
    write_everything(tmp_path / "data", tmp_path)
    for name, mode in modes(tmp_path / "data").items():
        if name.split("/")[0] in ("files", "decompositions"):
            is_folder = (tmp_path / "data" / name).is_dir()
            assert mode == ("2770" if is_folder else "660"), f"{name} has {mode}"
        elif name.split("/")[0] in ("compiled", "pages"):
            assert mode in ("700", "600"), f"{name} has {mode}"


def test_a_start_narrows_the_permissions_of_the_services_own_folders_only(tmp_path: Path) -> None:
    for name in ("files", "compiled", "pages", "decompositions", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    tmp_path.chmod(0o755)
    settle_permissions(CommonSettings(data_dir=tmp_path))
    wide = {name for name, mode in modes(tmp_path).items() if mode != "700"}
    assert wide == {"mine"}
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_start_narrows_the_permissions_of_file_folders_anywhere(tmp_path: Path) -> None:
    """Earlier releases left them readable to all. The directory itself is the operator's."""
    root = tmp_path / "shared"
    ours = [root / ("a" * 32), root / "quarantine" / "20260101T000000Z" / ("b" * 32)]
    other = root / "mine"
    for each in (*ours, other):
        each.mkdir(parents=True)
        each.chmod(0o755)
    settings = {"data_dir": tmp_path / "data", "files_dir": root}
    settle_permissions(CommonSettings(**settings, group_access=True))  # type: ignore[arg-type]
    assert {stat.S_IMODE(each.stat().st_mode) for each in ours} == {0o755}
    settle_permissions(CommonSettings(**settings))  # type: ignore[arg-type]
    assert {stat.S_IMODE(each.stat().st_mode) for each in ours} == {0o700}
    assert stat.S_IMODE(other.stat().st_mode) == 0o755


def test_a_link_in_place_of_a_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere").chmod(0o755)
    (tmp_path / "pages").symlink_to("elsewhere")
    settle_permissions(CommonSettings(data_dir=tmp_path))
    assert permissions.open_to(tmp_path / "elsewhere") == "0755"


def test_spill_files_work_as_before(tmp_path: Path) -> None:
    page = SpillFile.write(tmp_path / "1", state())
    np.testing.assert_array_equal(page.read().weights["q_proj.A"], state().weights["q_proj.A"])
