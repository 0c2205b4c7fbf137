"""The texts of answers: where tokens start, and where stop strings cut."""

import pytest

from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.base_model_text import BaseText
from tuneserve_server.openai.responses import (
    Choice,
    CompletionShape,
    Likely,
    ScoredToken,
    cut_at,
    offsets,
)


@pytest.fixture(scope="module")
def text() -> BaseText:
    return BaseText("tuneserve/tiny", TINY_MODEL)


@pytest.mark.parametrize("said", ["plain words", "naïve 🎉🎉 ok", "日本語", "🎉", ""])
def test_a_token_starts_after_the_whole_characters_before_it(text: BaseText, said: str) -> None:
    tokens = text.encode(said)
    expected = [len(text.decode(tokens[:i]).rstrip("\ufffd")) for i in range(len(tokens))]
    assert offsets(tokens, text) == expected
    assert text.decode(tokens) == said


def test_text_is_cut_at_the_first_stop_string() -> None:
    assert cut_at("a--b==c", ["==", "--"]) == "a"
    assert cut_at("abc", ["x"]) == "abc"


def test_tokens_at_one_position_have_different_names() -> None:
    top = [Likely(7, "\ufffd", -0.5), Likely(8, "\ufffd", -1.0), Likely(5, "x", -2.0)]
    shape = CompletionShape()
    scored = [
        ScoredToken(9, "x", 0, -3.0, top),  # has the same text as a likelier token
        ScoredToken(8, "\ufffd", 1, -1.0, top),
        ScoredToken(5, "x", 2, -2.0, top),
    ]
    said = shape.choice(0, Choice("", None, scored))["logprobs"]
    assert said["tokens"] == ["token_id:9", "token_id:8", "x"]
    assert said["top_logprobs"] == [{"token_id:7": -0.5, "token_id:8": -1.0, "x": -2.0}] * 3
