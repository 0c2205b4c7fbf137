"""Runs docs/guides/peft.md: Python and shell, one snippet after the other."""

import asyncio
import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.client.conftest import KEY
from tuneserve_client import Client
from tuneserve_client.peft_archive import AdapterArchive
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.cli.local_server import LocalServer

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def place(server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESERVE_URL", server.url)
    monkeypatch.setenv("TUNESERVE_API_KEY", KEY)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)


def snippets(page: str) -> list[tuple[str, str]]:
    """Language and text of each snippet."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^```(python|sh)\n(.*?)^```", text, re.M | re.S)


def shell(script: str) -> str:
    ran = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_every_snippet_of_the_guide_runs_after_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, object] = {"BASE": str(TINY_MODEL)}
    found = snippets("guides/peft.md")
    assert [language for language, _ in found].count("sh") == 2 and len(found) == 7
    said = []
    for language, text in found:
        if language == "python":
            exec(compile(text, "docs/guides/peft.md", "exec"), names)
            monkeypatch.setenv("CHECKPOINT", str(names["path"]))
        else:
            said.append(shell(text))
    merged, imported = said
    assert "holds the model" in merged and (tmp_path / "merged/config.json").is_file()
    assert re.match(r"tinker://import-\w+/weights/theirs has rank 8 on tuneserve/tiny", imported)


def test_the_archive_of_the_api_page_is_accepted(tmp_path: Path, client: Client) -> None:
    (script,) = [text for _, text in snippets("api.md") if "checkpoints/import" in text]
    path = client.create_model(rank=4).save("here").result()
    client.download(path, "my-adapter")
    assert '"path":"tinker://import-' in shell(script)


def test_the_clients_archive_is_a_valid_tar(tmp_path: Path, client: Client) -> None:
    """The standard library's tarfile reads it as a stream."""
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 5000)
    archive = AdapterArchive(tmp_path)

    async def sent() -> bytes:
        return b"".join([piece async for piece in archive])

    for _ in range(2):  # a request may be sent again
        body = asyncio.run(sent())
        assert len(body) == archive.size
        with tarfile.open(fileobj=io.BytesIO(body), mode="r|") as opened:
            assert [(each.name, each.size) for each in opened] == [
                ("adapter_config.json", 2),
                ("adapter_model.safetensors", 5000),
            ]
