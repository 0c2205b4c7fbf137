"""Short forms of runs and checkpoints, against a real server process."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests import quick_service
from tuneserve_client import Client
from tuneserve_server.cli import main as cli
from tuneserve_server.cli.local_server import LocalServer

KEY = "tml-short-names"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("service")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TUNESERVE_API_KEY", KEY)
        with LocalServer(folder, **quick_service.QUICK) as server, Client(server.url, KEY) as made:
            patch.setenv("TUNESERVE_URL", server.url)
            yield made


@pytest.fixture(scope="module")
def saved(client: Client) -> dict[str, list[str]]:
    """The paths of each run's checkpoints, oldest first; two runs have the name twin."""
    paths: dict[str, list[str]] = {}
    for label, name in [("rose", "rose"), ("one", "twin"), ("two", "twin")]:
        model = client.create_model(rank=1, seed=0, name=name)
        names = ["early", "late"] if label == "rose" else [f"only-{label}"]
        paths[label] = [model.save(each).result() for each in names]
    return paths


def called(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, [*arguments, "--json"])


def id_of(path: str) -> str:
    return path.removeprefix("tinker://").split("/")[0]


def shown(wanted: str) -> str:
    ran = called("runs", "show", wanted)
    assert ran.exit_code == 0, ran.output
    found: str = json.loads(ran.stdout)["run"]["training_run_id"]
    return found


def test_a_run_is_found_by_name_id_and_last(client: Client, saved: dict[str, list[str]]) -> None:
    rose, newest = id_of(saved["rose"][0]), id_of(saved["two"][0])
    assert shown("rose") == shown(rose) == rose
    assert shown("last") == newest
    client.update_run(newest, {"archived": "true"})
    assert shown("last") == id_of(saved["one"][0])
    client.update_run(newest, {"archived": None})
    assert shown("last") == newest


def test_an_unknown_name_is_answered_with_the_server_and_the_tenant(
    client: Client, saved: dict[str, list[str]]
) -> None:
    tenant = client.runs()[0].model_owner
    for command in (["runs", "show"], ["checkpoints", "delete"]):
        ran = called(*command, "nothing-like-it")
        assert ran.exit_code == 1
        assert f"begins so ({client.base_url}, your tenant is {tenant}); " in ran.stderr


def test_several_matches_are_listed(client: Client, saved: dict[str, list[str]]) -> None:
    ran = called("runs", "show", "twin")
    assert ran.exit_code == 1
    assert id_of(saved["one"][0]) in ran.stderr and id_of(saved["two"][0]) in ran.stderr
    assert id_of(saved["rose"][0]) not in ran.stderr
    prefix = id_of(saved["rose"][0]).rpartition(":")[0]  # the session of all three
    ran = called("runs", "show", prefix)
    assert ran.exit_code == 1 and "matches 3 runs" in ran.stderr


def test_an_unknown_name_is_answered_with_the_nearest(
    client: Client, saved: dict[str, list[str]]
) -> None:
    for command in (["runs", "show"], ["chat", "--prompt", "a"], ["checkpoints", "delete"]):
        ran = called(*command, "rosse")
        assert ran.exit_code == 1
        assert "'rosse'" in ran.stderr and "rose" in ran.stderr.replace("rosse", "")
    assert len(saved) == 3


def test_a_run_stands_for_its_newest_checkpoint_except_when_deleting(
    client: Client, saved: dict[str, list[str]], tmp_path: Path
) -> None:
    for wanted, path in [
        ("rose", saved["rose"][1]),
        ("early", saved["rose"][0]),
        ("last", saved["two"][0]),
    ]:
        ran = called("checkpoints", "export", wanted, str(tmp_path / wanted))
        assert ran.exit_code == 0, ran.output
        assert json.loads(ran.stdout)["path"] == path
    ran = called("checkpoints", "delete", "rose")
    assert ran.exit_code == 1 and "matches 2 checkpoints" in ran.stderr
    assert set(saved["rose"]) <= {each.tinker_path for each in client.checkpoints()}


def test_a_run_trained_under_a_name_resumes_by_it(
    client: Client, saved: dict[str, list[str]], tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    for options in (["--rank", "1"], ["--resume", "lily", "--epochs", "2"]):
        ran = called("train", str(data), "--name", "lily", *options)
        assert ran.exit_code == 0, ran.output
        assert (client.runs()[0].user_metadata or {})["name"] == "lily"
    assert json.loads(ran.stdout.splitlines()[-1])["steps_done"] == 2
    assert json.loads(ran.stdout.splitlines()[0])["step"] == 2
    assert len(saved) == 3
