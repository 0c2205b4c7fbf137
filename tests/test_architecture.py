"""The claims of docs/architecture.md, and the rules for names."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/architecture.md").read_text()
FOLDERS = (ROOT, ROOT / "engine/tuneserve_engine", ROOT / "engine/tuneserve_engine/backend/jax")
PACKAGES = ("clients/tuneserve_client", "engine/tuneserve_engine", "server/tuneserve_server")


def defined_in(file: Path) -> set[str]:
    """The functions of a module, and the methods of its classes as ``Class.method``."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


def test_the_path_of_a_request_has_fifteen_stops_whose_functions_exist() -> None:
    stops = re.findall(r"^\| (\d+) \| `([\w/.]+)` \| `([\w.]+)` \|", PAGE, re.M)
    assert [int(number) for number, _, _ in stops] == list(range(1, 16))
    for _, file, function in stops:
        assert function in defined_in(ROOT / file), f"{file} has no {function}"


def test_every_named_file_and_folder_exists() -> None:
    named = re.findall(r"`([\w.]+(?:/[\w.]+)*(?:/|\.py))(?::\w+)?`", PAGE)
    assert len(named) > 100
    rooms = [ROOT / package for package in PACKAGES]
    for path in named:
        known = any((folder / path).exists() for folder in (*FOLDERS, *rooms))
        known = known or path in {"compiled/", "pages/", "decompositions/", "a/b.py", "a/test_b.py"}
        known = known or any(room.rglob(path.rstrip("/")) for room in rooms)
        assert known, path


def test_the_tree_has_a_line_for_every_package() -> None:
    tree = PAGE[PAGE.index("## The tree") : PAGE.index("## The engine")]
    for package in PACKAGES:
        folders = {each.parent for each in (ROOT / package).rglob("*.py")}
        for folder in sorted(folders - {ROOT / package}):
            path = folder.relative_to(ROOT / package).as_posix()
            # A package's row names it, or the row of the package around it does.
            around = path.rsplit("/", 1)[0]
            assert f"`{path}/`" in tree or f"`{path}/" in tree or f"`{around}/`" in tree, path


def product_files() -> list[Path]:
    return [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


def test_no_class_name_is_defined_twice() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for file in product_files():
        if not file.name.endswith("_pb2.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(file.relative_to(ROOT)))
    assert len(found) > 300
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


@pytest.mark.parametrize("name", ["add", "of", "put", "run", "take"])
def test_a_verb_without_a_noun_is_a_public_function_of_one_file_at_most(name: str) -> None:
    found = []
    for file in product_files():
        functions = {each.rpartition(".")[2] for each in defined_in(file)}
        if name in functions:
            found.append(str(file.relative_to(ROOT)))
    assert len(found) <= 1, found
