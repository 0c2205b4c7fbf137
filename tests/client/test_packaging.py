"""The packages of an install of the client and its commands, and the modules that it loads."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tuneserve_client

ROOT = Path(__file__).parents[2]
LIGHT = {
    *("httpx", "httpcore", "h11", "anyio", "sniffio", "idna", "certifi"),
    *("pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection"),
    *("protobuf", "numpy", "tqdm"),
    *(
        "click",
        "truststore",
        "httpcore2",
        "httpx2",
        "jinja2",
        "markupsafe",
        "prometheus-client",
        "prompt-toolkit",
        "wcwidth",
    ),
    *("rich", "pygments", "markdown-it-py", "mdurl", "typer", "annotated-doc", "shellingham"),
    *("tokenizers", "huggingface-hub", "hf-xet", "filelock", "fsspec", "packaging", "pyyaml"),
}
SERVICE = {
    *("fastapi", "flax", "huggingface_hub", "jax", "msgspec", "obstore", "pydantic_settings"),
    *("redis", "safetensors", "torch", "transformers", "uvicorn", "uvloop", "xxhash", "zstandard"),
}
"""Modules that only a service needs."""


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
    assert {"fastapi", "redis"} <= closure(project["optional-dependencies"]["server"])


BLOCKED = """
import importlib.abc, sys

ABSENT = sys.argv[1].split(',')

class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition('.')[0] in ABSENT:
            raise ModuleNotFoundError(f'{name} is not installed', name=name)

sys.meta_path.insert(0, Nothing())
import tuneserve_client
for name in tuneserve_client.__all__:
    getattr(tuneserve_client, name)
import tuneserve_client.wire.tokenizer
"""


def without(absent: set[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the code where the modules ``absent`` are not installed."""
    return subprocess.run(
        [sys.executable, "-c", code, ",".join(absent), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_client_works_without_the_packages_of_a_service() -> None:
    ran = without(SERVICE | {"tuneserve_engine", "tuneserve_server", "rich", "typer"}, BLOCKED)
    assert ran.returncode == 0, ran.stderr


COMMAND = (
    BLOCKED.partition("import tuneserve_client\n")[0]
    + """
from tuneserve_server.__main__ import main
del sys.argv[1]
main()
"""
)


@pytest.mark.parametrize("command", ["runs", "checkpoints", "chat", "top"])
def test_the_client_alone_has_the_commands_for_a_server(command: str) -> None:
    ran = without(SERVICE, COMMAND, command, "--url", "http://127.0.0.1:1")
    assert "http://127.0.0.1:1" in ran.stderr and "Traceback" not in ran.stderr
    assert ran.returncode == 1


@pytest.mark.parametrize("command", ["up", "worker", "keys list", "files status", "files adopt"])
def test_a_command_of_a_service_says_what_to_install(command: str) -> None:
    ran = without(SERVICE, COMMAND, *command.split())
    assert ran.returncode == 2
    assert "pydantic_settings is not installed" in ran.stderr
    assert "pip install '.[server,engine]'" in ran.stderr
    assert "Traceback" not in ran.stderr


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
