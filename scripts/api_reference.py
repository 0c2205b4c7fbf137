"""Write docs/reference.md from the API's OpenAPI description: `make reference`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from tuneserve_engine.store.open import OpenStore
from tuneserve_server.access.scopes import SCOPES
from tuneserve_server.app import PREFIX, create_app
from tuneserve_server.settings import ApiSettings

PAGE = Path(__file__).parents[1] / "docs/reference.md"
INTRO = """# API reference

<!-- Written by scripts/api_reference.py: change the code and run `make reference`. -->

This page lists every route with its parameters, bodies and answers. It is generated from the
OpenAPI description of the routes. [api.md](api.md) explains how the routes work together: order and
repetition, futures, sessions, errors.

- **Key.** Send your key in the header `X-API-Key`. Under `/v1`, `Authorization: Bearer` works, too.
- **Unlisted fields** are ignored. Under `/v1`, such a field is refused if it could change the
  answer.
- **Defaults.** *Required* fields have no default. An empty default is null.
- **Answers** leave out fields that are null.
- **Errors of every route** are 403 `host_not_allowed`, 408 `headers_too_slow`, 431
  `headers_too_large`, 500 `internal` and 503 `store_damaged`. If a request has a `request_id`, its
  own errors are its result.

| Section | Routes |
|---|---|
"""
SECTIONS = {
    "Service": ("client", "telemetry", "get_server_capabilities", "healthz", "metrics"),
    "Sessions": ("create_session", "session_heartbeat", "sessions"),
    "Training": (
        "create_model",
        "get_info",
        "forward_backward",
        "create_custom_loss",
        "optim_step",
    ),
    "Weights": (
        "save_weights",
        "save_weights_for_sampler",
        "save_weights_external",
        "load_weights",
        "weights_info",
        "copy_weights",
        "checkpoints",
        "files",
        "external_weights_upload_start",
        "external_weights_upload_finish",
        "uploads",
    ),
    "Sampling": (
        "create_sampling_session",
        "join_sampling_session",
        "samplers",
        "asample",
        "tokenizer",
    ),
    "Results": ("retrieve_future", "retrieve_futures", "cancel_future", "requests"),
    "Runs and usage": ("training_runs", "usage", "billing", "live"),
    "Keys": ("auth", "audit"),
    "OpenAI-compatible": ("v1",),
    "Dashboard": ("", "page"),
    "Documentation": ("docs",),
}
SAID = {
    "base_model": "tuneserve/tiny",
    "checkpoint_id": "weights/first",
    "completions": [{"request_id": "8f1c0e5d", "state": "finished"}],
    "content": "What colour is the sky?",
    "file_id": "5e0f4c",
    "kind": "forward_backward",
    "LoadIntoRequest.path": "tinker://8c2f1a:train:0/weights/first",
    "ModelEntry.id": "tuneserve/tiny",
    "ResponsesRequest.input": "What colour is the sky?",
    "RunEvent.kind": "note",
    "RunEventRequest.kind": "note",
    "ServedBaseModel.name": "tuneserve/tiny",
    "path.kind": "weights",
    "member": "adapter_config.json",
    "model": "tuneserve/tiny",
    "model_id": "8c2f1a:train:0",
    "model_name": "tuneserve/tiny",
    "model_owner": "alice",
    "sampler_ids": ["8c2f1a:sample:0"],
    "sessions": ["8c2f1a"],
    "sample_sequence_ids": ["8f1c0e5d:0"],
    "tenant": "alice",
    "training_run_id": "8c2f1a:train:0",
    "training_run_ids": ["8c2f1a:train:0"],
    "ttl_seconds": 86400,
    "model_path": "tinker://8c2f1a:train:0/weights/first",
    "name": "first",
    "workers": 1,
    "path": "first",
    "prompt": "The sky is",
    "request_id": "8f1c0e5d",
    "sampler_id": "8c2f1a:sample:0",
    "sampling_session_id": "8c2f1a:sample:0",
    "session_id": "8c2f1a",
    "source_path": "tinker://8c2f1a:train:0/weights/first",
    "tinker_path": "tinker://8c2f1a:train:0/weights/first",
    "CopyWeightsResponse.tinker_path": "tinker://copy-5e0f4c/weights/first",
    "UploadFinishResponse.tinker_path": "tinker://upload-5e0f4c/external_weights/uploaded",
    "upload_id": "upload-5e0f4c",
    "role": "user",
    "tokens": [5, 6, 7],
}
"""The values of fields in examples. A dotted name is for one type only."""
ALSO_SHOWN = {
    "adam_params",
    "content",
    "learning_rate",
    "lora_config",
    "max_tokens",
    "path",
    "rank",
    "sampling_params",
    "tokens",
    "type",
}
"""Optional fields that examples have, too."""
ALWAYS = {"host_not_allowed", "headers_too_slow", "headers_too_large", "internal", "store_damaged"}
"""The errors that every route can return."""
TYPES = {"string": str, "integer": int, "array": list}
LARGE = {2**31 - 1: "2^31 - 1", 2**63 - 1: "2^63 - 1"}

Schema = Mapping[str, Any]


def page() -> str:
    """Return the whole page."""
    document = description()
    routes = list(operations(document))
    sections = {
        title: [each for each in routes if section_of(each[1]) == title] for title in SECTIONS
    }
    assert sum(map(len, sections.values())) == len(routes)
    parts = [INTRO + "".join(contents(title, of) for title, of in sections.items())]
    for title, of in sections.items():
        parts.append(f"## {title}\n")
        parts += [route(document, *each) for each in of]
    parts.append("## Types\n")
    schemas = document["components"]["schemas"]
    parts += [type_section(name, schemas[name]) for name in sorted(linked(schemas, parts))]
    return "\n".join(parts)


def description() -> dict[str, Any]:
    """Return the OpenAPI description of an application that never runs."""
    with tempfile.TemporaryDirectory() as folder:
        return create_app(ApiSettings(data_dir=Path(folder)), cast(OpenStore, None)).openapi()


def operations(document: Schema) -> Iterator[tuple[str, str, Schema]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def section_of(path: str) -> str:
    first, *rest = path.removeprefix(PREFIX).strip("/").split("/")
    first = "checkpoints" if "checkpoints" in rest else first
    return next(title for title, firsts in SECTIONS.items() if first in firsts)


def contents(title: str, routes: list[tuple[str, str, Schema]]) -> str:
    names = [
        f"[`{path.removeprefix(PREFIX)}`](#{anchor(method, path)})" for method, path, _ in routes
    ]
    return f"| {title} | {', '.join(names)} |\n"


def anchor(method: str, path: str) -> str:
    """Return the anchor that GitHub makes from the heading."""
    kept = [each for each in f"{method} {path}".lower() if each.isalnum() or each in " _-"]
    return "".join(kept).replace(" ", "-")


def linked(schemas: Schema, parts: list[str]) -> set[str]:
    """Return the types that the page names, and the types that these name in turn."""
    text = "\n".join(parts)
    found = {name for name in schemas if f"(#{name.lower()})" in text}
    while more := {
        name
        for name in schemas.keys() - found
        if any(f'/{name}"' in json.dumps(schemas[each]) for each in found)
    }:
        found |= more
    return found


# --- a route --------------------------------------------------------------------------------------


def route(document: Schema, method: str, path: str, operation: Schema) -> str:
    schemas = document["components"]["schemas"]
    lines = [f"### `{method} {path}`", "", plain(operation.get("description", "")), ""]
    lines += [f"Key: {key(method, path)}.", ""]
    if parameters := operation.get("parameters"):
        rows = [(each["name"], each["schema"], each["required"], each["in"]) for each in parameters]
        lines += [*fields(rows, "parameter"), ""]
    for name, schema in bodies(operation):
        if schema is None:
            lines += [f"Body: {name}.", ""]
            continue
        lines += [f"Body: `{name}`.", "", *fields(properties(schemas[name])), ""]
    lines += [*answers(operation), "", *example(document, method, path, operation)]
    return "\n".join(lines) + "\n"


def key(method: str, path: str) -> str:
    scopes = SCOPES.get(f"{method} {path.removeprefix(PREFIX)}")
    if scopes is None:
        return "not needed"
    return " or ".join(f"`{scope}`" for scope in sorted(scopes))


def bodies(operation: Schema) -> Iterator[tuple[str, Schema | None]]:
    """Yield the type that a route reads, with its schema; without a type, a text and None."""
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = content["schema"]
        for each in schema.get("anyOf", [schema]):
            if "$ref" in each:
                yield name_of(each), each
            else:
                yield each.get("description", "any JSON object") + f" (`{media}`)", None


def answers(operation: Schema) -> Iterator[str]:
    good, bad = [], []
    for status, response in operation["responses"].items():
        if int(status) >= 400:
            codes = [each for each in response["description"].split(", ") if each not in ALWAYS]
            bad += [f"{status} {' or '.join(map(code, codes))}"] if codes else []
        else:
            good.append(f"{status} {answer(response)}")
    yield f"Answer: {'; '.join(good)}."
    yield ""
    yield f"Errors: {'; '.join(bad)}."


def code(said: str) -> str:
    return said if " " in said else f"`{said}`"


def answer(response: Schema) -> str:
    shown = [
        kind(content["schema"]) if "$ref" in content.get("schema", ()) else f"`{media}`"
        for media, content in response.get("content", {}).items()
    ]
    return " or ".join(shown) or plain(response["description"])


def example(document: Schema, method: str, path: str, operation: Schema) -> Iterator[str]:
    """Yield a request as it is sent, and its answer if the answer is JSON."""
    yield "```http"
    needed = [each for each in operation.get("parameters", ()) if each["required"]]
    for each in needed:
        path = path.replace(
            f"{{{each['name']}}}", str(value(document, f"path.{each['name']}", each["schema"]))
        )
    query = [
        f"{each['name']}={value(document, each['name'], each['schema'])}"
        for each in needed
        if each["in"] == "query"
    ]
    yield f"{method} {path}{'?' if query else ''}{'&'.join(query)}"
    if "security" in operation:
        yield "X-API-Key: tml-…"
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"Content-Type: {media}"
        yield ""
        schema = content["schema"]
        schema = schema.get("anyOf", [schema])[0]
        yield shown_json(value(document, "", schema)) if media == "application/json" else "…"
    yield "```"
    success = operation["responses"].get("200", {}).get("content", {}).get("application/json", {})
    if "$ref" in success.get("schema", {}):
        yield ""
        yield "```json"
        yield shown_json(value(document, "", success["schema"]))
        yield "```"


def shown_json(example: Any) -> str:
    return json.dumps(example, ensure_ascii=False)


def value(document: Schema, name: str, schema: Schema) -> Any:
    """Return an example of the schema: required fields, fields of every answer, and a few more."""
    if "anyOf" in schema:
        schema = schema["anyOf"][0]
    if "$ref" in schema:
        of_type = name_of(schema)
        schema = document["components"]["schemas"][of_type]
        name = f"{of_type}."
    if schema.get("type") == "object" and "properties" in schema:
        shown = set(schema.get("required", ())) | ALSO_SHOWN
        is_answer = name.endswith(("Response.", "Future.", "List.", "Entry."))
        return {
            each: value(document, f"{name}{each}", of)
            for each, of in schema["properties"].items()
            if each in shown or (is_answer and of.get("default") is not None)
        }
    return simple(document, name, schema)


def simple(document: Schema, name: str, schema: Schema) -> Any:
    for fixed in ("const", "default"):
        if schema.get(fixed) is not None:
            return schema[fixed]
    said = SAID.get(name, SAID.get(name.rpartition(".")[2]))
    if said is not None and isinstance(said, TYPES.get(schema.get("type", ""), ())):
        return said
    if "enum" in schema:
        return schema["enum"][0]
    of_type = schema.get("type")
    if of_type == "array":
        return [value(document, "", schema["items"])]
    if of_type == "string" and schema.get("format") == "date-time":
        return "2026-01-31T12:00:00Z"
    starts = {"integer": schema.get("minimum", 16), "number": 0.5, "boolean": False}
    return {} if of_type in (None, "object") else starts.get(str(of_type), "…")


# --- types ----------------------------------------------------------------------------------------


def type_section(name: str, schema: Schema) -> str:
    lines = [f"### {name}", ""]
    if schema.get("description"):
        lines += [plain(schema["description"]), ""]
    if schema.get("properties"):
        lines += [*fields(properties(schema)), ""]
    else:
        lines += [kind(schema), ""]
    return "\n".join(lines)


def properties(schema: Schema) -> list[tuple[str, Schema, bool, str]]:
    required = schema.get("required", ())
    return [(name, of, name in required, "") for name, of in schema.get("properties", {}).items()]


def fields(rows: list[tuple[str, Schema, bool, str]], title: str = "field") -> Iterator[str]:
    yield f"| {title} | type | default | |"
    yield "|---|---|---|---|"
    for name, schema, required, place in rows:
        said = plain(schema.get("description", ""))
        place = f"in the {place}" if place in ("header", "path") else ""
        default = "*required*" if required else shown(schema.get("default"))
        yield f"| `{name}` | {kind(schema)} | {default} | {' '.join(filter(None, [said, place]))} |"


def shown(default: Any) -> str:
    return "" if default is None else f"`{json.dumps(default)}`"


def kind(schema: Schema) -> str:
    """Return the type in words, with its limits."""
    if "$ref" in schema:
        return f"[{name_of(schema)}](#{name_of(schema).lower()})"
    if "anyOf" in schema or "oneOf" in schema:
        known = [
            each for each in schema.get("anyOf") or schema["oneOf"] if each != {"type": "null"}
        ]
        return " or ".join(kind(each) for each in known)
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    of_type = schema.get("type", "anything")
    if of_type == "array":
        return f"list of {kind(schema.get('items', {}))}{limits(schema, 'Items')}"
    if of_type == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {kind(schema['additionalProperties'])}{limits(schema, 'Length')}"
    named = {"date-time": "time (ISO 8601)", "binary": "bytes"}.get(
        schema.get("format", ""), of_type
    )
    return f"{named}{limits(schema, 'Length')}"


def limits(schema: Schema, of: str) -> str:
    """Return the limits of size and range in words."""
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema.get("maximum")
    if least is None and most is None:
        least, most = schema.get(f"min{of}"), schema.get(f"max{of}")
        unit = (
            " of them" if of == "Items" else " characters" if schema.get("type") == "string" else ""
        )
    else:
        unit = ""
    if least is not None and most is not None:
        return f", {number(least)} to {number(most)}{unit}"
    if most is not None:
        return f", at most {number(most)}{unit}"
    return "" if least is None else f", at least {number(least)}{unit}"


def number(of: float) -> str:
    return LARGE.get(int(of), f"{of:,}") if of == int(of) else f"{of}"


def name_of(schema: Schema) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def plain(text: str) -> str:
    """Return the text as one paragraph for a Markdown table."""
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
