"""The command line and what it refuses, with the messages."""

import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_server import serve
from tuneserve_server.cli import main as cli
from tuneserve_server.cli import services, supervisor
from tuneserve_server.cli.local_server import free_port
from tuneserve_server.cli.setting_groups import FIRST, GROUPS
from tuneserve_server.cli.setting_options import command
from tuneserve_server.cli.supervisor import ChildSpec
from tuneserve_server.listening import CannotStart
from tuneserve_server.settings import ApiSettings

ROOT = Path(__file__).parents[3]


def tuneserve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tuneserve_server", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.com", ""])
def test_a_reachable_address_needs_keys_or_the_operators_consent(host: str) -> None:
    with pytest.raises(CannotStart, match="accepts any") as refusal:
        serve._check_reach(ApiSettings(host=host), is_keyed=False)
    for way_out in ("require_keys = true", "tuneserve keys create", "trusted_network = true"):
        assert way_out in str(refusal.value)
    serve._check_reach(ApiSettings(host=host), is_keyed=True)
    serve._check_reach(ApiSettings(host=host, trusted_network=True), is_keyed=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_addresses_are_accepted(host: str) -> None:
    serve._check_reach(ApiSettings(host=host), is_keyed=False)


def test_commands_start_without_the_application() -> None:
    slow = ("fastapi", "huggingface_hub", "jax", "tuneserve_server.app", "uvicorn")
    code = (
        "import sys; import tuneserve_server.cli.main; "
        f"print(*(name for name in {slow} if name in sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "\n"


@pytest.mark.parametrize("command", ["api", "up"])
def test_the_command_line_refuses_other_addresses_and_names_the_options(
    command: str, tmp_path: Path
) -> None:
    place = ("--port", str(free_port()), "--data-dir", str(tmp_path))
    result = tuneserve(command, "--host", "0.0.0.0", *place)
    assert result.returncode == 2
    assert "'0.0.0.0' is not a loopback address" in result.stderr
    assert "127.0.0.1" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["api", "up"])
def test_a_port_in_use_is_named_with_a_way_out(command: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        result = tuneserve(command, "--port", port, "--data-dir", str(tmp_path))
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in result.stderr
    assert "--port" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_service_whose_only_worker_would_only_sample_is_refused(tmp_path: Path) -> None:
    result = tuneserve("up", "--sample-only", "--data-dir", str(tmp_path))
    assert result.returncode == 2
    assert "models would wait for a worker that trains; unset it, and start" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_data_directory_that_cannot_hold_the_socket_is_refused(tmp_path: Path) -> None:
    result = tuneserve("api", "--port", "8498", "--data-dir", str(tmp_path / ("x" * 100)))
    assert result.returncode == 2
    assert "choose a shorter data directory" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_boolean_setting_is_a_flag_without_a_value() -> None:
    """``--retrieve-futures --port 1`` once took ``--port`` as its value."""
    given: dict[str, str] = {}
    run = CliRunner().invoke(
        _recorder(given),
        ["--retrieve-futures", "--no-access-log", "--base-model", "X", "--rescore-samples"],
    )
    assert run.exit_code == 0, run.output
    assert given == {
        **{"retrieve_futures": "true", "access_log": "false"},
        **{"base_model": "X", "rescore_samples": "true"},
    }
    assert ApiSettings(**{k: v for k, v in given.items() if k in ApiSettings.model_fields})


def _recorder(given: dict[str, str]) -> typer.Typer:
    """A command line of one command with the options of ``tuneserve up``, which it records."""

    @command(ApiSettings, WorkerSettings)
    def up(found: dict[str, str]) -> None:
        """Record the options."""
        given.update(found)

    return up


def test_files_lie_in_the_data_directory_or_in_a_shared_directory() -> None:
    assert CommonSettings(data_dir=Path("/srv")).files_dir == Path("/srv/files")
    shared = CommonSettings(data_dir=Path("/srv"), files_dir=Path("/shared"))
    assert shared.files_dir == Path("/shared")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("redis://:hunter2@host:6379/0", "redis://***@host:6379/0"),
        ("rediss://user:hunter2@host", "rediss://***@host"),
        ("redis://user:a@hunter2@host/1", "redis://***@host/1"),
        ("redis://host/0?password=hunter2&db=1", "redis://host/0?password=***&db=1"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        ("unix://user:hunter2@/run/redis.sock", "unix://***@/run/redis.sock"),
    ],
)
def test_the_address_of_the_store_is_shown_without_its_password(address: str, shown: str) -> None:
    settings = CommonSettings(store=address)
    assert (settings.store_kind, settings.store_shown) == ("redis", shown)
    assert "hunter2" not in f"{settings!r} {settings}"


@pytest.mark.parametrize(
    ("folder", "setting", "told", "is_notice"),
    [
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/" + "a" * 40, None, "Qwen/Qwen3-0.6B", False),
        ("hub/models--gpt2/snapshots/main", None, "gpt2", False),
        ("models--Qwen--Qwen3-0.6B/other", None, None, True),
        ("private", None, None, True),
        ("private", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", False),
        ("private", "/models/private", "/models/private", False),
    ],
)
def test_clients_get_a_tokenizer_that_they_can_load(
    tmp_path: Path, folder: str, setting: str | None, told: str | None, is_notice: bool
) -> None:
    path = tmp_path / folder
    path.mkdir(parents=True)
    settings = CommonSettings(base_model=str(path), base_model_tokenizer=setting)
    assert settings.tokenizer_id == str(path)  # used by the service's own processes
    assert settings.client_tokenizer_id == (told or str(path))
    notice = settings.local_tokenizer
    assert (notice is not None) == is_notice
    if notice is not None:
        assert str(path) in notice and "set base_model_tokenizer" in notice


def test_the_tokenizer_of_a_hub_id_and_of_the_embedded_model() -> None:
    hub = CommonSettings(base_model="Qwen/Qwen3-0.6B")
    assert (hub.client_tokenizer_id, hub.local_tokenizer) == ("Qwen/Qwen3-0.6B", None)
    embedded = CommonSettings()
    assert "the tokenizer of tuneserve/tiny" in (embedded.local_tokenizer or "")


@pytest.mark.parametrize(("host", "is_told"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_start_names_the_tokenizer_of_remote_clients(
    host: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    serve._say_who_gets_in(ApiSettings(host=host), is_keyed=True)
    assert ("set base_model_tokenizer" in caplog.text) == is_told


def test_without_an_address_the_store_is_sqlite() -> None:
    settings = CommonSettings(data_dir=Path("/srv"))
    assert (settings.store_kind, settings.store_shown) == ("sqlite", "/srv/store.db")


def refusal(command: str, origin: str, value: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message about a refused value, which is given as an option or a variable."""
    if origin.startswith("--"):
        result = CliRunner().invoke(cli.app, [command, origin, value])
    else:
        monkeypatch.setenv(origin, value)
        result = CliRunner().invoke(cli.app, [command])
    assert result.exit_code == 2, result.output
    assert f"(from {origin})" in result.output
    return result.output


@pytest.mark.parametrize("origin", ["--store", "TUNESERVE_STORE"])
@pytest.mark.parametrize("value", ["user:hunter2@host", "http://user:hunter2@host", "redis"])
def test_a_malformed_address_is_refused_without_showing_its_password(
    origin: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refusal("api", origin, value, monkeypatch)
    assert "redis://host:6379/0" in said
    assert "hunter2" not in said
    with pytest.raises(ValidationError) as error:
        CommonSettings(store=value)
    assert "hunter2" not in str(error.value)


def test_a_worker_is_named_after_its_host_and_process() -> None:
    name = f"{socket.gethostname()}-{os.getpid()}"
    assert WorkerSettings().lease_name == name
    assert WorkerSettings(worker_name="gpu-0").lease_name == "gpu-0"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], "worker"),
        (["--worker-name", "mine"], "mine"),
        (["--store", "redis://host"], f"worker-{socket.gethostname()}-8498"),
    ],
)
def test_up_gives_its_workers_one_name_unique_to_this_up(
    options: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted worker takes over at once from the one that died."""
    seen: list[ChildSpec] = []

    class Keeper:
        def __init__(self, children: list[ChildSpec], *_: object) -> None:
            seen.extend(children)

        async def supervise(self, _: object) -> int:
            return 0

    monkeypatch.setattr(supervisor, "Supervisor", Keeper)
    result = CliRunner().invoke(cli.app, ["up", "--port", "8498", *options])
    assert result.exit_code == 0, result.output
    assert {child.environment["TUNESERVE_WORKER_NAME"] for child in seen} == {name}
    if "--store" in options:
        assert {child.environment["TUNESERVE_STORE"] for child in seen} == {"redis://host"}
        assert not any("redis://host" in child.command for child in seen)


@pytest.mark.parametrize("origin", ["--tenant-weights", "TUNESERVE_TENANT_WEIGHTS"])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("t-1=2", "it is not a JSON object"),
        ("[1]", "input should be a valid dictionary"),
        ('{"t-1": 0}', "input should be greater than 0"),
        ('{"t-1": "much"}', "input should be a valid number"),
    ],
)
def test_invalid_weights_are_refused(
    origin: str, value: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"(from {origin}); {named}" in refusal("up", origin, value, monkeypatch)


def test_an_invalid_weight_is_named_with_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    value = '{"t-1": 1, "t-2": 0}'
    refused = refusal("worker", "--tenant-weights", value, monkeypatch)
    assert "tenant_weights['t-2'] is 0 (from --tenant-weights)" in refused


def test_weights_come_from_options_the_environment_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tuneserve.toml").write_text("[tenant_weights]\n't-1' = 2\n")
    assert WorkerSettings().tenant_weights == {"t-1": 2.0}
    monkeypatch.setenv("TUNESERVE_TENANT_WEIGHTS", '{"t-2": 0.5}')
    assert WorkerSettings().tenant_weights == {"t-2": 0.5}
    given: dict[str, Any] = {"tenant_weights": '{"t-3": 4}'}
    assert WorkerSettings(**given).tenant_weights == {"t-3": 4.0}


def test_the_help_names_the_commands_of_both_halves() -> None:
    result = tuneserve("--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("up", "api", "worker", "plan"))


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("api", [ApiSettings]),
        ("worker", [WorkerSettings]),
        ("plan", [WorkerSettings]),
        ("up", [ApiSettings, WorkerSettings]),
    ],
)
def test_every_setting_is_an_option(command: str, settings: list[type[CommonSettings]]) -> None:
    help_text = tuneserve(command, "--help-all").stdout
    names = {name for each in settings for name in each.model_fields}
    assert all(f"--{name.replace('_', '-')} " in help_text for name in names)


def test_the_short_help_has_the_first_settings_by_group_and_names_the_long_one() -> None:
    help_text = tuneserve("up", "-h").stdout
    assert re.findall(r"^(\w[\w ]*):$", help_text, re.M)[:2] == ["Model", "Network"]
    options = set(re.findall(r"^  --([\w-]+)", help_text, re.M)) - {"help-all", "help"}
    assert {name.replace("-", "_") for name in options} == FIRST
    assert "--help-all" in help_text


def test_every_setting_is_in_one_group() -> None:
    names = [name for names in GROUPS.values() for name in names.split()]
    assert sorted(names) == sorted({*ApiSettings.model_fields, *WorkerSettings.model_fields})
    assert set(names) >= FIRST


def test_sizes_and_durations_are_named_in_the_help() -> None:
    help_text = tuneserve("up", "--help-all").stdout
    assert "--device-memory-bytes SIZE" in help_text
    assert "--park-s DURATION" in help_text


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tuneserve("--version").stdout == f"tuneserve {project['version']}\n"


def test_the_help_of_every_command_is_the_one_in_the_overview() -> None:
    """The overview is shown without importing the commands, so it has texts of its own."""
    overview = tuneserve("--help").stdout
    for name, (_, text) in [each for part in cli.SECTIONS.values() for each in part.items()]:
        assert f"  {name} " in overview and text in overview
        result = tuneserve(name, "-h")
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(f"Usage: python -m tuneserve_server {name}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["up", "--help"],
        ["train", "--help"],
        ["train", "missing.jsonl"],
        ["chat", "--nonsense"],
        ["runs", "show"],
        ["checkpoints", "--help"],
        ["top", "-h"],
        ["keys", "create"],
        ["up", "--port", "abc"],
        ["doctor", "--port", "abc"],
        ["plan", "--device", "abc"],
        ["compile", "--device", "abc"],
        ["compile", "--driver", "abc"],
    ],
)
def test_help_and_errors_of_arguments_come_before_heavy_imports(arguments: list[str]) -> None:
    """Each of these packages takes as long to import as all that the help needs."""
    heavy = ("fastapi", "httpx", "huggingface_hub", "jax", "numpy", "redis", "rich", "uvicorn")
    code = (
        "import atexit, sys; from tuneserve_server.__main__ import main; "
        f"atexit.register(lambda: print('loaded:', *(n for n in {heavy} if n in sys.modules))); "
        f"sys.argv = {['tuneserve', *arguments]}; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode in (0, 2), result.stderr
    assert result.stdout.splitlines()[-1] == "loaded:", result.stdout + result.stderr


@pytest.mark.parametrize("group", ["runs", "checkpoints", "keys"])
def test_the_shell_completes_the_commands_of_a_group(group: str) -> None:
    words = {"COMP_WORDS": f"tuneserve {group} l", "COMP_CWORD": "2"}
    asked = {**os.environ, **words, "_TUNESERVE_COMPLETE": "complete_bash"}
    program = "from tuneserve_server.__main__ import main; main()"
    command = [sys.executable, "-c", f"import sys; sys.argv = ['tuneserve']; {program}"]
    ran = subprocess.run(command, env=asked, capture_output=True, text=True)
    assert "list" in ran.stdout.split(), ran


def test_a_misspelt_command_is_answered_with_the_nearest_one() -> None:
    result = tuneserve("trian")
    assert result.returncode == 2
    assert "No such command 'trian'. Did you mean 'train'?" in result.stderr


@pytest.mark.parametrize("origin", ["--poll-s", "TUNESERVE_POLL_S", "tuneserve.toml"])
def test_a_bad_value_is_named_with_its_setting_and_its_origin(
    origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if origin == "tuneserve.toml":
        Path(origin).write_text('poll_s = "soon"')
    option = (origin, "soon") if origin == "--poll-s" else ()
    result = tuneserve("up", *option, **({origin: "soon"} if origin.isupper() else {}))
    assert result.returncode == 2
    assert f"poll_s is 'soon' (from {origin}); input should be a valid number" in result.stderr


@pytest.mark.parametrize("command", ["up", "api", "worker", "plan"])
def test_a_misspelt_setting_in_the_file_is_refused_with_the_right_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tuneserve.toml").write_text("batch_token = 512")
    result = tuneserve(command)
    assert result.returncode == 2
    assert "'batch_token', which is not a setting; did you mean batch_tokens?" in result.stderr


def test_a_settings_file_with_a_syntax_error_is_refused_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tuneserve.toml").write_text("port = 8410\nhost = \npoll_s = 3")
    result = tuneserve("api")
    assert result.returncode == 2
    assert "tuneserve.toml cannot be read" in result.stderr
    assert "line 2" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_misspelt_variable_is_mentioned_and_the_clients_variables_are_not(tmp_path: Path) -> None:
    place = ("--port", str(free_port()), "--data-dir", str(tmp_path))
    clients = {"TUNESERVE_URL": "http://127.0.0.1:8410", "TUNESERVE_API_KEY": "tml-you"}
    result = tuneserve("api", "--host", "0.0.0.0", *place, TUNESERVE_PROT="8411", **clients)
    assert "TUNESERVE_URL" not in result.stderr and "TUNESERVE_API_KEY" not in result.stderr
    assert (
        "TUNESERVE_PROT is not a setting and is ignored; did you mean TUNESERVE_PORT?"
        in result.stderr
    )


def test_a_setting_that_the_worker_would_refuse_stops_the_start() -> None:
    result = tuneserve("up", "--dtype", "float16")
    assert result.returncode == 2
    assert "dtype" in result.stderr


@pytest.mark.parametrize("command", ["up", "worker", "plan"])
def test_an_installation_without_the_engine_says_what_a_worker_needs(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "find_spec", lambda _: None)
    result = CliRunner().invoke(cli.app, [command])
    assert result.exit_code == 2
    assert "pip install '.[engine]'" in result.stderr
