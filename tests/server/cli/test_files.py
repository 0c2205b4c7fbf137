"""``tuneserve files``, and the words of health and doctor about the owner of the files."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.cli.test_keys import socket, tuneserve
from tests.server.conftest import Api
from tuneserve_engine.store.files import FileStore
from tuneserve_engine.store.files_mount import new_files
from tuneserve_engine.store.open import open_store
from tuneserve_engine.store.ownership import LEASE_S, OWNER
from tuneserve_server.cleanup.unused_files import FEW, UnusedFiles
from tuneserve_server.cli.doctor_files import look_at_owner
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio
__all__ = ["socket"]


def fill(files: FileStore, count: int) -> None:
    for number in range(count):
        files.write(f"{number:032x}", {"a": b"x"})


def silence(files_dir: Path) -> None:
    """Set the owner's last sign of life to long ago."""
    for path in files_dir.glob(f"{OWNER}*"):
        then_s = path.stat().st_mtime - LEASE_S
        os.utime(path, (then_s, then_s))


@contextlib.asynccontextmanager
async def running(settings: ApiSettings) -> AsyncIterator[UnusedFiles]:
    """The state of an API process, without the API."""
    store = await open_store(settings)
    try:
        unused = UnusedFiles(store, new_files(settings))
        await unused.prove()
        yield unused
    finally:
        await store.close()


async def looked_at(settings: ApiSettings) -> tuple[str, str]:
    """The level and text of doctor's check while no service runs."""
    return await asyncio.to_thread(look_at_owner, settings, {})


# --- too many unused files ------------------------------------------------------------------------


async def test_many_unused_files_are_shown_and_released_by_a_command(
    api: Api, socket: Path, settings: ApiSettings
) -> None:
    fill(api.services.files, FEW + 1)
    await api.services.unused.clean(older_than_s=0)
    health = await api.get("/healthz")
    assert health["files"] == "kept" and "tuneserve files clean" in health["files_kept"]
    assert look_at_owner(settings, health) == ("WARN", health["files_kept"])
    assert "tuneserve_unused_files_kept 1.0" in (await api.http.get("/metrics")).text
    shown = await tuneserve(settings.data_dir, "files", "status")
    assert shown.exit_code == 0 and "the store names 17 of 17 files" in shown.output
    for path in settings.files_dir.glob("0*"):
        os.utime(path, (0, 0))
    cleaned = await tuneserve(settings.data_dir, "files", "clean", "--json")
    found = json.loads(cleaned.output)
    assert (found["files"], sum(found["quarantine"].values()), found["kept"]) == (0, 17, None)
    assert (await api.get("/healthz"))["files"] == "ok"
    shown = await tuneserve(settings.data_dir, "files", "status")
    assert "are cleaned up" in shown.output and "-allowed" in shown.output


# --- another owner --------------------------------------------------------------------------------


async def test_a_running_service_with_a_restored_store_adopts_its_files(
    api: Api, socket: Path, settings: ApiSettings
) -> None:
    (claim,) = settings.files_dir.glob(f"{OWNER}*")
    claim.rename(claim.with_name(claim.name.replace("-1-", "-9-")))  # the service had continued
    await api.services.unused.clean()
    health = await api.get("/healthz")
    assert health["status"] == "ok" and "older than its directory" in health["files_kept"]
    adopting = await tuneserve(settings.data_dir, "files", "adopt")
    assert adopting.exit_code == 1 and "has an owner that was alive" in adopting.output
    silence(settings.files_dir)
    adopting = await tuneserve(settings.data_dir, "files", "adopt", "--json")
    assert json.loads(adopting.output) == {"files": 0, "named": 0}
    assert (await api.get("/healthz"))["files"] == "ok"


async def test_a_new_store_adopts_old_files_before_its_service_starts(tmp_path: Path) -> None:
    settings = ApiSettings(data_dir=tmp_path / "data")
    async with running(settings) as unused:
        fill(FileStore(settings.files_dir), 2)
        await unused.prove()
    settings.store_file.unlink()
    level, text = await looked_at(settings)
    assert level == "FAIL" and "is new or empty" in text and "tuneserve files adopt" in text
    silence(settings.files_dir)
    adopted = await tuneserve(settings.data_dir, "files", "adopt")
    assert adopted.exit_code == 0 and "the store names 0 of them. The other 2" in adopted.output
    async with running(settings) as unused:
        assert unused.problem is None
    assert await looked_at(settings) == (
        "OK",
        "the files directory belongs to the store; 0 files are in quarantine",
    )
