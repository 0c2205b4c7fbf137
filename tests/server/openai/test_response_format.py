"""The forms of an answer that clients ask for, and those that are refused."""

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.server.openai.test_requests import PLAIN, chat, commands, completion
from tuneserve_engine.core.grammar import Grammar
from tuneserve_server.errors import InvalidField
from tuneserve_server.openai.response_format import grammar

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}


def asked(**json_schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, **json_schema}}


@pytest.mark.parametrize("ask", [chat, completion])
@pytest.mark.parametrize("given", [None, {}, {"type": "text"}])
def test_any_text_needs_no_grammar(ask: Any, given: Any) -> None:
    assert grammar(ask(response_format=given)) is None
    assert grammar(ask(structured_outputs=None)) is None


@pytest.mark.parametrize("ask", [chat, completion])
@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_is_the_grammar_strict_or_not(ask: Any, strict: bool | None) -> None:
    found = grammar(ask(response_format=asked(strict=strict, description="x")))
    assert found is not None
    assert (found.kind, json.loads(found.text)) == ("json_schema", SCHEMA)


def test_the_grammar_reaches_the_command() -> None:
    (command,) = commands(chat(response_format=asked()))
    assert command.grammar == grammar(chat(response_format=asked()))
    assert commands(chat()) == [PLAIN]


def test_a_json_object_may_have_any_members() -> None:
    assert grammar(chat(response_format={"type": "json_object"})) == Grammar(
        "json_schema", '{"type":"object"}'
    )


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_the_schema_of_a_pydantic_model_arrives_as_the_client_sends_it() -> None:
    sent = openai.lib._parsing.type_to_response_format_param(Person)
    found = grammar(chat(response_format=sent))
    assert found is not None
    assert json.loads(found.text)["properties"].keys() == {"name", "age"}


@pytest.mark.parametrize(
    ("outputs", "kind", "text"),
    [
        ({"json": SCHEMA}, "json_schema", json.dumps(SCHEMA, ensure_ascii=False)),
        ({"json": '{"type":"null"}'}, "json_schema", '{"type":"null"}'),
        ({"json_object": True, "regex": None}, "json_schema", '{"type":"object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["a", "b"]}, "choice", '["a","b"]'),
    ],
)
def test_structured_outputs_are_those_of_vllm(
    outputs: dict[str, Any], kind: str, text: str
) -> None:
    found = grammar(completion(structured_outputs=outputs))
    assert found is not None and found.kind == kind
    assert found.text.replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        (
            {"response_format": {"type": "xml"}},
            "response_format",
            "text, json_object or json_schema",
        ),
        ({"response_format": {"json_schema": {}}}, "response_format", "another type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "has no schema"),
        ({"response_format": asked(schema=None)}, "response_format", "has no schema"),
        ({"response_format": asked(schema="{}")}, "response_format", "has no schema"),
        ({"response_format": asked(lax=True)}, "response_format", "1 fields .* does not know"),
        (
            {"response_format": {"type": "json_object", "a": 1}},
            "response_format",
            "leave the others",
        ),
        ({"response_format": asked(schema={"const": "a" * 65_536})}, "response_format", "is 65536"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "no value of its kind"),
        ({"structured_outputs": {"json": 0}}, "structured_outputs", "no value of its kind"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "are empty"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "no list of texts"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "leave one out",
        ),
    ],
)
def test_other_forms_are_refused_by_name(fields: dict[str, Any], param: str, told: str) -> None:
    with pytest.raises(InvalidField, match=told) as refused:
        commands(chat(**fields))
    assert refused.value.param == param
    assert "aaaa" not in str(refused.value)


@pytest.mark.parametrize("given", [5, "json", [{"type": "text"}]])
def test_a_form_is_an_object(given: Any) -> None:
    with pytest.raises(InvalidField, match=r"^response_format"):
        chat(response_format=given)
