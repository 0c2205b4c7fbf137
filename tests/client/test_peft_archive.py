"""Archives are unpacked as they arrive: whole or not at all, and only into their folder."""

import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tuneserve_client.peft_archive import unpack

pytestmark = pytest.mark.anyio

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 9}
LAST = "checkpoint_complete"


def packed(files: dict[str, bytes], **of_each: Any) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in of_each.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(data))
    return content.getvalue()


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def written(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


@pytest.mark.parametrize("size", [1, 511, 512, 700, 10**6])
async def test_files_are_unpacked_from_pieces_of_any_size(tmp_path: Path, size: int) -> None:
    await unpack(pieces(packed({**FILES, LAST: b""}), size), tmp_path / "new" / "folder")
    assert written(tmp_path / "new" / "folder") == FILES


async def test_an_archive_without_its_end_leaves_nothing(tmp_path: Path) -> None:
    whole = packed({**FILES, LAST: b""})
    for end in (0, 100, 512, 600, 2000, 512 * 7):
        with pytest.raises(ValueError, match="download it again"):
            await unpack(pieces(whole[:end], 300), tmp_path)
    with pytest.raises(ValueError, match="incomplete or damaged"):
        await unpack(pieces(packed(FILES), 300), tmp_path)
    assert written(tmp_path) == {}


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/evil", "..", "."])
async def test_no_file_is_written_outside_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(ValueError, match="not a plain file"):
        await unpack(pieces(packed({**FILES, name: b"x", LAST: b""}), 300), folder)
    assert written(folder) == {}
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
async def test_links_and_folders_are_refused(tmp_path: Path, kind: bytes) -> None:
    data = packed({"adapter_config.json": b""}, type=kind, linkname="/etc/passwd")
    with pytest.raises(ValueError, match="not a plain file"):
        await unpack(pieces(data, 300), tmp_path)
    assert written(tmp_path) == {}
