"""docs/architecture.md names files and functions that exist."""

import ast
import re
from pathlib import Path

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
