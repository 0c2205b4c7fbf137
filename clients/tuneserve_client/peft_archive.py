"""A PEFT adapter's folder as a tar archive, read during the upload and written as it arrives."""

import asyncio
import io
import os
import re
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import httpx

CONTENT_TYPE = "application/x-tar"

_MEMBERS = ("adapter_config.json", "adapter_model.safetensors")
_PLAIN = re.compile(r"\w[\w.-]*")
_PIECE_BYTES = 2**20
_COMPLETE = "checkpoint_complete"
"""The last file of a downloaded archive."""


class AdapterArchive(httpx.AsyncByteStream):
    """An archive of the two files that ``save_pretrained`` writes.

    It can be read several times, so a request can be retried. Raises ``ValueError`` for a folder
    without the files.
    """

    def __init__(self, folder: str | Path) -> None:
        self._paths = [Path(folder) / name for name in _MEMBERS]
        for path in self._paths:
            if not path.is_file():
                raise ValueError(
                    f"{folder} has no {path.name}; give the folder that PEFT's save_pretrained "
                    "wrote (with safe_serialization, its default: pickled weights are refused)"
                )
        self._sizes = [path.stat().st_size for path in self._paths]
        blocks = 2 + sum(1 + -(-size // tarfile.BLOCKSIZE) for size in self._sizes)
        self.size = blocks * tarfile.BLOCKSIZE

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for path, size in zip(self._paths, self._sizes, strict=True):
            info = tarfile.TarInfo(path.name)
            info.size = size
            yield info.tobuf(tarfile.USTAR_FORMAT)
            with path.open("rb") as file:
                while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                    yield piece
                if file.tell() != size or os.fstat(file.fileno()).st_size != size:
                    raise ValueError(f"{path} changed while it was sent; import it again")
            yield bytes(-size % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)


async def unpack(pieces: AsyncIterator[bytes], folder: Path) -> None:
    """Write the files of an archive into the folder, once all of them have arrived.

    Raises ``ValueError`` for an incomplete archive, or one with anything but files with plain
    names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reader, partial = _Reader(pieces), dict[Path, Path]()
    try:
        while True:
            info = tarfile.TarInfo.frombuf(
                await reader.exactly(tarfile.BLOCKSIZE), "utf-8", "strict"
            )
            if not info.isfile() or not _PLAIN.fullmatch(info.name):
                raise ValueError(f"the archive has {info.name!r}, which is not a plain file")
            if info.name == _COMPLETE:
                break  # blocks of zeros follow
            path = folder / f".{info.name}.part"
            partial[path] = folder / info.name
            with path.open("wb") as file:
                await reader.copy(info.size, file)
            await reader.exactly(-info.size % tarfile.BLOCKSIZE)
        for path, final in partial.items():
            path.replace(final)
    except tarfile.HeaderError as error:
        raise ValueError(
            f"the archive is incomplete or damaged: {error}; download it again"
        ) from error
    finally:
        for path in partial:
            path.unlink(missing_ok=True)


class _Reader:
    """A reader of given sizes from pieces of any size."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    async def exactly(self, size: int) -> bytes:
        found = io.BytesIO()
        await self.copy(size, found)
        return found.getvalue()

    async def copy(self, size: int, file: BinaryIO) -> None:
        while size > 0:
            if not self._left:
                self._left = await anext(self._pieces, b"")
                if not self._left:
                    raise ValueError("the archive ends too early; download it again")
            taken, self._left = self._left[:size], self._left[size:]
            file.write(taken)
            size -= len(taken)
