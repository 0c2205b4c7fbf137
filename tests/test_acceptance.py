"""The tables of acceptance figures name every line, and every test and benchmark that proves it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GROUPS = (("O", 15), ("S", 8), ("W", 5), ("C", 4), ("H", 6))
"""Letters, and the number of lines of each letter."""
IDS = [f"{letter}{number}" for letter, count in GROUPS for number in range(1, count + 1)]
NAMED = re.compile(r"[A-Z]\d+(?:, [A-Z]\d+)*")


def parsed(folder: str) -> Iterator[tuple[str, ast.AST]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def marked() -> Iterator[tuple[str, str]]:
    """Ids and files of ``@pytest.mark.acceptance(...)`` over a test."""
    for path, tree in parsed("tests"):
        for test in ast.walk(tree):
            if not isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for mark in test.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith(".acceptance"):
                    assert test.name.startswith("test_"), f"{path}: {test.name} is not a test"
                    yield from ((str(ast.literal_eval(name)), path) for name in mark.args)


def printed() -> Iterator[tuple[str, str]]:
    """Ids and files of the rows that benchmarks print, which are strings like ``"W1, C2"``."""
    for path, tree in parsed("benchmarks"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if NAMED.fullmatch(node.value):
                    yield from ((name, path) for name in node.value.split(", "))


def carriers() -> dict[str, set[str]]:
    """Files by id."""
    found: dict[str, set[str]] = {}
    for name, path in (*marked(), *printed()):
        found.setdefault(name, set()).add(path)
    return found


def documented() -> list[tuple[str, set[str]]]:
    """For each row of the tables: its id, and the files in its last column."""
    page = (ROOT / "docs" / "performance.md").read_text()
    section = page.partition("\n## Acceptance figures\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([A-Z]\d+) \|.*\| ([^|]*) \|$", section, re.M)
    return [(name, set(re.findall(r"`([\w/]+\.py)`", last))) for name, last in rows]


def test_every_line_has_a_test_or_a_benchmark():
    assert carriers().keys() == set(IDS)


def test_the_tables_name_every_line_once_and_all_files_that_prove_it():
    rows = documented()
    assert sorted(name for name, _ in rows) == sorted(IDS)
    assert dict(rows) == carriers()
