"""A PEFT adapter's folder as the body of a request: a tar archive, read from disk as it is sent."""

import asyncio
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

CONTENT_TYPE = "application/x-tar"

_MEMBERS = ("adapter_config.json", "adapter_model.safetensors")
_PIECE_BYTES = 2**20


class AdapterArchive(httpx.AsyncByteStream):
    """The two files that ``save_pretrained`` writes. Can be read again, for a request that is sent
    again. Raises ``ValueError`` for a folder without them."""

    def __init__(self, folder: str | Path) -> None:
        self._paths = [Path(folder) / name for name in _MEMBERS]
        for path in self._paths:
            if not path.is_file():
                raise ValueError(
                    f"{folder} has no {path.name}; name the folder that PEFT's save_pretrained "
                    "wrote (with safe_serialization, its default: pickled weights are not taken)"
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
