"""Datums from plain Python and NumPy, and their form on the wire."""

import numpy as np
import pytest

from tuneserve_client import Datum, chat_datum, next_token_datum, sft_datum
from tuneserve_client.codec import MAX_BYTES, chunks, decode_output, encode_data
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_client.wire.tokenizer import TemplateError, Tokenizer
from tuneserve_engine.settings.common import TINY_MODEL


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


def test_arrays_are_packed_as_the_protocol_requires() -> None:
    datum = Datum([5, 6], [[6, 1], [7, 2]], weights=np.eye(2), advantages=[1, 2])
    (message,) = encode_data([datum])
    assert message.model_input[0].encoded_text.tokens == b"\5\0\0\0\6\0\0\0"
    targets, weights, advantages = (
        message.loss_fn_inputs[name] for name in ("target_tokens", "weights", "advantages")
    )
    assert targets.dense == bytes([6, *[0] * 7, 1, *[0] * 7, 7, *[0] * 7, 2, *[0] * 7])
    assert (targets.dtype, list(targets.shape)) == (wire.DTYPE_INT64, [2, 2])
    assert weights.dense == bytes.fromhex("0000803f" + "00" * 8 + "0000803f")
    assert (weights.dtype, list(weights.shape)) == (wire.DTYPE_FLOAT32, [2, 2])
    assert (advantages.dtype, list(advantages.shape)) == (wire.DTYPE_FLOAT32, [2])


def test_outputs_of_different_widths_and_half_floats_are_read() -> None:
    """Two records: datums with one target per position in bfloat16, and one with two in float32."""
    half = wire.BatchedTensor(
        data=bytes.fromhex("803f0040" + "40c0"),  # the values 1, 2 and -3
        offsets=np.array([0, 4, 6], "<i8").tobytes(),
        dtype=wire.DTYPE_BFLOAT16,
    )
    wide = wire.BatchedTensor(
        data=np.array([1, 2, 3, 4], "<f4").tobytes(),
        offsets=np.array([0, 16], "<i8").tobytes(),
        dtype=wire.DTYPE_FLOAT32,
        trailing_shape=[2],
    )
    body = wire.ForwardBackwardOutput(
        loss_fn_outputs=[
            wire.ArrayRecord(fields={"logprobs": half}, num_datums=2),
            wire.ArrayRecord(fields={"logprobs": wide}, num_datums=1),
        ],
        metrics={"loss:sum": 2.5},
    )
    output = decode_output(body.SerializeToString())
    assert [each.tolist() for each in output.logprobs] == [[1, 2], [-3], [[1, 2], [3, 4]]]
    assert output.loss == 2.5


def test_requests_are_split_at_their_size_limit() -> None:
    """Each datum has 1.6 MB: 100,000 tokens of 4 bytes, their targets of 8 and weights of 4."""
    big = Datum(np.zeros(100_000, int), np.zeros(100_000, int), np.ones(100_000))
    assert big.size_bytes == 1_600_000
    assert [len(chunk) for chunk in chunks([big] * 7)] == [3, 3, 1]
    huge = Datum(np.zeros(10**6, int), np.zeros(10**6, int))
    assert huge.size_bytes > MAX_BYTES
    assert [len(chunk) for chunk in chunks([big, huge, big])] == [1, 1, 1]


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
