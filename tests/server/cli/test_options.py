"""The errors of the commands for a running server, as one line and an exit status."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from tuneserve_client.errors import NotFound, RequestFailed, Unauthorized, Unreachable
from tuneserve_client.wire.types import LoraConfig
from tuneserve_server.cli.options import HERE, ListFirst, connected

URL = "http://box:1"


def ended(
    error: Exception, capsys: pytest.CaptureFixture[str], url: str = URL, key: str | None = None
) -> tuple[int, str]:
    """The exit status and the line with which a command ends on this error."""
    with pytest.raises(typer.Exit) as ending, connected(url, key):
        raise error
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return ending.value.exit_code, said.err.strip()


def invalid(model: Any, **fields: Any) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(fields)
    return caught.value


@pytest.mark.parametrize(
    "error", [RequestFailed("no\nmemory", category="server"), OSError("no memory")]
)
def test_an_error_of_the_server_or_of_this_machine_ends_with_1(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(error, capsys) == (1, "tuneserve: no memory")


def test_a_reason_of_the_server_names_options(capsys: pytest.CaptureFixture[str]) -> None:
    error = RequestFailed("lora_config.rank is 0", category="user")
    assert ended(error, capsys) == (1, "tuneserve: --rank is 0")


def test_a_wrong_value_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(ValueError("rank is 0"), capsys) == (2, "tuneserve: rank is 0")
    status, said = ended(invalid(LoraConfig, rank="x"), capsys)
    assert status == 2 and said.startswith("tuneserve: rank: ")


def test_a_refused_key_says_how_to_give_one_unless_one_was_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = Unauthorized("no such key", status=401, code="unauthorized")
    assert ended(error, capsys) == (
        1,
        "tuneserve: no such key; give a key with TUNESERVE_API_KEY or --api-key",
    )
    assert ended(error, capsys, key="tml-x") == (1, "tuneserve: no such key")
    missing = NotFound("no such run", status=404, code="not_found")
    assert ended(missing, capsys) == (1, "tuneserve: no such run")


def test_without_a_server_here_the_command_that_starts_one_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = Unreachable("it does not answer")
    error.__cause__ = httpx.ConnectError("refused")
    assert ended(error, capsys) == (1, "tuneserve: it does not answer")
    assert ended(error, capsys, HERE) == (
        1,
        "tuneserve: it does not answer; start one with: tuneserve up",
    )


def test_another_program_at_the_address_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(typer.Exit) as ending, connected(url, None) as client:
            client.health()
        server.shutdown()
    assert ending.value.exit_code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"tuneserve: {url}")
    assert said.endswith("answers, but is not a tuneserve server; check the address\n")
    there = Unreachable("it is not a tuneserve server")
    assert ended(there, capsys, HERE) == (1, "tuneserve: it is not a tuneserve server")


def test_an_address_without_a_scheme_is_refused_before_anything_is_sent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit) as ending, connected("box:8410", None):
        raise AssertionError
    assert ending.value.exit_code == 2
    assert "the address is 'box:8410'; it must begin with http://" in capsys.readouterr().err


@pytest.fixture
def group() -> typer.Typer:
    app = typer.Typer(cls=ListFirst)

    @app.command("list")
    def list_things(run: str = "all") -> None:
        typer.echo(f"list {run}")

    @app.command("delete")
    def delete_thing(name: str) -> None:
        typer.echo(f"delete {name}")

    return app


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "list all"),
        (["--run", "r"], "list r"),
        (["list", "--run", "r"], "list r"),
        (["delete", "x"], "delete x"),
    ],
)
def test_a_group_without_a_command_lists(
    arguments: list[str], said: str, group: typer.Typer
) -> None:
    assert CliRunner().invoke(group, arguments).stdout.strip() == said


def test_the_help_of_a_group_names_all_its_commands(group: typer.Typer) -> None:
    shown = CliRunner().invoke(group, ["--help"]).stdout
    assert "list" in shown and "delete" in shown
