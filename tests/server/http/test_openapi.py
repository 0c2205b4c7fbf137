"""The API's description of itself: every mounted route and no other."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from tuneserve_server.app import AT_ROOT, PREFIX, ROUTERS, create_app
from tuneserve_server.dependencies import SentJsonDep
from tuneserve_server.errors import ApiError
from tuneserve_server.openai import routes as openai
from tuneserve_server.openai.messages_api import routes as messages_api
from tuneserve_server.openai.responses_api import routes as responses_api
from tuneserve_server.settings import ApiSettings


@pytest.fixture
def app(tmp_path: Any) -> Any:
    """An application for its description only: its store is never queried."""
    return create_app(ApiSettings(data_dir=tmp_path), store=None)  # type: ignore[arg-type]


def mounted(app: Any) -> Iterator[tuple[str, str, APIRoute]]:
    """Method, path and route of everything that the application answers."""
    included = [each.original_router for each in app.routes]
    known = [(module.router, PREFIX) for module in ROUTERS]
    known += [(module.router, "") for module in AT_ROOT]
    # The hosted service's prefixes, described once.
    again = [openai.router, responses_api.router, messages_api.router]
    assert included == [router for router, _ in known] + again  # no other route is mounted
    for router, prefix in known:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            for method in route.methods:
                yield method, prefix + route.path_format, route


def operations(document: Any) -> dict[tuple[str, str], Any]:
    return {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_the_description_has_the_mounted_routes_and_no_other(app: Any) -> None:
    described = operations(app.openapi())
    routes = [(method, path) for method, path, _ in mounted(app)]
    assert len(routes) == len(set(routes)) == 77
    assert set(described) == set(routes)


def test_the_description_says_which_routes_read_a_body(app: Any) -> None:
    described = operations(app.openapi())
    for method, path, route in mounted(app):
        parameters = inspect.signature(route.endpoint).parameters.values()
        reads = any(each.annotation == SentJsonDep for each in parameters)
        # These routes read their body themselves: it may be compressed, exceed the memory, or be
        # answered after an hour.
        reads |= route.path in ("/forward_backward", "/checkpoints/import")
        reads |= route.path == "/uploads/{upload_id}/{member}"
        reads |= route.path.startswith("/v1/") and "POST" in route.methods
        # These bodies are not held in memory while the poll is held.
        reads |= route.path in ("/retrieve_future", "/retrieve_futures")
        reads |= route.path in ("/cancel_future", "/session_heartbeat")
        assert ("requestBody" in described[method, path]) == reads, path


def test_every_schema_reference_resolves(app: Any) -> None:
    document = app.openapi()
    for name in re.findall(r"'#/components/schemas/(\w+)'", str(document)):
        assert name in document["components"]["schemas"]


def test_all_but_health_metrics_downloads_and_pages_require_a_key(app: Any) -> None:
    without = {path for (_, path), each in operations(app.openapi()).items() if not wants_key(each)}
    pages = {"/", "/page", "/page/{name}", "/docs", "/docs/{name}"}
    links = {"/api/v1/files/{file_id}/{member}", "/api/v1/uploads/{upload_id}/{member}"}
    assert without == {"/api/v1/healthz", "/metrics"} | links | pages


def wants_key(operation: Any) -> bool:
    return operation.get("security") == [{"APIKeyHeader": []}]


def test_every_error_of_the_api_is_described(app: Any) -> None:
    said = " ".join(
        response["description"]
        for operation in operations(app.openapi()).values()
        for response in operation["responses"].values()
    )
    for kind in (ApiError, *ApiError.__subclasses__()):
        assert kind.code in said


def test_the_description_is_the_same_each_time(app: Any) -> None:
    assert app.openapi() == app.openapi()


@pytest.mark.anyio
async def test_the_description_is_served_nowhere(api: Any) -> None:
    for path in ("/openapi.json", "/redoc", "/api/v1/openapi.json"):
        assert (await api.http.get(path)).status_code == 404
