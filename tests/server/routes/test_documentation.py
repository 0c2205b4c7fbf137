"""The documentation site builds without warnings and is served without a key."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tuneserve_server.routes import documentation

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html"]
    return subprocess.run([*command, str(source), str(out)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    built = build(ROOT / "docs", out)
    assert built.returncode == 0, built.stderr
    return out


def test_the_site_loads_nothing_from_other_servers_and_has_the_clients_names(site: Path) -> None:
    index = (site / "index.html").read_text()
    loaded = re.findall(r'<(?:script|link|img)[^>]*?(?:src|href)="([^"]+)"', index)
    assert len(loaded) > 5
    assert [each for each in loaded if each.startswith(("http", "//"))] == []
    assert 'id="tuneserve_client.Client.create_model"' in (site / "sdk-reference.html").read_text()
    assert (site / "searchindex.js").stat().st_size > 100_000


@pytest.mark.parametrize("target", ["absent.md", "b.md#absent"])
def test_a_dead_link_fails_the_build(tmp_path: Path, target: str) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    (source / "conf.py").write_text((ROOT / "docs" / "conf.py").read_text())
    (source / "index.md").write_text(f"# A\n\n[b]({target})\n\n```{{toctree}}\nb\n```\n")
    (source / "b.md").write_text("# B\n")
    built = build(source, tmp_path / "out")
    assert built.returncode != 0 and "absent" in built.stderr


async def test_the_site_is_served_with_its_scripts_allowed(
    api: Any, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documentation, "FOLDERS", (site,))
    answer = await api.http.get("/docs", follow_redirects=True)
    assert (answer.status_code, answer.url.path) == (200, "/docs/")
    assert "How-to guides" in answer.text
    policy = answer.headers["Content-Security-Policy"]
    assert "script-src 'self' 'sha256-" in policy and "frame-ancestors 'none'" in policy
    again = await api.http.get("/docs/", headers={"If-None-Match": answer.headers["ETag"]})
    assert again.status_code == 304
    assert (await api.http.get("/docs/guides/sft.html")).status_code == 200
    for name in ("nothing.html", "..%2Fconf.py", "%2Fetc/passwd", "guides", "a%00b"):
        assert (await api.http.get(f"/docs/{name}")).status_code == 404, name


async def test_without_a_site_the_page_says_how_to_build_it(
    api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documentation, "FOLDERS", (tmp_path,))
    answer = await api.http.get("/docs/")
    assert answer.status_code == 200 and "make docs" in answer.text
    for name in ("guides/sft.html", "..%2Fconf.py", "a%00b"):
        assert (await api.http.get(f"/docs/{name}")).status_code == 404, name
