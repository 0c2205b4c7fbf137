"""The form of a sample's text, and its limits."""

import json

import pytest

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.grammar import MAX_GRAMMAR_BYTES, Grammar, check_grammar


def test_a_form_has_at_most_64_kib() -> None:
    check_grammar(Grammar("regex", "a" * 65_536))
    check_grammar(Grammar("regex", "é" * 32_768))
    with pytest.raises(UserError, match="has 65537 bytes; the limit is 65536; send a smaller"):
        check_grammar(Grammar("regex", "a" * (MAX_GRAMMAR_BYTES + 1)))
    with pytest.raises(UserError, match="65538"):
        check_grammar(Grammar("regex", "é" * 32_769))


@pytest.mark.parametrize("text", ["", "{}", '"a"', '["a", 1]', "[" * 100_000])
def test_choices_are_a_list_of_texts(text: str) -> None:
    with pytest.raises(UserError, match="no list of texts"):
        _ = Grammar("choice", text).choices


@pytest.mark.parametrize("text", ["[]", '["a", ""]'])
def test_no_choice_is_empty(text: str) -> None:
    with pytest.raises(UserError, match="send at least one, and no empty one"):
        _ = Grammar("choice", text).choices


def test_choices_are_read_as_they_are() -> None:
    texts = ['a "b"', "\n", "é\\"]
    assert Grammar("choice", json.dumps(texts)).choices == texts


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def divided(*by: float) -> Grammar:
    return schema({"items": [{"type": "number", "multipleOf": each} for each in by]})


@pytest.mark.parametrize("by", [(5,), (0.01, 1000), (9973,), (0.25, 100, 1e-7), (10, 10, 9000), ()])
def test_divisors_with_few_remainders_are_taken(by: tuple[float, ...]) -> None:
    check_grammar(divided(*by))


@pytest.mark.parametrize(
    "by", [(10_001,), (1.0001,), (6000, 4001), (1e300,), (1e-300,), (10**400,)]
)
def test_divisors_with_many_remainders_are_refused(by: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="more than 10000 remainders together"):
        check_grammar(divided(*by))
    with pytest.raises(UserError, match="remainders"):
        check_grammar(Grammar("json_schema", '{"multipleOf": 1e999999999}'))


def test_divisors_that_hold_together_multiply() -> None:
    parts = [{"type": "integer", "multipleOf": each} for each in (97, 89, 101)]
    check_grammar(schema({"items": parts}))
    with pytest.raises(UserError, match="remainders"):
        check_grammar(schema({"allOf": parts}))


def test_few_parts_of_a_schema_hold_together() -> None:
    part = {"pattern": "a"}
    check_grammar(schema({"allOf": [part] * 12}))
    chain: object = part
    for _ in range(13):
        chain = {"anyOf": [chain, {"type": "null"}], **part}
    for each in (
        {"allOf": [part] * 13},
        chain,
        {"$defs": {"a": {"$ref": "#/x", **part}}, "x": chain},
    ):
        with pytest.raises(
            UserError, match=r"has 1[34] parts .* the limit is 12; put them into one"
        ):
            check_grammar(schema(each))
    check_grammar(schema({"properties": {f"p{n}": part for n in range(40)}}))


@pytest.mark.parametrize("text", ["{", '{"items":' * 50_000, "1" * 5000])
def test_a_schema_is_json(text: str) -> None:
    with pytest.raises(UserError, match=r"cannot be read as JSON|bytes; the limit"):
        check_grammar(Grammar("json_schema", text))
