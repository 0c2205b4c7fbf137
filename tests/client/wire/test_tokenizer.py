"""Texts and conversations as tokens of the embedded base model."""

import pytest

from tuneserve_client.wire.tokenizer import NoTemplate, TemplateError, Tokenizer
from tuneserve_engine.settings.common import TINY_MODEL

MESSAGES = [{"role": "user", "content": "Hi <b>"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(TINY_MODEL, "tiny")


def with_template(template: str | None, config: str | None = None) -> Tokenizer:
    return Tokenizer((TINY_MODEL / "tokenizer.json").read_text(), config, template, "own")


@pytest.mark.parametrize("text", ["The sky is blue.", "", "naïve ☃", "a" * 5000])
def test_a_text_survives_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)
    assert len(text) <= len(tokens) * tokenizer.longest_token


def test_offsets_divide_the_text_among_its_tokens(tokenizer: Tokenizer) -> None:
    text = "The sky is blue."
    tokens, offsets = tokenizer.encode_with_offsets(text)
    assert tokens == tokenizer.encode(text, special=False)
    assert "".join(text[start:end] for start, end in offsets) == text


def test_special_tokens_are_left_out_unless_requested(tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_token_id
    assert end is not None
    tokens = [*tokenizer.encode("Yes", special=False), end]
    assert tokenizer.decode(tokens) == "Yes"
    assert tokenizer.decode(tokens, skip_special=False) == "Yes<|im_end|>"


def test_half_of_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        tokenizer.encode("\ud800")


def test_a_template_renders_the_messages_options_and_special_tokens() -> None:
    template = "{{ eos_token }}{% for m in messages %}{{ m | tojson }}{% endfor %}{{ mood }}"
    own = with_template(template, '{"eos_token": {"content": "<|im_end|>"}}')
    assert own.render(MESSAGES, mood="!") == '<|im_end|>{"role": "user", "content": "Hi <b>"}!'
    assert own.apply_chat_template(MESSAGES, mood="!") == own.encode(
        own.render(MESSAGES, mood="!"), special=False
    )


def test_the_default_of_several_templates_in_the_configuration_is_used() -> None:
    config = (
        '{"chat_template": [{"name": "tools", "template": "tools"}, '
        '{"name": "default", "template": "{{ add_generation_prompt }}"}]}'
    )
    assert with_template(None, config).render(MESSAGES) == "True"
    assert with_template("own", config).render(MESSAGES) == "own"


def test_an_error_of_a_template_is_a_template_error() -> None:
    with pytest.raises(TemplateError, match="system comes first"):
        with_template("{{ raise_exception('system comes first') }}").render(MESSAGES)
    with pytest.raises(NoTemplate, match="'own' has no chat template"):
        with_template(None).render(MESSAGES)
