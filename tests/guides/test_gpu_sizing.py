"""The table of the page about GPU sizing has the figures of the memory plan."""

import re
from pathlib import Path

import pytest

from tuneserve_engine.core.backend_options import DType

ROOT = Path(__file__).parents[2]


def test_there_is_a_plan_with_the_memory_of_the_table_and_none_with_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One figure of each row: all of them would take a minute."""
    monkeypatch.syspath_prepend(str(ROOT))
    from scripts.gpu_compile.shapes import MODELS
    from scripts.gpu_sizing import fits, requests

    page = (ROOT / "docs" / "guides" / "gpu-sizing.md").read_text()
    types: list[DType] = ["bfloat16", "float32"]
    checked = 0
    for name, config in MODELS.items():
        for dtype in types:
            (row,) = re.findall(rf"^\| {re.escape(name)} \| {dtype} \| (.*) \|$", page, re.M)
            column = checked % 3
            gib = int(row.split(" | ")[column].removesuffix(" GiB"))
            asked = requests(dtype)[column]
            assert (fits(config, asked, gib), fits(config, asked, gib - 1)) == (True, False), name
            checked += 1
    assert checked == 14
