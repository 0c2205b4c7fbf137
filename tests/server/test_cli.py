"""The command line and the settings: what is refused, and how it is said."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from tuneserve_engine.config import CommonSettings, WorkerSettings
from tuneserve_server import cli
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
def test_an_address_that_others_can_reach_is_refused(host: str) -> None:
    with pytest.raises(ValidationError, match="accepts any API key"):
        ApiSettings(host=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_addresses_are_accepted(host: str) -> None:
    assert ApiSettings(host=host).host == host


@pytest.mark.parametrize("command", ["api", "up"])
def test_the_command_line_refuses_other_addresses_with_the_way_out(
    command: str, tmp_path: Path
) -> None:
    result = tuneserve(command, "--host", "0.0.0.0", TUNESERVE_DATA_DIR=str(tmp_path))
    assert result.returncode == 2
    assert "'0.0.0.0' is not a loopback address" in result.stderr
    assert "127.0.0.1" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["api", "up"])
def test_a_port_in_use_is_named_with_the_way_out(command: str, tmp_path: Path) -> None:
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


def test_flags_override_the_environment_and_it_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tuneserve.toml").write_text("port = 1111\npoll_s = 3\nlora_alpha = 8\n")
    monkeypatch.setenv("TUNESERVE_PORT", "2222")
    monkeypatch.setenv("TUNESERVE_POLL_S", "4")
    settings = ApiSettings(port=3333)
    assert (settings.port, settings.poll_s, settings.lora_alpha) == (3333, 4.0, 8.0)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        ApiSettings().port = 1


def test_every_setting_is_described() -> None:
    assert all(field.description for field in ApiSettings.model_fields.values())


def test_a_clients_installation_is_told_what_the_service_needs() -> None:
    without = "import sys, tuneserve_server.__main__ as t; sys.modules['typer'] = None; t.main()"
    result = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("tuneserve: typer is not installed")
    assert "pip install 'tuneserve[server,engine]'" in result.stderr


def test_the_command_names_its_halves() -> None:
    result = tuneserve("--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("up", "api", "worker"))


@pytest.mark.parametrize(
    ("command", "settings"),
    [("api", [ApiSettings]), ("worker", [WorkerSettings]), ("up", [ApiSettings, WorkerSettings])],
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


@pytest.mark.parametrize("command", ["up", "api", "worker"])
def test_a_misspelt_setting_in_the_file_is_refused_with_the_right_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tuneserve.toml").write_text("batch_token = 512")
    result = tuneserve(command)
    assert result.returncode == 2
    assert "'batch_token', which is no setting; did you mean batch_tokens?" in result.stderr


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


def test_a_misspelt_variable_is_mentioned() -> None:
    result = tuneserve("api", "--host", "0.0.0.0", TUNESERVE_PROT="8411")
    assert (
        "TUNESERVE_PROT is no setting and is ignored; did you mean TUNESERVE_PORT?" in result.stderr
    )


def test_what_the_worker_would_refuse_is_said_before_anything_starts() -> None:
    result = tuneserve("up", "--dtype", "float16")
    assert result.returncode == 2
    assert "dtype" in result.stderr


@pytest.mark.parametrize("command", ["up", "worker"])
def test_an_installation_without_the_engine_is_told_what_a_worker_needs(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda _: None)
    result = CliRunner().invoke(cli.app, [command])
    assert result.exit_code == 2
    assert "pip install 'tuneserve[engine]'" in result.stderr
