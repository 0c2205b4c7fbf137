"""Host names that the server answers to, with and without keys, and trusted proxies."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.processes import running_service
from tuneserve_engine.store.open import open_store
from tuneserve_server.access.hosts import AllowedHosts, names_of
from tuneserve_server.app import create_app
from tuneserve_server.settings import ApiSettings

EVIL = "evil.example:8410"


def is_allowed(host: str, *names: str, bound: str = "127.0.0.1", url: str | None = None) -> bool:
    return AllowedHosts(names_of(bound, url, names)).has(host)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8410",
        "localhost.:8410",
        "box.localhost",
        "127.0.0.1:8410",
        "10.1.2.3",
        "[::1]:8410",
        "[fe80::1]",
    ],
)
def test_loopback_names_and_addresses_are_always_allowed(host: str) -> None:
    assert is_allowed(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        EVIL,
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "localhost:8410:80",
        "localhost@evil.example",
        "evillocalhost",
        "[::1",
        "[::1]evil.example",
        "*",
        "127.0.0.1,evil.example",
    ],
)
def test_other_names_are_refused(host: str) -> None:
    assert not is_allowed(host)


def test_the_operator_adds_names_and_wildcards() -> None:
    names = ("box.lan", "*.example.org")
    assert is_allowed("BOX.lan:8410", *names)
    assert is_allowed("a.b.example.org", *names)
    assert not is_allowed("example.org", *names) and not is_allowed("evilexample.org", *names)
    assert is_allowed(EVIL, "*")
    assert is_allowed("tune.example.net", url="https://tune.example.net/x")
    assert is_allowed("gpu-box:8410", bound="gpu-box")


@pytest.mark.parametrize("name", ["http://box.lan", "box.lan:8410", "*box.lan", "a b"])
def test_a_malformed_name_in_a_setting_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="without scheme, port and path"):
        ApiSettings(allowed_hosts=[name])


def test_list_settings_are_given_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESERVE_ALLOWED_HOSTS", "box.lan, *.example.org")
    monkeypatch.setenv("TUNESERVE_TRUSTED_PROXIES", "10.0.0.0/8,::1")
    settings = ApiSettings()
    assert settings.allowed_hosts == ["box.lan", "*.example.org"]
    assert settings.trusted_proxies == ["10.0.0.0/8", "::1"]
    with pytest.raises(ValueError, match="proxy"):
        ApiSettings(trusted_proxies=["proxy"])


# --- the application -----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def application(folder: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    settings = ApiSettings(data_dir=folder, base_model_name="tuneserve/fake", **options)
    store = await open_store(settings)
    app = create_app(settings, store)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        yield http
    await store.close()


ROUTES = ["/api/v1/healthz", "/api/v1/live", "/metrics", "/v1/models", "/page/", "/page/x", "/"]


@pytest.mark.anyio
async def test_without_keys_every_route_refuses_other_host_names(tmp_path: Path) -> None:
    async with application(tmp_path) as http:
        for route in ROUTES:
            answer = await http.get(route, headers={"Host": EVIL, "X-API-Key": "tml-local"})
            assert answer.status_code == 403, route
            error = answer.json().get("error", answer.json())
            assert error["code"] == "host_not_allowed"
            assert "allowed_hosts" in str(error) and "evil.example" in str(error)
        assert (await http.get("/api/v1/healthz", headers={"Host": "10.0.0.1"})).status_code == 200


@pytest.mark.anyio
async def test_with_keys_the_routes_without_a_key_still_check_the_host_name(tmp_path: Path) -> None:
    """Another site's page has neither a key nor a signed link."""
    async with application(tmp_path, require_keys=True) as http:
        statuses = {
            route: (await http.get(route, headers={"Host": EVIL})).status_code for route in ROUTES
        }
        app = http._transport.app  # type: ignore[attr-defined]
        for path, methods in app.openapi()["paths"].items():
            for method in methods:
                answer = await http.request(method, path, headers={"Host": EVIL})
                assert answer.status_code in (401, 403), (method, path)
    assert statuses == {
        **{"/page/": 403, "/page/x": 403, "/": 403, "/api/v1/healthz": 403, "/metrics": 403},
        **{"/api/v1/live": 401, "/v1/models": 401},
    }


@pytest.mark.anyio
async def test_a_host_name_of_the_settings_is_answered(tmp_path: Path) -> None:
    async with application(tmp_path, allowed_hosts=["box.lan"]) as http:
        assert (await http.get("/page/", headers={"Host": "box.lan:8410"})).status_code == 200
        assert (await http.get("/page/", headers={"Host": EVIL})).status_code == 403


# --- over a real socket --------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    port: int

    async def said(self, head: str) -> str:
        """The server's whole answer to these lines."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return answer.decode()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("keyed")
    with running_service(folder, worker=False, require_keys="true") as service:
        yield Server(service.port)


@pytest.mark.parametrize("hosts", ["", "\nHost: localhost\nHost: evil.example"])
def test_a_request_has_exactly_one_host(keyed: Server, hosts: str) -> None:
    request = f"GET /api/v1/healthz HTTP/1.1\nConnection: close{hosts}"
    answer = asyncio.run(keyed.said(request))
    assert answer.startswith("HTTP/1.1 400 "), answer
    assert "exactly one" in answer


def attempts(server: Server, *, forwarded: bool, times: int = 40) -> list[int]:
    """Statuses of logins with a wrong key, each from its own address if the header is trusted."""

    async def run() -> list[int]:
        statuses = []
        for n in range(times):
            lines = f"GET /api/v1/live HTTP/1.1\nHost: localhost\nX-API-Key: tml-a-{n}"
            lines += f"\nX-Forwarded-For: 192.0.2.{n}" if forwarded else ""
            answer = await server.said(f"{lines}\nConnection: close")
            statuses.append(int(answer.split()[1]))
        return statuses

    return asyncio.run(run())


def test_a_client_cannot_pretend_to_have_another_address(keyed: Server) -> None:
    assert 429 in attempts(keyed, forwarded=False)
    assert 429 in attempts(keyed, forwarded=True)


def test_a_proxy_that_the_operator_names_is_trusted(tmp_path: Path) -> None:
    settings = {"require_keys": "true", "trusted_proxies": "127.0.0.0/8"}
    with running_service(tmp_path, worker=False, **settings) as service:
        assert attempts(Server(service.port), forwarded=True) == [401] * 40


def test_the_environment_of_the_server_library_does_not_add_proxies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    with running_service(tmp_path, worker=False, require_keys="true") as service:
        assert 429 in attempts(Server(service.port), forwarded=True)
