"""A wheel holds the documentation site if it was built, and can be built without."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.containers import ROOT

SOURCES = ("pyproject.toml", "README.md", "LICENSE")


@pytest.mark.parametrize("is_built", [True, False])
def test_a_wheel_has_the_site_that_was_built(tmp_path: Path, is_built: bool) -> None:
    for name in SOURCES:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/wheel_documentation.py", tmp_path / "scripts")
    for package in (
        "clients/tuneserve_client",
        "engine/tuneserve_engine",
        "server/tuneserve_server",
    ):
        (tmp_path / package).mkdir(parents=True)
        shutil.copy(ROOT / package / "__init__.py", tmp_path / package)
    if is_built:
        (tmp_path / "docs/_build/html").mkdir(parents=True)
        (tmp_path / "docs/_build/html/index.html").write_text("the site")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    found = zipfile.ZipFile(wheel).namelist()
    assert "tuneserve_server/__init__.py" in found
    assert ("tuneserve_server/site/index.html" in found) == is_built
