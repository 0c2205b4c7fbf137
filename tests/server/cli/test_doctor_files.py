"""Doctor recognises the owner of the files before the service starts."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.redis_server import RedisServer
from tests.server.cleanup.unused_case import A
from tests.server.cli.test_files import looked_at, running, silence
from tests.server.cli.test_keys import tuneserve
from tuneserve_engine.store.files import FileStore
from tuneserve_engine.store.files_mount import new_files
from tuneserve_engine.store.ownership import MARK, OWNER
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio


async def test_doctor_recognises_a_restored_copy_before_it_starts(tmp_path: Path) -> None:
    settings = ApiSettings(data_dir=tmp_path / "data")
    assert (await looked_at(settings))[0] == "OK"
    assert list(tmp_path.iterdir()) == []
    async with running(settings):
        pass
    shutil.copy(settings.store_file, tmp_path / "backup.db")
    async with running(settings) as unused:
        FileStore(settings.files_dir).write(A, {"a": b"x"})
        await unused.prove()
    assert (await looked_at(settings))[0] == "OK"
    shutil.copy(tmp_path / "backup.db", settings.store_file)
    level, text = await looked_at(settings)
    assert level == "WARN" and "older than its directory" in text
    async with running(settings) as unused:
        assert unused.problem and unused.problem.kind == "older"
    for path in settings.files_dir.glob(".of-*"):
        path.rmdir()
    assert (await looked_at(settings))[0] == "FAIL"


async def test_doctor_recognises_a_store_that_has_moved(tmp_path: Path) -> None:
    settings = ApiSettings(data_dir=tmp_path / "data")
    async with running(settings):
        pass
    settings.store_file.rename(tmp_path / "first.db")
    shutil.copy(tmp_path / "first.db", settings.store_file)
    level, text = await looked_at(settings)
    assert level == "WARN" and "copied, restored or moved" in text and "files adopt" in text
    silence(settings.files_dir)
    adopted = await tuneserve(settings.data_dir, "files", "adopt")
    assert adopted.exit_code == 0
    assert (await looked_at(settings))[0] == "OK"


async def test_doctor_recognises_an_empty_redis_by_the_files(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        settings = ApiSettings(data_dir=tmp_path / "data", store=server.url)
        assert (await looked_at(settings))[0] == "OK"
        async with running(settings):
            pass
        assert (await looked_at(settings))[0] == "OK"
        server.command("FLUSHALL")
        level, text = await looked_at(settings)
        assert level == "FAIL" and "is new or empty" in text
        assert server.command("DBSIZE").strip() == b":0"


async def test_an_unreachable_store_gives_no_verdict_on_the_files(tmp_path: Path) -> None:
    settings = ApiSettings(data_dir=tmp_path / "data")
    async with running(settings):
        pass
    settings.store_file.write_bytes(b"not a database" * 1000)
    found: Any = await looked_at(settings)
    assert found == (
        "WARN",
        "the owner of the files cannot be checked before the store is in order",
    )


async def test_a_bucket_is_adopted_and_examined_like_a_directory(
    tmp_path: Path, s3_url: str
) -> None:
    settings = ApiSettings(data_dir=tmp_path / "data", files_url=s3_url)
    assert await looked_at(settings) == ("OK", "no store uses the bucket of files yet")
    async with running(settings) as unused:
        files = new_files(settings)
        files.write(A, {"a": b"x"})
        await unused.prove()
    assert (await looked_at(settings))[1].startswith("the bucket of files belongs to the store; 0")
    settings.store_file.unlink()
    level, text = await looked_at(settings)
    assert level == "FAIL" and s3_url in text and "another --files-url" in text
    adopt = ("files", "adopt", "--files-url", s3_url)
    refused = await tuneserve(settings.data_dir, *adopt)
    assert refused.exit_code == 1 and "has an owner that was alive" in refused.output
    for note in files.notes(OWNER):
        files.remove_note(f"{OWNER}{note}")
    adopted = await tuneserve(settings.data_dir, *adopt)
    assert adopted.exit_code == 0, adopted.output
    assert f"{s3_url} belongs to the store" in adopted.output
    assert (await looked_at(settings))[0] == "OK"
    for note in files.notes(MARK):
        files.remove_note(f"{MARK}{note}")
    level, text = await looked_at(settings)
    assert level == "FAIL" and "the bucket of files lacks the mark" in text
