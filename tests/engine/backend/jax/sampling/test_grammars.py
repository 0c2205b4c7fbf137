"""Grammars against Python's own readers: the tokens that may come next, and what is refused."""

import json
import random
import re
import threading
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.support.small_tokenizer import CHARACTERS, small_tokenizer
from tuneserve_engine.backend.jax.sampling import grammars
from tuneserve_engine.backend.jax.sampling.grammars import (
    CompiledGrammar,
    GrammarCompiler,
    fill_masks,
)
from tuneserve_engine.core.errors import ServerError, UserError
from tuneserve_engine.core.grammar import Grammar
from tuneserve_engine.core.shapes import mask_words

VOCAB = 70
END = VOCAB - 1
TOKENIZER = small_tokenizer(VOCAB)


def compiler(vocab: int = VOCAB, eos: tuple[int, ...] = (END,)) -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.to_str, vocab, eos)


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def mask(matcher: Any, vocab: int = VOCAB) -> list[int]:
    """The tokens that may come next."""
    words = np.full((3, mask_words(vocab)), -1, np.int32)
    fill_masks({1: matcher}, words)
    assert (words[[0, 2]] == -1).all()
    bits = np.unpackbits(words[1].view(np.uint8), bitorder="little")
    return [int(each) for each in np.flatnonzero(bits)]


def walk(grammar: CompiledGrammar, seed: int, most: int = 3000) -> str:
    """Take any allowed token, until the end."""
    matcher, drawn, choose = grammar.begin(), [], random.Random(seed)
    for _ in range(most):
        token = choose.choice(mask(matcher))
        assert matcher.accept_token(token)
        if token == END:
            return "".join(CHARACTERS[each] for each in drawn)
        drawn.append(token)
    raise AssertionError("the text has no end")


def tokens(text: str) -> list[int]:
    return [CHARACTERS.index(each) for each in text]


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_drawn_from_the_masks_is_valid(seed: int) -> None:
    jsonschema.validate(json.loads(walk(compiler().compiled(schema(PERSON)), seed)), PERSON)


@pytest.mark.parametrize("seed", range(4))
def test_a_text_matches_the_whole_regular_expression(seed: int) -> None:
    form = r"[0-9]{2,4}-(ab|c)+x?"
    assert re.fullmatch(form, walk(compiler().compiled(Grammar("regex", form)), seed))


def test_a_text_is_one_of_the_choices() -> None:
    texts = ["yes", 'no, "never"', "{a}", "no"]
    grammar = compiler().compiled(Grammar("choice", json.dumps(texts)))
    assert {walk(grammar, seed) for seed in range(60)} == set(texts)


def test_the_end_is_allowed_exactly_when_the_text_is_whole() -> None:
    matcher = compiler().compiled(Grammar("regex", "ab?c?")).begin()
    assert mask(matcher) == tokens("a")
    assert not matcher.accept_token(END) and not matcher.accept_token(tokens("b")[0])
    assert matcher.accept_token(tokens("a")[0])
    assert mask(matcher) == sorted([*tokens("bc"), END])
    assert matcher.accept_token(tokens("c")[0])
    assert mask(matcher) == [END]
    assert not matcher.accept_token(tokens("c")[0])
    assert matcher.accept_token(END)


def test_no_special_token_is_part_of_a_text() -> None:
    """Not even of one in which every character may be."""
    matcher = compiler().compiled(schema({"type": "string"})).begin()
    assert matcher.accept_token(tokens('"')[0])
    assert END not in mask(matcher)
    assert set(mask(matcher)) >= set(tokens("abc<{ ".replace("<", "")))


def test_ids_after_those_of_the_tokenizer_are_never_allowed() -> None:
    matcher = compiler(vocab=200).compiled(Grammar("regex", "[a-b]")).begin()
    assert mask(matcher, vocab=200) == tokens("ab")


def test_sequences_of_one_grammar_do_not_disturb_each_other() -> None:
    grammar = compiler().compiled(Grammar("regex", "ab"))
    first, second = grammar.begin(), grammar.begin()
    assert first.accept_token(tokens("a")[0])
    assert (mask(first), mask(second)) == (tokens("b"), tokens("a"))


