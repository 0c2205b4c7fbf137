"""The OpenAPI description of the routes: their requests and their answers.

Routes read their bodies themselves, so that limits, keys and problems can be told apart; they
declare with ``takes`` what they read, and with ``fails`` which errors of theirs to expect. Errors
that all routes of a kind share are added here. The description is not served; tests and
``scripts/api_reference.py`` use it.
"""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tuneserve_client.wire import types
from tuneserve_client.wire.body import Request
from tuneserve_server import errors
from tuneserve_server.error_shapes import AnthropicFailure, is_anthropic

_REF = "#/components/schemas/{model}"
BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
PROTOBUF = "application/x-protobuf"
TAR = "application/x-tar"

_ALL = (
    errors.HostNotAllowed,
    errors.HeadersTooSlow,
    errors.HeadersTooLarge,
    errors.ApiError,
    errors.StoreUnavailable,
    errors.StoreCorrupt,
)
_WITH_BODY = (errors.Malformed, errors.BodyTooLarge, errors.BodyTooSlow, errors.TooManyRequests)

Declared = dict[int | str, dict[str, Any]]


def takes(*bodies: type[Request]) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route that reads one of these JSON bodies, or any JSON."""
    refs: list[dict[str, Any]] = [{"$ref": _REF.format(model=each.__name__)} for each in bodies]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs} if refs else {}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def takes_message(name: str) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route that reads a protobuf message, maybe compressed."""
    encoding = {
        "name": "Content-Encoding",
        "in": "header",
        "required": False,
        "schema": {"type": "string", "enum": ["identity", "zstd"]},
    }
    content = {PROTOBUF: {"schema": {**BINARY["schema"], "description": f"{name} of wire.proto"}}}
    return {"requestBody": {"required": True, "content": content}, "parameters": [encoding]}


def takes_archive() -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route that reads a tar archive."""
    return {"requestBody": {"required": True, "content": {TAR: {"schema": BINARY["schema"]}}}}


def takes_file() -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route that reads a file of any type."""
    content = {"application/octet-stream": {"schema": BINARY["schema"]}}
    return {"requestBody": {"required": True, "content": content}}


def fails(*kinds: type[errors.ApiError], body: type[BaseModel] = types.Failure) -> Declared:
    """Return the ``responses`` of a route that may answer with these errors."""
    declared: Declared = {}
    for kind in kinds:
        entry = declared.setdefault(kind.status, {"model": body, "description": ""})
        entry["description"] = ", ".join(filter(None, [entry["description"], kind.code]))
    return declared


def describe(app: FastAPI, bodies: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """Return the OpenAPI document of the application; ``bodies`` are its request bodies."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document["components"]["schemas"]
    schemas.update(_request_schemas(bodies))
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own answer
        schemas.pop(unused, None)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _add_common_failures(operation, path)
    return document


def requests_of(module: ModuleType) -> list[type[BaseModel]]:
    """Return the request bodies that a module of types defines."""
    return [each for each in vars(module).values() if _is_request(each) and each is not Request]


def _request_schemas(bodies: Iterable[type[BaseModel]]) -> dict[str, Any]:
    _, schema = models_json_schema([(each, "validation") for each in bodies], ref_template=_REF)
    definitions: dict[str, Any] = schema["$defs"]
    return definitions


def _is_request(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Request)


def _add_common_failures(operation: dict[str, Any], path: str) -> None:
    is_openai = path.startswith(errors.OPENAI_PREFIX)
    responses = operation["responses"]
    responses.pop("422", None)
    kinds: list[type[errors.ApiError]] = [*_ALL]
    if "security" in operation:
        kinds += [errors.KeyRefused, errors.ScopeMissing, errors.TooManyLogins]
    if "requestBody" in operation:
        kinds += _WITH_BODY
    elif "parameters" in operation:
        kinds.append(errors.Malformed)
    if is_openai:  # there, a body that cannot be read is a 400
        kinds = [each for each in kinds if each is not errors.Malformed]
    body: type[BaseModel] = errors.OpenAIFailure if is_openai else types.Failure
    if is_anthropic(path):
        body = AnthropicFailure
    for status in {kind.status for kind in kinds}:
        codes = [kind.code for kind in kinds if kind.status == status]
        _add_failure(responses.setdefault(str(status), {}), codes, body.__name__)
    operation["responses"] = dict(sorted(responses.items()))


def _add_failure(response: dict[str, Any], codes: list[str], body: str) -> None:
    """Add these codes, and this body, to ``response``."""
    said = response.get("description", "")
    new = [code for code in codes if code not in said.split(", ")]
    response["description"] = ", ".join(filter(None, [said, *new]))
    failure = {"$ref": _REF.format(model=body)}
    content = response.setdefault("content", {}).setdefault("application/json", {})
    known = content.get("schema", failure)
    content["schema"] = failure if known == failure else {"anyOf": [known, failure]}
