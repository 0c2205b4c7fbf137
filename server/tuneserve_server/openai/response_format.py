"""The form of an answer: OpenAI's ``response_format`` and vLLM's ``structured_outputs``."""

import json
from typing import Any

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.grammar import Grammar, GrammarKind, check_grammar
from tuneserve_server.errors import InvalidField
from tuneserve_server.openai.types import GenerationRequest

_ANY_OBJECT = {"type": "object"}
_TYPES = "text, json_object or json_schema"
_SCHEMA_KEYS = {"name", "description", "schema", "strict"}
_FORMS = ("json", "json_object", "regex", "choice")


def grammar(request: GenerationRequest) -> Grammar | None:
    """Return what the answer's text must be; None for any text. Raises ``InvalidField``."""
    by_format = _of_response_format(request.response_format or {})
    by_outputs = _of_structured_outputs(request.structured_outputs or {})
    if by_format and by_outputs:
        raise InvalidField(
            "response_format and structured_outputs both give the answer's form; leave one out",
            "structured_outputs",
        )
    return by_format or by_outputs


def _of_response_format(asked: dict[str, Any]) -> Grammar | None:
    field = "response_format"
    if not asked or asked == {"type": "text"}:
        return None
    kind = asked.get("type")
    if kind == "json_object":
        _refuse_others(field, asked, {"type"})
        return _checked(field, "json_schema", _json(_ANY_OBJECT))
    if kind == "json_schema":
        _refuse_others(field, asked, {"type", "json_schema"})
        given = asked.get("json_schema")
        if not isinstance(given, dict) or not isinstance(given.get("schema"), dict):
            raise InvalidField(
                'response_format has no schema; send {"type": "json_schema", "json_schema": '
                '{"name": "…", "schema": {…}}}',
                field,
            )
        _refuse_others(f"{field}.json_schema", given, _SCHEMA_KEYS)
        return _checked(field, "json_schema", _json(given["schema"]))
    raise InvalidField(f"response_format has another type than {_TYPES}; send one of these", field)


def _of_structured_outputs(asked: dict[str, Any]) -> Grammar | None:
    field = "structured_outputs"
    given = {name: each for name, each in asked.items() if each is not None and each is not False}
    if not given:
        return None
    if len(given) > 1 or not given.keys() <= set(_FORMS):
        raise InvalidField(
            f"structured_outputs takes exactly one of {', '.join(_FORMS)}; send one of these", field
        )
    ((name, value),) = given.items()
    if name == "json_object" and value is True:
        return _checked(field, "json_schema", _json(_ANY_OBJECT))
    if name == "json" and isinstance(value, dict | str):
        return _checked(field, "json_schema", value if isinstance(value, str) else _json(value))
    if name == "regex" and isinstance(value, str):
        return _checked(field, "regex", value)
    if name == "choice" and isinstance(value, list):
        found = _checked(field, "choice", _json(value))
        try:
            _ = found.choices
        except UserError as error:
            raise InvalidField(f"{field}: {error}", field) from None
        return found
    raise InvalidField(
        f"structured_outputs.{name} is no value of its kind; send a schema as json, true as "
        "json_object, a text as regex, or a list of texts as choice",
        field,
    )


def _checked(field: str, kind: GrammarKind, text: str) -> Grammar:
    found = Grammar(kind, text)
    try:
        check_grammar(found)
    except UserError as error:
        raise InvalidField(f"{field}: {error}", field) from None
    return found


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _refuse_others(place: str, given: dict[str, Any], known: set[str]) -> None:
    """Refuse fields that might change the answer."""
    if others := given.keys() - known:
        raise InvalidField(
            f"{place} has {len(others)} fields that this server does not know; it takes "
            f"{', '.join(sorted(known))}; leave the others out",
            place.partition(".")[0],
        )