def test_space_between_parts_is_bounded() -> None:
    """A model that likes spaces would not end."""
    matcher = compiler().compiled(schema({"type": "array"})).begin()
    assert matcher.accept_token(tokens("[")[0])
    (space,) = tokens(" ")
    taken = 0
    while taken < 100 and matcher.accept_token(space):
        taken += 1
    assert taken == 32


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema({"type": "text"}), "JSON schema cannot be used: Invalid type"),
        (schema({"type": "array", "uniqueItems": True}), r'Unimplemented keys: \["uniqueItems"\]'),
        (schema({"$ref": "http://x.y/z"}), "does not fetch"),
        (schema({"$ref": "#/$defs/none"}), "does not exist"),
        (schema({"type": "string", "pattern": "(("}), "unclosed group"),
        (schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "Unsatisfiable"),
        (schema(False), "Expecting object schema"),
        (Grammar("json_schema", "no json"), "cannot be read as JSON"),
        (Grammar("json_schema", "[]"), "JSON schema cannot be used"),
        (Grammar("regex", "(?=a)b"), "regular expression cannot be used: look-around"),
        (Grammar("regex", "a["), "unclosed character class"),
        (Grammar("choice", "[]"), "the choices are empty"),
        (Grammar("regex", "a" * 70_000), "70000 bytes; the limit is 65536"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(grammar: Grammar, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        compiler().compiled(grammar)
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


def doubled(depth: int) -> Any:
    inner: Any = {"type": "object", "properties": {"a": {"type": "string"}}}
    for _ in range(depth):
        other = {"type": "object", "properties": {f"b{_}": {}}}
        inner = {"allOf": [{"anyOf": [inner, other]}, {"anyOf": [inner, {"type": "object"}]}]}
    return inner


BOMBS = {
    "deep": Grammar("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "doubling": schema(doubled(3)),
    "products": schema(
        {
            "allOf": [
                {
                    "anyOf": [
                        {"properties": {f"a{n}": {"type": "null"}}},
                        {"properties": {f"b{n}": {"type": "null"}}},
                    ]
                }
                for n in range(12)
            ]
        }
    ),
    "multiples": schema({"type": "integer", "multipleOf": 1234567, "minimum": -(10**15)}),
    "intersections": schema(
        {"allOf": [{"type": "string", "pattern": f"a[ab]{{{n}}}b"} for n in range(5, 25)]}
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(name: str) -> None:
    with pytest.raises(UserError):
        compiler().compiled(BOMBS[name])


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"enum": [f"v{n}" for n in range(5000)]}),
        schema({"$defs": {"n": {"properties": {"l": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}),
        Grammar("regex", "(a{1,1000}){1,1000}"),
        Grammar("regex", "(((((a*)*)*)*)*)*b"),
        Grammar("regex", "[ab]*a[ab]{30}"),
    ],
)
def test_large_and_recursive_grammars_are_bounded_and_work(grammar: Grammar) -> None:
    assert mask(compiler().compiled(grammar).begin())


def test_a_form_that_no_text_has_is_refused() -> None:
    endless = {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}
    with pytest.raises(UserError, match="no text has this form"):
        compiler().compiled(schema(endless))


def test_a_text_that_can_never_end_fails_with_a_reason() -> None:
    endless = {"$defs": {"n": {"$ref": "#/$defs/n"}}, "properties": {"a": {"$ref": "#/$defs/n"}}}
    matcher = compiler().compiled(schema({"type": "object", "required": ["a"], **endless})).begin()
    for token in tokens('{"a":'):
        assert matcher.accept_token(token)
    mask(matcher)
    with pytest.raises(UserError, match="cannot go on in the form"):
        matcher.accept_token(tokens("1")[0])


def walks(grammar: CompiledGrammar) -> tuple[list[Any], int]:
    """The masks on four random ways, and how many matchers went on alone."""
    choose, masks, alone = random.Random(1), [], 0
    for _ in range(4):
        matcher = grammar.begin()
        for _ in range(120):
            masks.append(mask(matcher))
            assert matcher.accept_token(choose.choice(tokens("ab")))
        alone += matcher.is_alone
    return masks, alone


def test_no_sequence_fails_because_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence meets about two new states per token, of 2^15, and goes on as without a limit."""
    form, limits = Grammar("regex", "[ab]*a[ab]{14}"), grammars._limits
    free, _ = walks(compiler().compiled(form))
    monkeypatch.setattr(grammars, "_limits", lambda: limits(300))
    shared, alone = walks(compiler().compiled(form))
    assert shared == free
    assert 0 < alone < 4


def test_a_sequence_that_meets_too_many_states_fails_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = grammars._limits
    monkeypatch.setattr(grammars, "_limits", lambda: limits(300))
    matcher, choose = (
        compiler().compiled(Grammar("regex", "[ab]*a[ab]{14}")).begin(),
        random.Random(1),
    )
    with pytest.raises(UserError, match=r"cannot go on .* too many states"):
        for _ in range(2000):
            mask(matcher)
            matcher.accept_token(choose.choice(tokens("ab")))


def test_a_grammar_is_compiled_once_in_any_thread_and_so_is_a_failure() -> None:
    made = compiler()
    good, bad = Grammar("regex", "ab"), Grammar("regex", "((")
    for grammar in (good, bad):
        pending = made.pending(grammar)
        assert pending is not None
        thread = threading.Thread(target=pending)
        thread.start()
        thread.join()
        assert made.pending(grammar) is None
    assert made.compiled(good) is made.compiled(good)
    errors = []
    for _ in range(2):
        with pytest.raises(UserError, match="unclosed group") as refused:
            made.compiled(bad)
        errors.append(refused.value)
    assert errors[0] is not errors[1]


def test_only_the_newest_grammars_are_kept() -> None:
    made = compiler()
    forms = [Grammar("regex", f"a{{{n}}}") for n in range(1, 66)]
    for each in forms:
        made.compiled(each)
    assert [made.pending(each) is None for each in (forms[0], forms[1], forms[-1])] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("text", "eos", "vocab", "told"),
    [
        (None, (END,), VOCAB, "has no tokenizer.json"),
        (TOKENIZER.to_str(), (), VOCAB, "has no end-of-sequence token"),
        (TOKENIZER.to_str(), (3,), 10, "tokenizer cannot be used"),
        ("{}", (3,), 10, "tokenizer cannot be used"),
    ],
)
def test_a_base_model_without_what_a_form_needs_says_so(
    text: str | None, eos: tuple[int, ...], vocab: int, told: str
) -> None:
    with pytest.raises(ServerError, match=told):
        GrammarCompiler(lambda: text, vocab, eos).compiled(Grammar("regex", "a"))
