"""Every method and path that the installed SDK can call is a route of the API."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.server.conftest import Api

pytestmark = pytest.mark.anyio

SDK = Path(tinker.__file__).parent
METHODS = {"get": "GET", "post": "POST", "put": "PUT", "patch": "PATCH", "delete": "DELETE"}


def path_of(node: ast.expr) -> str | None:
    """The path that a call names, with ``x`` for each part that depends on its arguments."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        parts = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                parts.append(str(part.value))
            else:  # the id of a checkpoint has two segments: weights/000010
                assert isinstance(part, ast.FormattedValue)
                parts.append("x/x" if ast.unparse(part.value) == "checkpoint_id" else "x")
        text = "".join(parts)
    else:
        return None
    return text if text.startswith("/api/v1/") else None


def calls_of(tree: ast.AST) -> Iterator[str]:
    """The calls of an HTTP method with a path of the API, as ``GET /api/v1/sessions``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            name = node.func.attr.removeprefix("_")
            if name in METHODS and (path := path_of(node.args[0])):
                yield f"{METHODS[name]} {path}"
            elif name == "request" and len(node.args) > 1 and (path := path_of(node.args[1])):
                assert isinstance(node.args[0], ast.Constant)
                yield f"{node.args[0].value} {path}"


def calls_of_the_sdk() -> set[str]:
    files = [each for each in SDK.rglob("*.py") if not each.stem.endswith("_test")]
    return {call for each in files for call in calls_of(ast.parse(each.read_text()))}


def test_the_sdk_has_as_many_calls_as_its_wire_says() -> None:
    """Otherwise this file would look for fewer calls than there are."""
    assert len(calls_of_the_sdk()) == 46


async def test_the_api_answers_each_call_of_the_sdk(api: Api) -> None:
    absent = set()
    for call in calls_of_the_sdk():
        method, path = call.split()
        answer = await api.http.request(method, path)
        if answer.status_code in (404, 405):
            absent.add(call)
        else:  # a route wants a key before anything else
            assert answer.status_code == 401 or call == "GET /api/v1/healthz", answer.text
    assert absent == set()
