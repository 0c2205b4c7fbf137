"""The command for a rented GPU runs on this machine as well, on tiny models."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def dry_run(*options: str) -> list[dict[str, Any]]:
    ran = subprocess.run(
        [sys.executable, "benchmarks/gpu_accept.py", "--dry-run", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
        stdout=subprocess.PIPE,
        check=True,
    )
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_it_measures_training_and_decoding() -> None:
    rows = dry_run("--only", "train", "--only", "decode")
    assert [row["tenants"] for row in rows if "train" in row] == [1, 8]
    assert [row["adapters"] for row in rows if "decode" in row] == [1, 2]
    assert sum("tokens/s" in row for row in rows) == 4


@pytest.mark.nightly
def test_every_phase_runs_and_no_result_differs() -> None:
    """The device compared with the CPU is the CPU here, so both have the same errors."""
    rows = dry_run()
    assert {row["phase"] for row in rows if "phase" in row} == {
        *("environment", "answers", "bits", "restart", "train", "decode", "small", "errors")
    }
    assert not [row for row in rows if "bits" in row and row["differ"]]
    errors = [row for row in rows if "errors" in row]
    assert {row["dtype"] for row in errors} == {"float32", "bfloat16"}
    assert all(row["error"] < 1e-6 for row in errors if row["dtype"] == "float32")
    assert all(0.9 < row.get("of the CPU's", 1.0) < 1.1 for row in errors)
