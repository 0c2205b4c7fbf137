"""The dashboard's files are public, in the wheel, and load nothing from other servers."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from tuneserve_server.cli import main as cli
from tuneserve_server.routes import dashboard

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
OURS = [
    path for path in dashboard.FOLDER.rglob("*") if path.is_file() and "vendor" not in path.parts
]


@pytest.mark.parametrize("path", ["/", "/page"])
async def test_the_root_redirects_to_the_dashboard(api: Any, path: str) -> None:
    answer = await api.http.get(path, follow_redirects=True)
    assert (answer.status_code, answer.url.path) == (200, "/page/")
    assert "<title>tuneserve</title>" in answer.text


async def test_every_file_that_the_dashboard_names_exists_with_its_type(api: Any) -> None:
    index = (await api.http.get("/page/")).text
    named = re.findall(r'(?:src|href)="([^"#]+)"', index)
    assert len(named) >= 4
    for name in set(named) - {"../metrics"}:
        answer = await api.http.get(f"/page/{name}")
        assert answer.status_code == 200, name
        kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg"}[name.split(".")[-1]]
        assert answer.headers["content-type"].startswith(kind)
    for module in dashboard.FOLDER.glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', module.read_text()):
            assert (dashboard.FOLDER / name).is_file(), (module, name)


async def test_a_file_is_sent_with_headers_that_keep_other_sites_out(api: Any) -> None:
    for name in ("", "page.css", "vendor/uplot-1.6.32/uPlot.iife.min.js"):
        headers = (await api.http.get(f"/page/{name}")).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'self'; ") and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy


async def test_a_cached_file_is_not_sent_again(api: Any) -> None:
    answer = await api.http.get("/page/")
    again = await api.http.get("/page/", headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "name",
    ["nothing.js", "../auth.py", "..%2Fauth.py", "%2Fetc/passwd", "vendor", "README.md", "a\0b"],
)
async def test_no_name_leads_to_another_file(api: Any, name: str) -> None:
    answer = await api.http.get(f"/page/{name.replace(chr(0), '%00')}")
    assert answer.status_code == 404


def test_the_dashboard_has_no_inline_code_no_raw_markup_and_no_other_server() -> None:
    for path in OURS:
        text = path.read_text()
        for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert banned not in text, (path, banned)
        addresses = set(re.findall(r"https?://[\w.:/-]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, (path, addresses)
        assert len(text.splitlines()) < 400, path
    index = (dashboard.FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", index)


def test_every_command_that_the_dashboard_names_exists() -> None:
    found = []
    for path in OURS:
        text = path.read_text()
        assert not re.search(r"python3? ", text), f"{path}: an installed wheel has no scripts"
        found += re.findall(r"\btuneserve ((?:[a-z]+ ?)+)", text)
    assert len(found) >= 3
    for words in found:
        command: Any = typer.main.get_command(cli.app)
        for word in words.split():
            if hasattr(command, "commands"):  # otherwise the rest are its arguments
                assert word in command.commands, words
                command = command.commands[word]
        assert not hasattr(command, "commands"), words


def test_the_wheel_has_every_file_of_the_dashboard() -> None:
    """The build takes every file of a package's folder except those that git ignores."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert build.keys() == {"packages", "hooks"}  # the hook only adds the documentation
    assert str(dashboard.FOLDER.parents[1].relative_to(ROOT)) in build["packages"]
    files = [str(path) for path in dashboard.FOLDER.rglob("*") if path.is_file()]
    ignored = subprocess.run(
        ["git", "check-ignore", *files], cwd=ROOT, capture_output=True, text=True
    )
    assert (ignored.returncode, ignored.stdout) == (1, "")
