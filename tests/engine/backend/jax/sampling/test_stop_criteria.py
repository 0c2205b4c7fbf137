"""The ends of sequences: budgets, stop tokens, and stop strings in text decoded step by step."""

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tuneserve_engine.backend.jax.sampling.stop_criteria import StopCriteria
from tuneserve_engine.core.errors import ServerError

WORDS = ("the", "Ġend", "stop", "op!")
"""Tokens besides the 256 bytes, in GPT-2's spelling: Ġ is a space."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level(*WORDS)


def byte_level(*words: str) -> Tokenizer:
    """A tokenizer with a token for every byte and every word, and a special one."""
    tokens = [*sorted(ByteLevel.alphabet()), *words]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


def ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    found = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in found
    return found


def raw(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per UTF-8 byte."""
    return ids(tokenizer, *spelled(text))


def spelled(text: str) -> list[str]:
    """GPT-2's character for each UTF-8 byte."""
    pieces = ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [char for piece, _ in pieces for char in piece]


def first_stop(
    tokenizer: Tokenizer | None, tokens: Sequence[int], *strings: str
) -> tuple[int, str | None]:
    """The number of tokens that are kept, and the reason why the sequence ends there."""
    watch = StopCriteria(
        max_tokens=10_000, stop_tokens=(), stop_strings=strings, tokenizer=tokenizer
    )
    for count, token in enumerate(tokens, start=1):
        reason = watch.push(token)
        if reason is not None:
            return count, reason
    return len(tokens), None


def test_the_budget_ends_a_sequence() -> None:
    watch = StopCriteria(max_tokens=2, stop_tokens=(), stop_strings=(), tokenizer=None)
    assert [watch.push(5), watch.push(5)] == [None, "length"]


def test_a_budget_of_one_takes_one_token() -> None:
    watch = StopCriteria(max_tokens=1, stop_tokens={9}, stop_strings=(), tokenizer=None)
    assert watch.push(5) == "length"


def test_a_stop_token_ends_a_sequence_even_as_its_first_token() -> None:
    watch = StopCriteria(max_tokens=9, stop_tokens={3, 7}, stop_strings=(), tokenizer=None)
    assert watch.push(7) == "stop"


def test_a_stop_token_at_the_end_of_the_budget_is_a_stop() -> None:
    watch = StopCriteria(max_tokens=2, stop_tokens={7}, stop_strings=(), tokenizer=None)
    assert [watch.push(1), watch.push(7)] == [None, "stop"]


def test_without_stops_only_the_budget_counts() -> None:
    watch = StopCriteria(max_tokens=100, stop_tokens=(), stop_strings=(), tokenizer=None)
    assert [watch.push(token) for token in range(99)] == [None] * 99


def test_a_stop_string_may_be_one_token(tokenizer: Tokenizer) -> None:
    tokens = ids(tokenizer, "the", "stop", "the")
    assert first_stop(tokenizer, tokens, "stop") == (2, "stop")


def test_a_stop_string_may_start_and_end_inside_tokens(tokenizer: Tokenizer) -> None:
    tokens = ids(tokenizer, "the", "stop", "op!", "the")  # thestopop!the
    assert first_stop(tokenizer, tokens, "topo") == (3, "stop")
    assert first_stop(tokenizer, tokens, "opo") == (3, "stop")
    assert first_stop(tokenizer, tokens, "he") == (1, "stop")


def test_a_stop_string_may_span_many_tokens(tokenizer: Tokenizer) -> None:
    tokens = raw(tokenizer, "xx one two three yy")
    assert first_stop(tokenizer, tokens, " one two three") == (16, "stop")


def test_the_first_of_several_stop_strings_wins(tokenizer: Tokenizer) -> None:
    tokens = raw(tokenizer, "say b then a")
    assert first_stop(tokenizer, tokens, "then", "b", "never") == (5, "stop")


def test_a_stop_string_that_never_occurs_stops_nothing(tokenizer: Tokenizer) -> None:
    tokens = raw(tokenizer, "say b then a")
    assert first_stop(tokenizer, tokens, "than", "bt") == (len(tokens), None)


def test_a_character_split_over_tokens_completes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    tokens = raw(tokenizer, "a€b😀c")
    assert len(tokens) == 1 + 3 + 1 + 4 + 1
    assert first_stop(tokenizer, tokens, "€") == (4, "stop")
    assert first_stop(tokenizer, tokens, "b😀") == (9, "stop")


def test_a_string_is_found_though_a_broken_character_follows_in_the_same_token() -> None:
    first, second = spelled("é")
    tokenizer = byte_level("END" + first)
    assert first_stop(tokenizer, ids(tokenizer, "END" + first, second), "END") == (1, "stop")


def test_a_leading_space_belongs_to_the_string(tokenizer: Tokenizer) -> None:
    assert first_stop(tokenizer, raw(tokenizer, "an end"), " end") == (6, "stop")
    assert first_stop(tokenizer, ids(tokenizer, "the", "Ġend"), " end") == (2, "stop")
    assert first_stop(tokenizer, raw(tokenizer, "xend"), " end") == (4, None)


def test_a_special_token_can_be_given_as_a_string(tokenizer: Tokenizer) -> None:
    tokens = ids(tokenizer, "the", "<|im_end|>")
    assert first_stop(tokenizer, tokens, "<|im_end|>") == (2, "stop")


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    beyond = [9_999] * 50
    s, t = raw(tokenizer, "s"), raw(tokenizer, "top")
    assert first_stop(tokenizer, [*s, *beyond, *t, *beyond], "stop") == (54, "stop")


@pytest.mark.parametrize("stop", ["the end", "😀😀", "\n\n", "a", "ENDab€"])
def test_a_long_text_stops_where_its_decoded_text_first_contains_the_string(
    tokenizer: Tokenizer, stop: str
) -> None:
    """The reference decodes everything again at every token, on text with a late match."""
    filler = "a tale of é and € without haste, then ENDa " * 4 if stop != "a" else "no " * 30
    text = filler.replace("the end", "") + stop + " and on"
    tokens = raw(tokenizer, text)
    want = next(
        count
        for count in range(1, len(tokens) + 1)
        if stop in tokenizer.decode(tokens[:count], skip_special_tokens=False)
    )
    assert first_stop(tokenizer, tokens, stop) == (want, "stop")


def test_a_stop_string_is_found_at_every_place_of_a_long_text(tokenizer: Tokenizer) -> None:
    """Wherever the window of decoded tokens has just moved on."""
    for before in range(100):
        tokens = raw(tokenizer, "x" * before + "stop" + "x")
        assert first_stop(tokenizer, tokens, "stop") == (before + 4, "stop")


def test_an_empty_stop_string_stops_nothing(tokenizer: Tokenizer) -> None:
    tokens = ids(tokenizer, "the", "stop")
    assert first_stop(tokenizer, tokens, "") == (2, None)
    assert first_stop(tokenizer, tokens, "", "stop") == (2, "stop")


def test_stop_strings_without_a_tokenizer_are_refused_with_a_way_out() -> None:
    with pytest.raises(ServerError, match=r"\['END'\] need a tokenizer.*stop as token ids"):
        first_stop(None, [1], "END")
