"""The official SDK's calls about accounts, and its commands, against the real API process.

The service makes SDKs exchange their keys for tokens (``token_auth``).
"""

import json
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError
from tinker.lib.internal_client_holder import sessionless_holder_cache

from tests.integration.test_sdk_wire import Server, datum, running_server, trainer_of
from tests.sdk import close_clients, service_client
from tuneserve_server.access.auth import open_tenant

pytestmark = [
    # The SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning"),
]

ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NO_PROXY", "127.0.0.1")
        environment.setenv("no_proxy", "127.0.0.1")
        environment.setenv("TUNESERVE_TOKEN_AUTH", "true")
        yield from running_server(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(server: Server) -> Iterator[tuple[str, str]]:
    """A session and its model, which has trained and saved a checkpoint."""
    with service_client(server.url, server.key) as service:
        trainer = trainer_of(service)
        trainer.forward_backward([datum(1, 2, 3)], "cross_entropy").result()
        trainer.optim_step(ADAM).result()
        trainer.save_state("kept").result()
        yield service.holder.get_session_id(), trainer.model_id
    close_clients()  # while the server runs, because they send their telemetry


@pytest.fixture
def rest(server: Server) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=server.key)


@pytest.fixture
def admin(server: Server) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=server.url, api_key=server.key)


@pytest.fixture
def home(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without credentials, and the server as the one of the commands."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    # The commands of other tests, in this process, had other servers and keys.
    monkeypatch.setattr(sessionless_holder_cache, "_holders", {})
    return tmp_path


def printed(*arguments: str, typed: str | None = None) -> str:
    """The output of ``tinker``, run in this process, because its imports take seconds."""
    result = CliRunner().invoke(main_cli, list(arguments), input=typed)
    assert result.exit_code == 0, (result.output, result.exception)
    text: str = result.stdout
    return text


def printed_json(*arguments: str) -> Any:
    return json.loads(printed("--format", "json", *arguments))


def window() -> tuple[datetime, datetime]:
    """The days of yesterday and today, so that midnight does no harm."""
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return today - timedelta(days=1), today + timedelta(days=1)


def test_the_sdk_knows_who_it_is(server: Server, rest: tinker.RestClient) -> None:
    identity = rest.whoami().result()
    assert identity.org_urn == f"tml:organization:{open_tenant(server.key)}"
    assert identity.email is None


def test_sessions_are_searched_and_moved(trained: tuple[str, str], rest: tinker.RestClient) -> None:
    session, model = trained
    rest.assign_session_project(session, "evals").result()
    for project, wanted in (("evals", [session]), ("others", [])):
        request = types.SessionSearchRequest(project_ids=[project], limit=1)
        page = rest.search_sessions(request).result()
        assert [each.session_id for each in page.sessions] == wanted
        runs = rest.list_training_runs(project_id=project).result().training_runs
        assert [run.training_run_id for run in runs] == ([model] if wanted else [])
    (found,) = rest.search_sessions(types.SessionSearchRequest()).result().sessions
    assert (found.project_id, found.checkpoints_count) == ("evals", 1)
    with pytest.raises(tinker.NotFoundError):
        rest.assign_session_project("s-none", "evals").result()


def test_a_timeline_is_downloaded_without_a_key(
    trained: tuple[str, str], rest: tinker.RestClient
) -> None:
    session, model = trained
    with urllib.request.urlopen(rest.export_session_trace(session).result()) as answer:
        events = json.load(answer)["traceEvents"]
    begun = [each["name"] for each in events if each["ph"] == "b" and "args" in each]
    assert begun == ["create_model", "forward_backward", "optim_step", "save_weights"]
    assert any(model in each["args"]["name"] for each in events if each["ph"] == "M")


def test_usage_is_reported_in_the_sdks_form(
    trained: tuple[str, str], admin: tinker.AdminClient
) -> None:
    session, _ = trained
    usage = admin.get_billing_usage(*window()).result()
    (training,) = usage.data
    assert (training.event_info.type, training.session_id) == ("training", session)
    assert training.event_info.token_count == 2
    (kept,) = admin.get_current_checkpoint_storage_usage().result().data
    assert kept.checkpoint_count == 1 and kept.size_bytes > 0
    assert admin.get_current_checkpoint_storage_usage("none").result().data == []


def test_the_audit_log_has_the_sdks_own_calls(
    trained: tuple[str, str], rest: tinker.RestClient, admin: tinker.AdminClient
) -> None:
    path = f"tinker://{trained[1]}/weights/kept"
    before = len(admin.get_audit_log("checkpoints").result().entries)
    rest.publish_checkpoint_from_tinker_path(path).result()
    entries = admin.get_audit_log("checkpoints").result().entries
    assert len(entries) == before + 1
    assert (entries[0].event, entries[0].tinker_path) == ("checkpoint_publish", path)
    assert admin.get_audit_log("teams").result().entries == []


def test_the_commands_of_the_sdk_work(server: Server, trained: tuple[str, str], home: Path) -> None:
    session, _ = trained
    assert "Logged in as open mode" in printed("auth", "login", typed=f"{server.key}\n")
    (stored,) = json.loads((home / ".tinker/credentials.json").read_text())["keys"].values()
    assert (stored["key"], stored["name"]) == (server.key, "open mode")
    # The commands have no other credential than the stored one.
    assert open_tenant(server.key) in printed("auth", "whoami")
    start, end = (each.isoformat().replace("+00:00", "Z") for each in window())
    usage = printed_json("billing", "usage", start, end)
    assert list(usage["sessions"]) == [session]
    storage = printed_json("billing", "checkpoint-storage")
    assert [each["checkpoint_count"] for each in storage["data"]] == [1]
    file = home / "trace.pftrace"
    printed("session", "export-trace", session, "--output", str(file))
    assert json.loads(file.read_text())["otherData"]["session_id"] == session
    assert "is still active" in printed("auth", "logout")
    assert json.loads((home / ".tinker/credentials.json").read_text())["keys"] == {}


def test_a_refused_key_is_not_stored(home: Path) -> None:
    result = CliRunner().invoke(main_cli, ["auth", "login"], input="sk-other\n")
    assert result.exit_code != 0 and isinstance(result.exception, TinkerCliError)
    assert "send any key that starts with tml-" in str(result.exception.details)
    assert not (home / ".tinker").exists()


def test_training_bodies_are_compressed(server: Server) -> None:
    """The SDK compresses them because the server asks it to."""
    with service_client(server.url, server.key) as service:
        trainer = trainer_of(service)
        assert service.holder._client_config.proto_compress_fwdbwd
        result = trainer.forward_backward([datum(1, 2, 3)], "cross_entropy").result()
        # The logprobs of 1 -> 2 and 2 -> 3 by the backend's formula.
        logprobs = result.loss_fn_outputs[0]["logprobs"].tolist()
        assert logprobs == pytest.approx([-(1 + 3) / 8, -(1 + 5) / 8])
