"""The product's code as a whole."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "clients/tuneserve_client",
    "engine/tuneserve_engine",
    "server/tuneserve_server",
)


def test_no_class_name_is_defined_twice() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    trees = [ast.parse(path.read_text()) for path in files]
    names = Counter(
        node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)
    )
    assert len(names) > 400
    assert [name for name, count in names.items() if count > 1] == []
