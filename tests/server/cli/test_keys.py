"""The operator's commands, through the socket in the data directory."""

import asyncio
import json
import re
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.server.conftest import Api
from tuneserve_server import admin
from tuneserve_server.access import auth
from tuneserve_server.admin import create_admin_app
from tuneserve_server.cli import main as cli
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
KEY = re.compile("tml-[0-9a-f]{12}-[0-9a-f]{64}")
TENANT = {
    *("tenant", "weight", "max_jobs", "max_models", "max_checkpoints", "max_checkpoint_bytes"),
    "device_s_a_day",
}


@pytest.fixture
async def socket(api: Api, settings: ApiSettings) -> AsyncIterator[Path]:
    app = create_admin_app(api.services.store, api.services.secret, api.services.unused)
    async with admin.serve(app, settings.admin_socket):
        yield settings.admin_socket


async def tuneserve(data_dir: Path, *arguments: str) -> Any:
    """Run the command beside the server."""
    whole = [*arguments, "--data-dir", str(data_dir)]
    return await asyncio.to_thread(CliRunner().invoke, cli.app, whole)


async def test_the_socket_is_private_to_its_owner_and_removed_with_the_process(
    api: Api, settings: ApiSettings
) -> None:
    app = create_admin_app(api.services.store, b"", api.services.unused)
    path = settings.admin_socket
    async with admin.serve(app, path):
        assert stat.filemode(path.stat().st_mode) == "srw-------"
        with pytest.raises(FileExistsError, match="another process serves"):
            await admin.serve(app, path).__aenter__()
        assert path.is_socket()
    assert not path.exists()


async def test_a_key_is_created_listed_and_revoked_by_commands(
    api: Api, socket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "FRESH_S", 0.0)
    empty = await tuneserve(tmp_path, "keys", "list")
    assert empty.stdout == "" and "tuneserve keys create --tenant NAME" in empty.stderr
    made = await tuneserve(tmp_path, "keys", "create", "--tenant", "alice", "--name", "my laptop")
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert KEY.fullmatch(key), (
        "all of standard output, for TINKER_API_KEY=$(tuneserve keys create …)"
    )
    assert "cannot be shown again" in made.stderr
    await api.get("/sessions", key=key)
    for wrong in ("a b", "-x", "é", "n" * 65):
        refused = await tuneserve(tmp_path, "keys", "create", f"--tenant={wrong}")
        assert (refused.exit_code, "it must be 1 to 64 letters" in refused.stderr) == (2, True)
    listed = await tuneserve(tmp_path, "keys", "list")
    head, row = listed.stdout.splitlines()
    created, expires = ("created", "(UTC)"), ("expires", "(UTC)")
    assert head.split() == ["id", "tenant", "scopes", "state", *created, *expires, "name"]
    assert row.split()[:4] == [key.split("-")[1], "alice", "sample,train", "active"]
    assert row.endswith("my laptop")
    assert head.index("name") == row.index("my laptop")
    whole = await tuneserve(tmp_path, "keys", "revoke", key)
    assert (whole.exit_code, "the id alone" in whole.stderr) == (2, True)
    await api.get("/sessions", key=key)
    revoked = await tuneserve(tmp_path, "keys", "revoke", key.split("-")[1], "--json")
    assert json.loads(revoked.stdout)["state"] == "revoked"
    assert (await api.call("GET", "/sessions", key=key)).status_code == 401


async def test_the_commands_of_the_documentation_run(socket: Path, tmp_path: Path) -> None:
    names = ("docs/keys.md", "docs/configuration.md", "docs/dashboard.md", "README.md")
    pages = [ROOT / name for name in names]
    text = "".join(page.read_text() for page in pages)
    blocks = "".join(re.findall("^```sh\n(.*?)^```", text, re.M | re.S))
    commands = re.findall(r"\btuneserve ((?:keys|tenants) [^#)\n]+)", blocks)
    assert len(commands) >= 7
    for command in commands:
        arguments = command.replace("--data-dir ./data", "").split()
        result = await tuneserve(tmp_path, *arguments)
        assert result.exit_code == 0, (command, result.output)


async def test_scopes_and_expiry_are_options(socket: Path, tmp_path: Path) -> None:
    options = ["--tenant", "bob", "--scope", "sample", "--expires-days", "7", "--json"]
    made = json.loads((await tuneserve(tmp_path, "keys", "create", *options)).stdout)
    assert (made["scopes"], made["expires_s"] - made["created_s"]) == (["sample"], 604_800)
    (listed,) = json.loads((await tuneserve(tmp_path, "keys", "list", "--json")).stdout)
    assert listed == {name: value for name, value in made.items() if name != "key"}
    wrong = await tuneserve(tmp_path, "keys", "create", "--tenant", "b", "--scope", "operator")
    assert (wrong.exit_code, "operator" in wrong.stderr) == (2, True)


async def test_tenants_are_listed_and_changed_by_commands(socket: Path, tmp_path: Path) -> None:
    await tuneserve(tmp_path, "keys", "create", "--tenant", "alice")
    options = ["--weight", "2.5", "--max-jobs", "10", "--max-models", "3"]
    more = ["--max-checkpoints", "0", "--max-checkpoint-bytes", "1000", "--device-s-a-day", "60.5"]
    done = await tuneserve(tmp_path, "tenants", "set", "bob", *options, *more)
    assert done.stdout.splitlines()[1].split() == ["bob", "2.5", "10", "3", "0", "1000", "60.5"]
    await tuneserve(tmp_path, "tenants", "set", "bob", "--max-jobs", "none", "--weight", "1")
    listed = await tuneserve(tmp_path, "tenants", "list")
    assert [row.split() for row in listed.stdout.splitlines()[1:]] == [
        ["alice", "-", "-", "-", "-", "-", "-"],
        ["bob", "1.0", "-", "3", "0", "1000", "60.5"],
    ]
    as_json = json.loads((await tuneserve(tmp_path, "tenants", "list", "--json")).stdout)
    assert [each["max_models"] for each in as_json] == [None, 3]
    assert all(set(each) == TENANT for each in as_json)
    refused = await tuneserve(tmp_path, "tenants", "set", "bob", "--weight", "many")
    assert (refused.exit_code, "weight" in refused.stderr) == (1, True)
    assert (await tuneserve(tmp_path, "tenants", "set", "bob")).exit_code == 2


async def test_without_an_api_process_a_command_names_what_to_start(tmp_path: Path) -> None:
    for arguments in (["keys", "list"], ["tenants", "list"], ["keys", "create", "--tenant", "a"]):
        result = await tuneserve(tmp_path, *arguments)
        assert result.exit_code == 1
        assert str(tmp_path / "admin.sock") in result.stderr
        assert "tuneserve up" in result.stderr
        assert "--data-dir" in result.stderr


async def test_an_unreadable_settings_file_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tuneserve.toml").write_text("base_model = \n")
    ran = CliRunner().invoke(cli.app, ["keys", "list"])
    assert ran.exit_code == 2
    assert "tuneserve.toml cannot be read" in ran.stderr and ran.stderr.count("\n") == 1
