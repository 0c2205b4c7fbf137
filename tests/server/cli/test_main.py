"""The command line and what it refuses, with the messages."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner, Result

from tuneserve_engine.backend.jax.memory import report
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_server import serve
from tuneserve_server.cli import main as cli
from tuneserve_server.cli import supervisor
from tuneserve_server.cli.local_server import free_port
from tuneserve_server.cli.supervisor import ChildSpec
from tuneserve_server.listening import CannotStart
from tuneserve_server.settings import ApiSettings


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
    app, taken = typer.Typer(), cli.app
    cli.app = app
    try:

        @cli._command(ApiSettings, WorkerSettings)
        def up(found: dict[str, str]) -> None:
            """Record the options."""
            given.update(found)

    finally:
        cli.app = taken
    return app


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


def test_an_installation_of_the_client_says_what_the_service_needs() -> None:
    without = "import sys, tuneserve_server.__main__ as t; sys.modules['typer'] = None; t.main()"
    result = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("tuneserve: typer is not installed")
    assert "pip install '.[server,engine]'" in result.stderr


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
    help_text = tuneserve(command, "--help").stdout
    names = {name for each in settings for name in each.model_fields}
    assert all(f"--{name.replace('_', '-')} " in help_text for name in names)


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
    monkeypatch.setattr(cli, "find_spec", lambda _: None)
    result = CliRunner().invoke(cli.app, [command])
    assert result.exit_code == 2
    assert "pip install '.[engine]'" in result.stderr


# --- tuneserve plan -------------------------------------------------------------------------------


def planned(*arguments: str, **environment: str) -> Result:
    """Run ``tuneserve plan`` without its process, which would import JAX anew."""

    def execute(_: str, command: list[str], environment: dict[str, str]) -> None:
        assert command[1:3] == ["-m", report.__name__]
        with (
            mock.patch.dict(os.environ, environment, clear=True),
            mock.patch.object(sys, "argv", command[2:]),
        ):
            raise SystemExit(report.main())

    with mock.patch.object(os, "execve", execute):
        return CliRunner().invoke(cli.app, ["plan", *arguments], env=environment)


def test_the_plan_shows_the_use_of_the_memory() -> None:
    result = tuneserve("plan", "--device-memory-bytes", str(2**30), "--max-rank", "32")
    assert result.returncode == 0, result.stderr
    memory, kinds = result.stdout.split("\n\nsize of an adapter on the device: ")
    first, *_, last = memory.splitlines()
    assert first == "tuneserve/tiny, float32, on cpu"
    assert last.split() == ["total", "1.00", "GiB"]
    assert re.search(r"^lora +1\.33 MiB of rank 8, 5\.31 MiB of rank 32$", kinds, re.M)
    assert re.search(r"^osft core +[\d.]+ KiB of rank 8, ", kinds, re.M)
    assert re.search(r"^all adapters of kind osft share .* on the device, .* on disk", kinds, re.M)
    assert "base weights" in result.stdout and "918,912 parameters * 4 bytes" in result.stdout
    assert "requests in one batch: 32 up to rank 8, 8 up to rank 32\n" in result.stdout


def test_the_plan_names_the_kinds_without_room_beside_their_shared_weights() -> None:
    """Two of rank 128 take 39.2 MiB, their shared weights 4.8, and 43 are available."""
    room = str(43 * 2**20)
    result = planned("--adapter-device-bytes", room)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^osft factors .*; no room for rank 8, 32, 128$", result.stdout, re.M)
    assert result.stdout.count("no room") == 1
    kinds = json.loads(planned("--json", "--adapter-device-bytes", room).stdout)["kinds"]
    assert kinds["osft factors"]["refused_ranks"] == [8, 32, 128]
    assert kinds["osft short_fixed"]["refused_ranks"] == []


def test_programs_can_read_the_plan() -> None:
    result = planned("--json", "--batch-tokens", "8192", TUNESERVE_REMAT="full")
    found = json.loads(result.stdout)
    asked = {"device": "cpu", "batch_tokens": 8192, "remat": "full", "context_tokens": 2048}
    assert found.items() >= asked.items()
    assert sum(line["bytes"] for line in found["lines"]) == found["device_bytes"]
    lora = found["kinds"]["lora"]["bytes_by_rank"]
    assert lora["32"] == 4 * lora["8"]


def test_a_plan_for_an_absent_gpu_takes_its_memory_and_dtype() -> None:
    """By hand: three quarters of 81,559 MiB, which is JAX's share."""
    found = json.loads(planned("--json", "--device", "h100").stdout)
    assert (found["device"], found["dtype"]) == ("gpu", "bfloat16")
    assert found["device_bytes"] == 81_559 * 2**20 * 3 // 4
    whole = planned("--device", "h200", XLA_PYTHON_CLIENT_MEM_FRACTION="0.5")
    assert re.search(r"^total +70\.20 GiB$", whole.stdout, re.M)


@pytest.mark.parametrize("share", ["0", "1.5", "most"])
def test_a_share_of_a_gpu_that_is_none_is_refused(share: str) -> None:
    result = planned("--device", "h200", XLA_PYTHON_CLIENT_MEM_FRACTION=share)
    assert result.exit_code == 2
    assert f"XLA_PYTHON_CLIENT_MEM_FRACTION is '{share}'; " in result.stderr
    assert "above 0 and up to 1" in result.stderr


def test_a_plan_for_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    result = planned("--device", "h20")
    assert result.exit_code == 2
    assert "'h20' (choose from" in result.stderr and "h200" in result.stderr


def test_an_impossible_plan_is_refused_with_the_arithmetic() -> None:
    result = planned("--device-memory-bytes", "1000000")
    assert result.exit_code == 2
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert "memory, and 976.56 KiB is available" in result.stderr
    assert "  base weights: 3.51 MiB\n" in result.stderr


def test_a_plan_for_a_missing_base_model_is_refused() -> None:
    result = planned("--base-model", "./nowhere")
    assert result.exit_code == 2
    assert "'./nowhere': no such directory" in result.stderr


@pytest.mark.parametrize("value", ["0", "100", "32"])
def test_a_chunk_that_is_not_a_multiple_of_a_block_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"chunk_tokens is '{value}'" in refusal("plan", "--chunk-tokens", value, monkeypatch)
