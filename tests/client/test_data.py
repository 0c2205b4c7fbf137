"""Datums from plain Python, NumPy and conversations."""

import numpy as np
import pytest

from tuneserve_client import Datum, chat_datum, next_token_datum, sft_datum
from tuneserve_client.data import INPUTS
from tuneserve_client.wire.tokenizer import TemplateError, Tokenizer
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_engine.worker.codecs.training import LOSS_SPECS


def test_each_token_is_predicted_from_those_before_it() -> None:
    datum = next_token_datum([5, 6, 7, 8], weights=[0.0, 0.0, 1.0, 0.5])
    assert datum.tokens.tolist() == [5, 6, 7]
    assert datum.targets.tolist() == [6, 7, 8]
    assert datum.inputs["weights"].tolist() == [0.0, 1.0, 0.5]
    assert next_token_datum(np.arange(3)).inputs["weights"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"\(2,\) for 3 tokens"):
        next_token_datum([1, 2, 3], weights=[1.0, 1.0])


def test_token_ids_of_another_type_are_refused_instead_of_rounded() -> None:
    for wrong in ([1.0, 2.0], ["a"], [True, False]):
        with pytest.raises(TypeError, match="token ids"):
            Datum(wrong, [1, 2])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="target_tokens are"):
            Datum([1, 2], wrong)


def test_a_misspelt_input_is_refused_instead_of_ignored() -> None:
    with pytest.raises(TypeError, match=r"'wieghts'.*did you mean 'weights'"):
        Datum([1, 2, 3], targets=[2, 3, 4], wieghts=[0, 0, 1])
    with pytest.raises(TypeError, match=r"'reference'.*datum\.inputs"):
        Datum([1, 2], [2, 3], reference=[0, 1])


def test_every_input_of_a_loss_of_the_server_is_accepted() -> None:
    read = {name for spec in LOSS_SPECS.values() for name in (*spec.inputs, *spec.optional)}
    config = {name for spec in LOSS_SPECS.values() for name in spec.config}
    assert set(INPUTS) == read - config


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(TINY_MODEL, "tiny")


def learnt(tokenizer: Tokenizer, datum: Datum) -> str:
    weighted = datum.targets[datum.inputs["weights"] == 1]
    return tokenizer.decode(weighted.tolist(), skip_special=False)


def test_a_completion_gets_one_end_token(tokenizer: Tokenizer) -> None:
    once = sft_datum(tokenizer, "Q", " A<|im_end|>")
    assert learnt(tokenizer, once) == " A<|im_end|>"
    assert learnt(tokenizer, sft_datum(tokenizer, "Q", " A", end=False)) == " A"


SIMPLE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>\n{% endfor %}"
ASKS = SIMPLE + "{% if add_generation_prompt %}[assistant]{% endif %}"
TURNS = [
    {"role": "user", "content": "One"},
    {"role": "assistant", "content": "First."},
    {"role": "user", "content": "Two"},
    {"role": "assistant", "content": "Second."},
]


def with_template(template: str | None) -> Tokenizer:
    return Tokenizer((TINY_MODEL / "tokenizer.json").read_text(), None, template, "own")


def test_every_answer_of_a_conversation_can_be_learnt() -> None:
    own = with_template(ASKS)
    assert learnt(own, chat_datum(own, TURNS, learn="all")) == "First.<|im_end|>Second.<|im_end|>"
    assert learnt(own, chat_datum(own, TURNS)) == "Second.<|im_end|>"


def test_a_message_of_the_assistant_that_opens_a_conversation_is_only_read() -> None:
    own = with_template("{% if messages[0].role == 'system' %}{% endif %}" + ASKS)
    opened = [{"role": "assistant", "content": "Ahoy!"}, *TURNS]
    datum = chat_datum(own, opened, learn="all")
    assert learnt(own, datum) == "First.<|im_end|>Second.<|im_end|>"
    text = own.decode([*datum.tokens.tolist(), datum.targets.tolist()[-1]], skip_special=False)
    assert text == own.render(opened, add_generation_prompt=False)
    with pytest.raises(ValueError, match="no message comes before the assistant's"):
        chat_datum(own, opened[:1])


def test_a_template_that_rewrites_earlier_answers_is_refused() -> None:
    own = with_template(
        "{% for m in messages %}[{{ m.role }}]{% if loop.last %}!{% endif %}{{ m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    with pytest.raises(ValueError, match="message 1 differently"):
        chat_datum(own, TURNS, learn="all")


def test_a_tokenizer_without_a_template_says_so() -> None:
    with pytest.raises(TemplateError, match="'own' has no chat template"):
        with_template(None).apply_chat_template(TURNS)
    with pytest.raises(TemplateError, match="system comes first"):
        with_template("{{ raise_exception('system comes first') }}").render(TURNS)
