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
