"""Every page works: its blocks run against the real service, in order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guides import pages

ROOT = pages.ROOT


def run_here(page: Path) -> list[pages.Block]:
    found = pages.blocks(page.read_text())
    return [block for block in found if pages.runner(page, block) == pages.HERE]


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_a_page_calls_existing_names_and_says_why_a_block_is_not_run(page: Path) -> None:
    for block in pages.blocks(page.read_text()):
        pages.check(block)


def test_each_block_of_each_page_is_run_by_a_test_or_says_why_not() -> None:
    """It also checks that no table is out of date, and no page forgotten."""
    runners = set()
    for page in pages.PAGES:
        for block in pages.blocks(page.read_text()):
            test = pages.runner(page, block)
            place = f"{pages.name(page)}, line {block.line}"
            assert test or block.not_run or block.language not in pages.RUN, place
            if test is not None:
                runners.add((pages.name(page), test))
            if test not in {None, pages.HERE}:
                assert page.name in (ROOT / str(test)).read_text(), f"{place}: not in {test}"
    elsewhere = {(page, test) for page, by in pages.ELSEWHERE.items() for test in by.values()}
    assert runners - {(page, pages.HERE) for page, _ in runners} == elsewhere
    for path in ROOT.glob("**/*.md"):
        is_ours = path.relative_to(ROOT).parts[0] in {"docs", "docker", "examples", "benchmarks"}
        if is_ours and path not in pages.PAGES:
            languages = {block.language for block in pages.blocks(path.read_text())}
            assert not languages & pages.RUN, path


@pytest.mark.parametrize("page", [page for page in pages.PAGES if run_here(page)], ids=pages.name)
def test_a_page_runs_from_its_first_line_to_its_last(
    page: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    to_run = run_here(page)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    paths = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_page.py")), str(page)],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    assert ran.stdout.count(f"--- {page.name}, line ") == len(to_run)


GOOD = """\
```python
print(1)
```

<!-- not run: there is no GPU -->
```sh
TUNESERVE_PORT=1 tuneserve up --base-model Qwen/Qwen3-0.6B && make run
tuneserve checkpoints export $CHECKPOINT adapter | tee log
```
"""


def test_blocks_are_read_with_their_lines_and_marks() -> None:
    found = list(pages.blocks(GOOD))
    assert [(b.language, b.line, b.not_run) for b in found] == [
        ("python", 2, None),
        ("sh", 7, "there is no GPU"),
    ]
    for block in found:
        pages.check(block)


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "print("),
        ("sh", "if true"),
        ("sh", "tuneserve up --base-modell x"),
        ("sh", "echo && tuneserve trane rows.jsonl"),
        ("sh", "KEY=$(tuneserve keys make --tenant you)"),
        ("sh", "tuneserve checkpoints exprot a b"),
        ("sh", "make runn"),
        ("sh", "python examples/nothing.py"),
        ("bash", "true"),
    ],
)
def test_a_missing_name_is_found_in_a_block_that_is_not_run(language: str, code: str) -> None:
    with pytest.raises((AssertionError, SyntaxError)):
        pages.check(pages.Block(language, code, 1, "not here"))
