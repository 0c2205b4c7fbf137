"""Spans of ``stable_reinforce`` become plain inputs of the loss, and errors in them are named."""

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest
from tinker.types.provenance_spans import PromptProvenanceSpan as PromptSpan
from tinker.types.provenance_spans import SampledProvenanceSpan as SampledSpan

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core import recordings
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.provenance import MASK, MAX_FIELDS, Provenance, Source, metrics
from tuneserve_engine.core.recordings import RecordedSequence, SampleKey
from tuneserve_engine.worker.codecs.training import TrainingData, decode_request

INFO = BaseModelInfo("tiny", "qwen3", 100, 32, 8, "tiny")
FIRST, SECOND = "s:sample:0:7:0", "s:sample:0:8:1"


def source(prompt: int, tokens: list[int], logprobs: list[float]) -> Source:
    drawn = RecordedSequence(np.array(tokens, "<i4").tobytes(), np.array(logprobs, "<f4").tobytes())
    return Source(drawn, prompt)


SOURCES = {
    FIRST: source(3, [11, 12], [-0.5, -1.5]),
    SECOND: source(7, [31, 32, 33], [-0.25, -0.75, -1.25]),
}
# The prompt [1, 2, 3], the first sample, two tokens of an environment, and the second sample.
TEXT = [1, 2, 3, 11, 12, 21, 22, 31, 32, 33]
SPANS: list[Any] = [
    PromptSpan(sequence_id=FIRST, offset=0, length=3),
    SampledSpan(sequence_id=FIRST, offset=0, length=2),
    PromptSpan(sequence_id=SECOND, offset=5, length=2),
    SampledSpan(sequence_id=SECOND, offset=0, length=3),
]
INPUT_SPANS = [*SPANS[:-1], replace(SPANS[-1], length=2)]
TARGET_SPANS = [replace(SPANS[0], offset=1, length=2), *SPANS[1:]]
ADVANTAGES = [0.0, 0.0, 2.0, 2.0, 0.0, 0.0, -1.0, -1.0, -1.0]


def turns(inputs: Any = None, losses: Any = None, **changes: Any) -> types.Datum:
    """A conversation of two turns in one datum, as the cookbook makes it."""
    values = {
        "target_tokens": TEXT[1:],
        "logprobs": [-9.0] * 9,  # differ from the recorded ones
        "advantages": ADVANTAGES,
        **changes,
    }
    datum = types.Datum(types.ModelInput.from_ints(TEXT[:-1]), values)
    return replace(
        datum,
        model_input_spans=INPUT_SPANS if inputs is None else inputs,
        loss_fn_input_spans=TARGET_SPANS if losses is None else losses,
    )


def message(*data: types.Datum, config: dict[str, Any] | None = None) -> Any:
    inputs = ForwardBackwardInput(list(data), "stable_reinforce", config)
    return forward_backward_request_to_proto(ForwardBackwardRequest(inputs, "s:train:0", 1))


def trained(sent: Any, sources: Any = None) -> TrainingData:
    """The training data of the request, once it is joined with the recordings."""
    return decode_request(joined(sent.SerializeToString(), sources or SOURCES), INFO)


def joined(body: bytes, sources: Any) -> bytes:
    """The request joined with the sequences that it names, in order."""
    asked = Provenance(body, "s")
    for each in asked.samples:
        asked.take_sequences({each: sources[each]})
    return asked.joined()


def test_several_turns_of_a_datum_get_their_recorded_logprobs() -> None:
    data = trained(message(turns(), turns()))
    assert data.config == {"clip_high_threshold": 2.0, "kl_coeff": 0.0}
    for datum in data.data:
        mask = np.float32([0, 0, 1, 1, 0, 0, 1, 1, 1])
        np.testing.assert_array_equal(datum.per_token[MASK], mask, strict=True)
        recorded = np.float32([0, 0, -0.5, -1.5, 0, 0, -0.25, -0.75, -1.25])
        np.testing.assert_array_equal(datum.per_token["logprobs"], recorded, strict=True)
        np.testing.assert_array_equal(datum.per_token["advantages"], np.float32(ADVANTAGES))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"clip_high_threshold": 0.0}, "['clip_high_threshold'] is 0;"),
        ({"clip_high_threshold": -1.5}, "['clip_high_threshold'] is -1.5;"),
        ({"kl_coeff": -0.1}, "['kl_coeff'] is -0.1;"),
    ],
)
def test_a_cap_that_inverts_the_loss_is_refused(config: dict[str, float], said: str) -> None:
    with pytest.raises(UserError) as raised:
        trained(message(turns(), config=config))
    assert said in str(raised.value)


def test_each_named_sample_is_found_once() -> None:
    asked = Provenance(message(turns(), turns()).SerializeToString(), "s")
    first, second = SampleKey("s:sample:0", 7), SampleKey("s:sample:0", 8)
    assert asked.samples == {FIRST: (first, 0), SECOND: (second, 1)}
    assert asked.first == {
        first: f"data[0].model_input_spans[0] names sequence '{FIRST}'",
        second: f"data[0].model_input_spans[2] names sequence '{SECOND}'",
    }


