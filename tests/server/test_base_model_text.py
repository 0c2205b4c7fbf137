"""Text to tokens and back, against the reference implementation of chat templates."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.base_model_text import BaseText
from tuneserve_server.errors import InvalidField


@pytest.fixture(scope="module")
def text() -> BaseText:
    return BaseText("tuneserve/tiny", TINY_MODEL)


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b> & 'you'"}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "naïve 🎉?"},
        {"role": "assistant", "content": "yes", "reasoning_content": " why \n"},
        {"role": "user", "content": ""},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_a_conversation_has_the_same_tokens_as_in_transformers(
    text: BaseText, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(TINY_MODEL)
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )
    assert text.chat(messages, options) == expected


def test_a_template_file_takes_precedence_over_the_template_in_the_config(tmp_path: Path) -> None:
    for path in TINY_MODEL.glob("tokenizer*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ {'a': '<é>'} | tojson }}{{ eos_token }}")
    own = BaseText("own", tmp_path)
    (end,) = own.encode("<|im_end|>")
    assert own.chat([], {}) == [*own.encode('{"a": "<é>"}'), end]


def test_a_template_cannot_change_its_input_or_reach_beyond_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY_MODEL / "tokenizer.json").read_bytes())
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% for %}"):
        (tmp_path / "chat_template.jinja").write_text(source)
        with pytest.raises(InvalidField, match="cannot render"):
            BaseText("own", tmp_path).chat([], {})
