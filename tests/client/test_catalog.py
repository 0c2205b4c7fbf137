"""Paged listings and cached tokenizers, against a server that counts the requests."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tuneserve_client import AsyncClient, NotFound
from tuneserve_client.paths import split_path
from tuneserve_engine.settings.common import TINY_MODEL

pytestmark = pytest.mark.anyio


class Server:
    """A server with a tokenizer under ``tag``, and 1,234 checkpoints."""

    def __init__(self) -> None:
        self.tag = '"a"'
        self.answered: list[int] = []
        self.offsets: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/tokenizer"):
            response = self._tokenizer(request)
            self.answered.append(response.status_code)
            return response
        offset, limit = (int(request.url.params[name]) for name in ("offset", "limit"))
        self.offsets.append(request.url.params["offset"])
        return httpx.Response(
            200,
            json={
                "checkpoints": [_checkpoint(n) for n in range(offset, min(offset + limit, 1234))],
                "cursor": {"offset": offset, "limit": limit, "total_count": 1234},
            },
        )

    def _tokenizer(self, request: httpx.Request) -> httpx.Response:
        path = TINY_MODEL / request.url.params["file"]
        if not path.exists():
            return httpx.Response(404, json={"detail": "none", "code": "not_found"})
        if request.headers.get("If-None-Match") == self.tag:
            return httpx.Response(304)
        return httpx.Response(200, content=path.read_bytes(), headers={"ETag": self.tag})


def _checkpoint(number: int) -> dict[str, Any]:
    return {
        "checkpoint_id": f"weights/{number}",
        "checkpoint_type": "training",
        "time": "2026-01-01T00:00:00Z",
        "tinker_path": f"tinker://s:train:0/weights/{number}",
    }


def connect(server: Server, cache_dir: Path) -> AsyncClient:
    transport = httpx.MockTransport(server)
    return AsyncClient("http://server", "tml-a", transport=transport, cache_dir=cache_dir)


async def test_a_tokenizer_is_sent_once_until_it_changes(tmp_path: Path) -> None:
    server = Server()
    async with connect(server, tmp_path) as client:
        first = await client.tokenizer("tiny")
        assert await client.tokenizer("tiny") is first
    # 404: the chat template is in the config, not in its own file
    assert server.answered == [200, 200, 404]
    async with connect(server, tmp_path) as client:
        again = await client.tokenizer("tiny")
    assert server.answered[3:] == [304, 304, 404]
    messages = [{"role": "user", "content": "Hi"}]
    assert again.render(messages) == first.render(messages)
    server.tag = '"b"'
    async with connect(server, tmp_path) as client:
        await client.tokenizer("tiny")
    assert server.answered[6:] == [200, 200, 404]


async def test_a_tokenizer_cache_that_cannot_be_written_or_read_is_ignored(tmp_path: Path) -> None:
    server = Server()
    nowhere = tmp_path / "file"
    nowhere.write_text("not a folder")
    async with connect(server, nowhere) as client:
        assert (await client.tokenizer("tiny")).encode("a")
    async with connect(server, tmp_path) as client:
        await client.tokenizer("tiny")
    for kept in (tmp_path / "tokenizers").iterdir():
        kept.write_bytes(b"\xff\xfe")
    async with connect(server, tmp_path) as client:
        assert (await client.tokenizer("tiny")).encode("a")
    assert 304 not in server.answered


async def test_a_listing_reads_all_pages(tmp_path: Path) -> None:
    server = Server()
    async with connect(server, tmp_path) as client:
        found = await client.checkpoints()
    assert [each.checkpoint_id for each in found] == [f"weights/{n}" for n in range(1234)]
    assert server.offsets == ["0", "500", "1000"]


async def test_a_missing_tokenizer_is_requested_again(tmp_path: Path) -> None:
    calls = []

    def absent(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.params["base_model"])
        return httpx.Response(404, json={"detail": "none", "code": "not_found"})

    transport = httpx.MockTransport(absent)
    async with AsyncClient("http://server", "tml-a", transport=transport) as client:
        for _ in range(2):
            with pytest.raises(NotFound):
                await client.tokenizer("tiny")
    assert calls == ["tiny", "tiny"]


@pytest.mark.parametrize(
    "path", ["weights/a", "tinker://m/weights", "tinker://m/weights/a/b", "tinker:///weights/a", ""]
)
def test_a_malformed_checkpoint_path_is_a_value_error(path: str) -> None:
    with pytest.raises(ValueError, match="tinker://<model>/<kind>/<name>"):
        split_path(path)