def test_the_clients_claims_about_the_sampler_do_not_count() -> None:
    honest = trained(message(turns()))
    sent = message(turns())
    del sent.data[0].loss_fn_inputs["logprobs"]
    assert_same(trained(sent), honest)
    mask = wire.Tensor(dense=np.ones(9, "<f4").tobytes(), dtype=wire.DTYPE_FLOAT32, shape=[9])
    sent.data[0].loss_fn_inputs[MASK].ParseFromString(mask.SerializeToString())
    assert_same(trained(sent), honest)


def assert_same(one: TrainingData, other: TrainingData) -> None:
    for key in (MASK, "logprobs", "advantages"):
        np.testing.assert_array_equal(one.data[0].per_token[key], other.data[0].per_token[key])


def test_the_cookbooks_zero_padding_of_prompt_targets_is_accepted() -> None:
    """Only sampled tokens are compared with the recording."""
    padded = [0, 0, *TEXT[3:]]
    assert trained(message(turns(target_tokens=padded))).data[0].targets[0, 0] == 0


def test_empty_spans_name_no_sequence() -> None:
    """The cookbook sends them for a sequence of one token, whose inputs are the prompt only."""
    one = [PromptSpan(sequence_id=FIRST, length=3), SampledSpan(sequence_id=FIRST, length=0)]
    target = [
        PromptSpan(sequence_id=FIRST, offset=1, length=2),
        SampledSpan(sequence_id=FIRST, length=1),
    ]
    datum = types.Datum(
        types.ModelInput.from_ints([1, 2, 3]),
        {"target_tokens": [2, 3, 11], "advantages": [0.0, 0.0, 1.0]},
    ).with_provenance(one, target)
    np.testing.assert_array_equal(trained(message(datum)).data[0].per_token[MASK], [0, 0, 1])
    gone = [replace(SPANS[0], sequence_id="nonsense", length=0), *INPUT_SPANS]
    trained(message(turns(gone)))


def test_a_part_of_a_sequence_may_be_trained_on() -> None:
    datum = types.Datum(
        types.ModelInput.from_ints([1, 31]),
        {"target_tokens": [31, 32], "advantages": [0.0, 1.0]},
    )
    inputs = [PromptSpan(sequence_id=SECOND, length=1), SampledSpan(sequence_id=SECOND, length=1)]
    losses = [
        SampledSpan(sequence_id=SECOND, length=1),
        SampledSpan(sequence_id=SECOND, offset=1, length=1),
    ]
    (found,) = trained(message(datum.with_provenance(inputs, losses))).data
    np.testing.assert_array_equal(found.per_token["logprobs"], np.float32([-0.25, -0.75]))


def named(spans: list[Any], at: int, **changes: Any) -> list[Any]:
    """The spans, one of them changed."""
    return [replace(each, **changes) if i == at else each for i, each in enumerate(spans)]


