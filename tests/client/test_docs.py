"""Documentation that runs: docstrings and docs/sdk.md, against the real service."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import tuneserve_client
from tests.client.conftest import KEY
from tuneserve_client import Client
from tuneserve_server.cli.local_server import LocalServer

ROOT = Path(__file__).parents[2]
MODULES = ("sync", "data", "progress_bars")


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_print_what_they_show(
    name: str, server: LocalServer, client: Client
) -> None:
    module = importlib.import_module(f"tuneserve_client.{name}")
    known = {each: getattr(tuneserve_client, each) for each in tuneserve_client.__all__}
    found = doctest.testmod(module, extraglobs={**known, "url": server.url, "client": client})
    assert found.attempted > 0
    assert found.failed == 0


def test_every_docstring_with_examples_is_run() -> None:
    folder = Path(tuneserve_client.__file__).parent
    with_examples = {path.stem for path in folder.glob("*.py") if ">>> " in path.read_text()}
    assert with_examples == set(MODULES)


def test_every_snippet_of_the_page_runs_after_the_others(
    server: LocalServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TUNESERVE_URL", server.url)
    monkeypatch.setenv("TUNESERVE_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/sdk.md").read_text(), re.M | re.S)
    assert len(snippets) > 8
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "docs/sdk.md", "exec"), names)
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").exists()
    said = capsys.readouterr().out
    assert "user " in said and "1000000" in said
