"""The packages that installing the client alone brings, and the modules that using it loads."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tuneserve_client

ROOT = Path(__file__).parents[2]
LIGHT = {
    *("httpx", "httpcore", "h11", "anyio", "sniffio", "idna", "certifi"),
    *("pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection"),
    *("protobuf", "numpy", "tqdm"),
}


def closure(requirements: list[str]) -> set[str]:
    """Every package that pip would install for the requirements, read from installed metadata."""
    found: set[str] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or []:
            waiting += [(Requirement(text), each) for each in ("", *requirement.extras)]
    return found


def test_the_client_alone_installs_light_packages_only() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert closure(project["dependencies"]) <= LIGHT
    assert {"jax", "numpy"} <= closure(project["optional-dependencies"]["engine"])
    assert {"fastapi", "redis"} <= closure(project["optional-dependencies"]["server"][1:])


BLOCKED = """
import importlib.abc, sys

class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition('.')[0] in sys.argv[1].split(','):
            raise ImportError(f'{name} is not installed', name=name)

sys.meta_path.insert(0, Nothing())
import tuneserve_client
for name in tuneserve_client.__all__:
    getattr(tuneserve_client, name)
client = tuneserve_client.Client('http://127.0.0.1:1', 'tml-a', deadline_s=0)
try:
    client._thread.run_coroutine(client._inner._load_tokenizer('any'))
except ImportError as error:
    print(error)
client.close()
"""


def test_the_client_works_without_optional_packages() -> None:
    """A missing tokenizer extra is named with its install command."""
    absent = {
        *("jax", "flax", "fastapi", "redis", "uvicorn", "tuneserve_engine", "tuneserve_server"),
        *("tokenizers", "jinja2", "huggingface_hub", "transformers", "torch", "rich", "msgspec"),
    }
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED, ",".join(absent)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert "pip install '.[tokenizer]'" in ran.stdout


def test_the_wire_types_alone_load_no_http_client() -> None:
    """The server and the engine take the wire types from this package."""
    command = "import sys, tuneserve_client.wire.types; print('httpx' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert ran.stdout.strip() == "False"


def test_every_public_name_exists_and_is_typed() -> None:
    assert set(tuneserve_client.__all__) == set(tuneserve_client._HOMES)
    assert (Path(tuneserve_client.__file__).parent / "py.typed").exists()


def test_dir_shows_the_public_names_and_the_version_is_that_of_the_package() -> None:
    assert set(dir(tuneserve_client)) == {*tuneserve_client.__all__, "__version__"}
    assert tuneserve_client.__version__ == importlib.metadata.version("tuneserve")


def test_every_exception_of_the_page_is_importable_from_the_package() -> None:
    page = (ROOT / "docs/sdk.md").read_text()
    table = page.partition("| Exception |")[2].partition("\n\n")[0]
    names = re.findall(r"`([A-Z]\w+)`", "".join(row.split("|")[1] for row in table.split("\n")[2:]))
    assert {"BudgetSpent", "NotFound"} <= set(names) <= set(tuneserve_client.__all__)