REFUSED: dict[str, tuple[types.Datum, list[str]]] = {
    "inputs too few": (
        turns(INPUT_SPANS[:-1]),
        ["data[1].model_input_spans cover 7 tokens", "has 9 input tokens"],
    ),
    "targets too many": (
        turns(losses=[*TARGET_SPANS, SPANS[1]]),
        ["data[1].loss_fn_input_spans cover 11 tokens", "9 target tokens"],
    ),
    "another session": (
        turns(named(INPUT_SPANS, 0, sequence_id="other:sample:0:7:0")),
        ["data[1].model_input_spans[0]", "of session 'other'", "the model is of session 's'"],
    ),
    "no id of ours": (
        turns(named(INPUT_SPANS, 2, sequence_id="s:sample:0:x:1")),
        ["data[1].model_input_spans[2]", "'s:sample:0:x:1'", "no id that this server gives"],
    ),
    "a number in another form": (
        turns(named(INPUT_SPANS, 2, sequence_id="s:sample:0:07:1")),
        ["data[1].model_input_spans[2]", "no id that this server gives"],
    ),
    "a number that is too large": (
        turns(named(INPUT_SPANS, 2, sequence_id=f"s:sample:0:{2**63}:1")),
        ["data[1].model_input_spans[2]", "no id that this server gives"],
    ),
    "behind the sequence": (
        turns(losses=named(TARGET_SPANS, 1, offset=1)),
        ["data[1].loss_fn_input_spans[1] ends at 3", f"sequence '{FIRST}' has 2 tokens"],
    ),
    "behind the prompt": (
        turns(named(INPUT_SPANS, 2, offset=6)),
        ["data[1].model_input_spans[2] ends at 8", f"prompt of sequence '{SECOND}' has 7"],
    ),
    "other targets": (
        turns(target_tokens=[*TEXT[1:-1], 44]),
        ["data[1].loss_fn_input_spans[3]", "target token 8, 44,", "token 2 of sequence", "is 33"],
    ),
    "other inputs": (
        replace(turns(), model_input=types.ModelInput.from_ints([1, 2, 3, 99, *TEXT[4:-1]])),
        ["data[1].model_input_spans[1]", "input token 3, 99,", "is token 0 of", "that is 11"],
    ),
    "an advantage on the prompt": (
        turns(advantages=[0.0, 0.5, *ADVANTAGES[2:]]),
        ["data[1].advantages is 0.5 at position 1", "no sampled_tokens span", "send 0 there"],
    ),
    "no advantages": (
        replace(turns(), loss_fn_inputs={"target_tokens": TEXT[1:]}),
        ["data[1].loss_fn_inputs lacks advantages"],
    ),
    "targets of two dimensions": (
        replace(turns(), loss_fn_inputs={"target_tokens": np.ones((9, 2), np.int64)}),
        ["data[1].target_tokens must be a dense tensor of int64, [N]"],
    ),
    "no targets": (
        replace(turns(), loss_fn_inputs={"advantages": ADVANTAGES}),
        ["data[1].loss_fn_inputs lacks target_tokens"],
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_spans_that_do_not_fit_are_refused_with_datum_and_span(what: str) -> None:
    datum, words = REFUSED[what]
    with pytest.raises(UserError) as error:
        trained(message(turns(), datum))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("field", ["model_input_spans", "loss_fn_input_spans"])
def test_a_datum_without_spans_is_refused_with_the_way_to_get_them(field: str) -> None:
    sent = message(turns(), turns())
    del getattr(sent.data[1], field)[:]
    with pytest.raises(UserError, match=rf"data\[1\] has no {field}.*with_provenance"):
        trained(sent)


@pytest.mark.parametrize("change", ["empty", "negative", "overflowing"])
def test_spans_that_the_sdk_would_not_send_are_refused_too(change: str) -> None:
    sent = message(turns())
    span = sent.data[0].model_input_spans[0]
    if change == "empty":
        span.ClearField("prompt_tokens")
    elif change == "negative":
        span.prompt_tokens.offset = -1
    else:
        span.prompt_tokens.length = 2**62
    with pytest.raises(UserError, match=r"data\[0\].model_input_spans"):
        trained(sent)


def test_a_malformed_body_or_one_with_too_many_fields_is_refused() -> None:
    with pytest.raises(UserError, match="no ForwardBackwardRequest message"):
        Provenance(b"\x1a\xff\xff\xff", "s")
    spans = wire.Datum(model_input_spans=[wire.ProvenanceSpan()] * (MAX_FIELDS + 1))
    body = wire.ForwardBackwardRequest(data=[spans]).SerializeToString()
    with pytest.raises(UserError, match=f"more than {MAX_FIELDS}"):
        Provenance(body, "s")


class AnySource(dict[str, Source]):
    """Every named sequence was sampled."""

    def __missing__(self, name: str) -> Source:
        return SOURCES[SECOND]


@given(st.binary(max_size=6), st.integers(0, 900), st.integers(0, 8))
@settings(max_examples=300, deadline=None)
def test_a_corrupted_request_is_refused_and_breaks_nothing(noise: bytes, at: int, cut: int) -> None:
    body = message(turns(), turns()).SerializeToString()
    body = body[:at] + noise + body[at + cut :]
    with contextlib.suppress(UserError):
        decode_request(joined(body, AnySource(SOURCES)), INFO)


def test_a_recording_holds_tokens_and_logprobs_exactly() -> None:
    tokens, logprobs = np.array([5, 151_935], np.int32), np.float32([-0.1, -1e-30])
    recording = recordings.decode(
        recordings.encode(4, [(tokens, logprobs), (tokens[:1], logprobs[1:])])
    )
    assert recording.prompt == 4
    first, second = (Source(each, recording.prompt) for each in recording.sequences)
    np.testing.assert_array_equal(first.tokens, tokens)
    np.testing.assert_array_equal(first.logprobs, logprobs)
    assert (second.tokens.tolist(), second.logprobs.tolist()) == ([5], [float(logprobs[1])])


def test_metrics_count_truncated_tokens_and_name_the_loss() -> None:
    inputs = {MASK: np.float32([0, 1, 1]), "logprobs": np.float32([0, -2.0, -1.0])}
    logprobs = np.float32([-5.0, -1.0, -1.5])
    name = "tuneserve_truncated_reinforce"
    assert metrics([(logprobs, inputs), (logprobs, inputs)], cap=2.0) == {
        f"{name}/sampled_tokens:sum": 4.0,
        f"{name}/truncated_tokens:sum": 2.0,  # e to the power of 1 is above the cap
        f"{name}/log_ratio:sum": 1.0,
        f"{name}/abs_log_ratio:max": 1.0,
    }
    assert metrics([(logprobs, inputs | {MASK: np.zeros(3, np.float32)})], cap=2.0) == {
        f"{name}/sampled_tokens:sum": 0.0,
        f"{name}/truncated_tokens:sum": 0.0,
        f"{name}/log_ratio:sum": 0.0,
        f"{name}/abs_log_ratio:max": 0.0,
    }
