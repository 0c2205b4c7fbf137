"""The real service on the embedded model, a folder to run clients from, and the cookbook."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.cli.local_server import LocalServer

from . import workdir
from .client import Client
from .environments import environment
from .recipes import Recipes, records


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("client")
    workdir.lay_out(folder, TINY_MODEL)
    with LocalServer(
        tmp_path_factory.mktemp("server"),
        base_model=str(TINY_MODEL),
        base_model_name=workdir.MODEL_NAME,
        compile_ahead="false",
        chunk_tokens="64",
    ) as server:
        yield Client(server, folder)


@pytest.fixture(scope="session")
def recipes(client: Client) -> Recipes:
    return Recipes(client, environment("cookbook", torch=True))


@pytest.fixture(scope="session")
def taught(recipes: Recipes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log folder with one checkpoint: an adapter that answers word problems by a coin toss."""
    log: Path = tmp_path_factory.mktemp("taught")
    recipes.script("teach_answers.py", workdir.MODEL_NAME, str(log))
    return log


@pytest.fixture(scope="session")
def taught_state(taught: Path) -> str:
    path: str = records(taught / "checkpoints.jsonl")[0]["state_path"]
    return path
