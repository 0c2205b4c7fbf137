"""The simulation of many tenants and workers runs, and draws its plots."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]


def run(*options: str) -> "subprocess.CompletedProcess[str]":
    program = [sys.executable, "benchmarks/scale.py", "--dry-run", *options]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)


def test_requests_of_dead_workers_end_and_models_move_no_more_than_needed(tmp_path: Path) -> None:
    plots = tmp_path / "plots.svg"
    small = ("--tenants", "200", "--workers", "3", "--seconds", "200", "--deaths", "40")
    done = run(*small, "--plots", str(plots))
    assert done.returncode == 0, done.stderr
    calm, storm = json.loads(done.stdout.splitlines()[0]).values()
    assert (calm["failed"], calm["moves"], calm["deaths"]) == (0, 0, 0)
    assert storm["failed"] == 0
    assert storm["deaths"] > 0 and storm["recoveries_s"][0] > 0
    assert 0 < storm["moves"] <= storm["lost"], "more than the workers had that came back"
    titles = [each.text for each in ElementTree.parse(plots).iter() if each.get("class") == "title"]
    assert len(titles) == 4


def test_a_time_in_which_no_request_counts_is_refused() -> None:
    done = run("--seconds", "100")
    assert done.returncode == 2
    assert "requests count from 150 s on" in done.stderr
