"""The rules for names, over the product's whole code and its tests."""

import ast
import tomllib
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
ELSEWHERE = {
    module: told
    for part in tomllib.loads((ROOT / "tests/tested_elsewhere.toml").read_text()).values()
    for module, told in part.items()
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


def top_names(module: str) -> set[str]:
    """Return the names that a module of the product defines or imports, and its submodules."""
    path = next((p for p in PACKAGES if p.endswith(module.split(".")[0])), "")
    stem = "/".join([path.split("/")[0], *module.split(".")])
    tree = TREES.get(f"{stem}.py") or TREES[f"{stem}/__init__.py"]
    found = {each.removeprefix(f"{stem}/").split("/")[0].removesuffix(".py") for each in TREES}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {each.asname or each.name for each in node.names}
    return found


def test_every_name_that_a_benchmark_or_script_imports_exists() -> None:
    """No other test imports most of them."""
    checked, missing = 0, []
    for path in [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("scripts/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tuneserve_"):
                names = {each.name for each in node.names} - top_names(node.module or "")
                missing += [f"{path.name}: {node.module}.{name}" for name in sorted(names)]
                checked += 1
    assert checked > 100
    assert missing == []


def mirrored_test(module: str) -> str:
    """Return the name of the module's own test file: ``__main__`` is tested in ``test_main``."""
    half, _, *folders, name = module.split("/")
    tests = "/".join(["tests", half.replace("clients", "client"), *folders])
    return f"{tests}/test_{name.removesuffix('.py').strip('_')}.py"


def needs_a_test(module: str) -> bool:
    """Return whether the module is written by hand and, as an ``__init__``, defines anything."""
    if not module.endswith("/__init__.py"):
        return not module.endswith("_pb2.py")
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) for node in TREES[module].body)


def imports_of(file: Path) -> set[str]:
    """Return the dotted names of all modules, and of names in them, that the file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return found


def test_every_module_has_a_test_of_its_name_or_a_line_that_says_where_it_is_tested() -> None:
    modules = [module for module in TREES if needs_a_test(module)]
    own = {module for module in modules if (ROOT / mirrored_test(module)).is_file()}
    assert len(own) > 200
    assert sorted(set(modules) - own - ELSEWHERE.keys()) == []
    assert sorted(ELSEWHERE.keys() - (set(modules) - own)) == [], (
        "tested under its own name, or gone"
    )


@pytest.mark.parametrize("module", ELSEWHERE)
def test_the_named_file_imports_the_module_or_runs_it_through_another(module: str) -> None:
    file, _, reason = ELSEWHERE[module].partition(": ")
    name = module.partition("/")[2].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert (ROOT / file).is_file() and reason
    assert (name in imports_of(ROOT / file)) != reason.startswith("through ")
