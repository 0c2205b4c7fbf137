"""The rules for names, over the product's whole code."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("clients/tuneserve_client", "engine/tuneserve_engine", "server/tuneserve_server")
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
}


def functions_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names of functions and of methods, without nested functions."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield from functions_of(node.body)


def test_no_class_name_is_defined_twice() -> None:
    names = Counter(
        node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    assert len(names) > 400
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("verb", ["add", "of", "put", "run", "take"])
def test_a_verb_without_a_noun_is_a_public_function_in_at_most_one_file(verb: str) -> None:
    assert len(TREES) > 300
    assert len([path for path, tree in TREES.items() if verb in functions_of(tree.body)]) <= 1
