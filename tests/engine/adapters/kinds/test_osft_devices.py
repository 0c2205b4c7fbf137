"""OSFT's projections give the same results in every layout of arrays on eight devices."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

PROJECTIONS = ("left, longer", "right, longer", "left, shorter", "right, shorter")


@pytest.fixture(scope="module")
def figures() -> Mapping[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.engine.adapters.osft_devices"],
        cwd=Path(__file__).parents[4],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.acceptance("O8")
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_every_layout_on_eight_devices_equals_float64(figures: Mapping[str, Any], projection: str):
    assert figures["devices"] == 8
    assert len(figures[projection]) == 4
    for layout, found in figures[projection].items():
        assert found["error"] <= 1e-5, layout


@pytest.mark.acceptance("O9")
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_on_the_large_dimension_a_stack_of_layers_takes_one_all_reduce(
    figures: Mapping[str, Any], projection: str
):
    found = figures[projection]["both on the large dimension"]
    talk = {name: count for name, count in found.items() if name != "error"}
    assert talk == {"all_reduce": 1, "all_gather": 0, "other": 0}
    # proof that operations are counted at all
    assert figures[projection]["both on the rank"]["all_gather"] > 0


@pytest.mark.acceptance("O10")
def test_summing_the_devices_own_blocks_projects_nothing(figures: Mapping[str, Any]):
    assert figures["control"] > 0.5
