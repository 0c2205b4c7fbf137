"""The training codec against the official SDK's own converters, in both directions."""

import itertools
import logging
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest
from tinker.types.provenance_spans import PromptProvenanceSpan

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core import provenance
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.worker.codecs.training import (
    LOSS_SPECS,
    MAX_FIELDS,
    MAX_TARGET_CELLS,
    TrainingData,
    decode_request,
    encode_output,
)

INFO = BaseModelInfo(
    name="tiny",
    architecture="qwen3",
    vocab_size=100,
    context_length=8,
    max_rank=8,
    tokenizer_id="tiny",
)
POLICY = {"target_tokens": [2, 3], "logprobs": [-1.0, -2.0], "advantages": [0.5, -0.5]}


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    """A datum as a user of the SDK writes it."""
    return types.Datum(types.ModelInput.from_ints(tokens), inputs)


def message(
    *data: types.Datum, loss: Any = "cross_entropy", config: dict[str, Any] | None = None
) -> Any:
    """The body that the SDK sends, before serialization."""
    inputs = ForwardBackwardInput(data=list(data), loss_fn=loss, loss_fn_config=config)
    return forward_backward_request_to_proto(ForwardBackwardRequest(inputs, "s:train:0", 1))


def decode(
    *data: types.Datum, loss: Any = "cross_entropy", config: dict[str, Any] | None = None
) -> TrainingData:
    return decode_request(message(*data, loss=loss, config=config).SerializeToString(), INFO)


# --- requests of the SDK -------------------------------------------------------------------------


def test_plain_lists_arrive_unchanged() -> None:
    decoded = decode(
        datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0.0, 0.5, -1.5]),
        datum([7], target_tokens=[8], weights=[1.0]),
    )
    assert decoded.loss == "cross_entropy"
    assert not decoded.forward_only
    first, second = decoded.data
    np.testing.assert_array_equal(first.tokens, np.array([1, 2, 3], np.int32), strict=True)
    np.testing.assert_array_equal(first.targets, np.array([[2], [3], [4]], np.int32), strict=True)
    np.testing.assert_array_equal(
        first.weights, np.array([[0.0], [0.5], [-1.5]], np.float32), strict=True
    )
    assert first.flat
    np.testing.assert_array_equal(second.tokens, [7])


def test_the_forward_only_flag_is_read() -> None:
    body = message(datum([1], target_tokens=[2]))
    body.forward_only = True
    assert decode_request(body.SerializeToString(), INFO).forward_only


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=8), st.lists(st.integers(0, 8), max_size=9)
)
@settings(deadline=None)
def test_a_prompt_may_be_cut_into_chunks_anywhere(tokens: list[int], cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), 8]
    pieces = [tokens[a:b] for a, b in itertools.pairwise(ends)]
    chunks = [types.EncodedTextChunk(tokens=piece) for piece in pieces]
    sent = types.Datum(types.ModelInput(chunks=chunks), {"target_tokens": tokens})
    np.testing.assert_array_equal(decode(sent).data[0].tokens, tokens)


def test_other_precisions_of_numpy_and_torch_are_converted() -> None:
    decoded = decode(
        datum(
            [1, 2],
            target_tokens=np.array([2, 3], np.int32),
            weights=np.array([0.1, 0.2], np.float64),
        ),
        datum(
            [1, 2],
            target_tokens=torch.tensor([2, 3]),
            weights=torch.tensor([0.1, 0.2], dtype=torch.bfloat16),
        ),
    )
    np.testing.assert_array_equal(decoded.data[0].targets[:, 0], [2, 3])
    np.testing.assert_array_equal(decoded.data[0].weights[:, 0], np.float32([0.1, 0.2]))
    bfloat16 = torch.tensor([0.1, 0.2]).bfloat16().float().numpy()
    np.testing.assert_array_equal(decoded.data[1].weights[:, 0], bfloat16)


def test_a_tensor_without_shape_is_one_dimensional() -> None:
    targets = types.TensorData(data=[2, 3], dtype="int64")
    weights = types.TensorData(data=[1.0, 2.0], dtype="float32")
    sent = message(datum([1, 2], target_tokens=targets, weights=weights))
    assert not sent.data[0].loss_fn_inputs["target_tokens"].shape
    decoded = decode_request(sent.SerializeToString(), INFO).data[0]
    assert decoded.flat
    np.testing.assert_array_equal(decoded.targets, [[2], [3]])
    np.testing.assert_array_equal(decoded.weights, [[1], [2]])


@given(
    arrays.arrays(np.int64, (5, 6), elements=st.integers(0, 99), fill=st.just(0)),
    arrays.arrays(np.float32, (5, 6), elements=st.floats(-4, 4, width=32), fill=st.just(0.0)),
)
@example(np.zeros((5, 6), np.int64), np.ones((5, 6), np.float32))
@example(np.ones((5, 6), np.int64), np.zeros((5, 6), np.float32))
@settings(deadline=None, max_examples=50)
def test_sparse_and_dense_tensors_are_equivalent(targets: Any, weights: Any) -> None:
    sent = message(
        datum(
            [1, 2, 3, 4, 5],
            target_tokens=torch.from_numpy(targets),
            weights=torch.from_numpy(weights),
        )
    )
    decoded = decode_request(sent.SerializeToString(), INFO).data[0]
    assert not decoded.flat
    np.testing.assert_array_equal(decoded.targets, targets)
    np.testing.assert_array_equal(decoded.weights, weights)
    tensors = sent.data[0].loss_fn_inputs
    for name, values in (("target_tokens", targets), ("weights", weights)):
        sparse = 6 + 2 * np.count_nonzero(values) < values.size  # the SDK's rule
        assert tensors[name].HasField("sparse_csr") == sparse


def test_int32_and_bfloat16_tensors_are_read_too() -> None:
    sent = wire.ForwardBackwardRequest.FromString(
        message(datum([1, 2], target_tokens=[2, 3])).SerializeToString()
    )
    inputs = sent.data[0].loss_fn_inputs
    inputs["target_tokens"].dtype = wire.DTYPE_INT32
    inputs["target_tokens"].dense = np.array([4, 5], "<i4").tobytes()
    values = torch.tensor([0.3, -70000.0]).bfloat16()
    inputs["weights"].dtype = wire.DTYPE_BFLOAT16
    inputs["weights"].dense = values.view(torch.int16).numpy().tobytes()
    decoded = decode_request(sent.SerializeToString(), INFO).data[0]
    np.testing.assert_array_equal(decoded.targets[:, 0], [4, 5])
    np.testing.assert_array_equal(decoded.weights[:, 0], values.float().numpy())


def test_cross_entropy_without_weights_counts_every_target_once() -> None:
    np.testing.assert_array_equal(
        decode(datum([1, 2], target_tokens=[2, 3])).data[0].weights, [[1], [1]]
    )


def test_policy_losses_read_their_inputs_per_token() -> None:
    decoded = decode(
        datum([1, 2], **POLICY, clip_low_threshold=[0.5, 0.6]),
        loss="ppo",
        config={"clip_high_threshold": 1.5},
    )
    assert decoded.config == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.5}
    per_token = decoded.data[0].per_token
    assert per_token.keys() == {"logprobs", "advantages", "clip_low_threshold"}
    np.testing.assert_array_equal(per_token["logprobs"], [-1, -2])
    np.testing.assert_array_equal(per_token["advantages"], [0.5, -0.5])
    np.testing.assert_array_equal(per_token["clip_low_threshold"], np.float32([0.5, 0.6]))


@pytest.mark.parametrize(
    ("loss", "defaults"),
    [
        ("cross_entropy", {}),
        ("importance_sampling", {}),
        ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
        ("dro", {"beta": 0.01}),
        ("gspo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ],
)
def test_every_loss_has_its_documented_defaults(loss: str, defaults: dict[str, float]) -> None:
    sent = message(datum([1, 2], **POLICY, sequence_ratio_mask=[0.0, 1.0]))
    sent.loss_fn = loss
    assert decode_request(sent.SerializeToString(), INFO).config == defaults
    assert loss in LOSS_SPECS


def test_the_newer_config_map_overrides_the_legacy_one() -> None:
    sent = message(datum([1, 2], **POLICY), loss="dro", config={"beta": 0.5})
    sent.loss_fn_config["beta"] = 0.25
    assert decode_request(sent.SerializeToString(), INFO).config == {"beta": 0.5}
    del sent.loss_fn_config_v2["beta"]
    assert decode_request(sent.SerializeToString(), INFO).config == {"beta": 0.25}


def test_provenance_spans_are_accepted() -> None:
    span = [PromptProvenanceSpan(sequence_id="a", offset=0, length=2)]
    sent = datum([1, 2], target_tokens=[2, 3]).with_provenance(span, span)
    np.testing.assert_array_equal(decode(sent).data[0].tokens, [1, 2])


def test_names_that_the_loss_reads_and_the_sampled_mask_pass_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    masked = {provenance.MASK: np.ones(2, np.float32)}
    decode(
        datum([1, 2], target_tokens=[2, 3], weights=[1.0, 1.0]),
        datum([1, 2], target_tokens=[2, 3], **masked),
    )
    assert caplog.records == []


def test_unread_inputs_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    mask = np.ones(2, np.float32)
    data = [datum([1, 2], target_tokens=[2, 3], mask=mask) for _ in range(3)]
    with caplog.at_level(logging.WARNING):
        decode(*data)
    assert [record.getMessage() for record in caplog.records] == [
        "cross_entropy does not read 'mask' in loss_fn_inputs; ignored"
    ]


CLIPS = {"clip_low_threshold": [0.8, 0.8], "clip_high_threshold": [1.2, 1.2]}
GSPO = {**POLICY, **CLIPS, "sequence_ratio_mask": [1.0, 1.0]}
ONES = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        ("cross_entropy", "mask"),  # of the cookbook
        *(("cross_entropy", name) for name in GSPO if name != "target_tokens"),  # of other losses
        *(
            (loss, "weights")
            for loss in LOSS_SPECS
            if loss not in ("cross_entropy", provenance.LOSS)
        ),
        ("ppo", "mask"),
        ("gspo", "mask"),
        ("cross_entropy", "token_weights"),
        ("cross_entropy", "target_mask"),
        ("cross_entropy", "rewards"),
        ("importance_sampling", "ref_logprobs"),
        ("importance_sampling", "old_logprobs"),
        ("importance_sampling", "advantage"),  # one number per sequence, beside the tokens' own
        ("dro", "x" * 100_000),
    ],
)
def test_names_that_a_loss_ignores_change_nothing(loss: str, name: str) -> None:
    inputs = {"target_tokens": [2, 3]} if loss == "cross_entropy" else GSPO
    plain = decode(datum([1, 2], **inputs), loss=loss).data[0]
    more = decode(datum([1, 2], **{**inputs, name: ONES}), loss=loss).data[0]
    np.testing.assert_array_equal(more.weights, plain.weights, strict=True)
    assert more.per_token.keys() == plain.per_token.keys()


@pytest.mark.parametrize(
    ("loss", "name", "meant"),
    [
        ("cross_entropy", "wieghts", "weights"),
        ("cross_entropy", "weight", "weights"),
        ("cross_entropy", "Weights", "weights"),
        ("cross_entropy", "weights_", "weights"),
        ("cross_entropy", "target_token", "target_tokens"),
        ("importance_sampling", "logprob", "logprobs"),
        ("importance_sampling", "advantges", "advantages"),
        ("ppo", "clip_hgih_threshold", "clip_high_threshold"),
        ("cispo", "clip-low-threshold", "clip_low_threshold"),
        ("gspo", "sequence_ratio_maks", "sequence_ratio_mask"),
    ],
)
def test_a_misspelt_input_is_refused_with_the_right_name(loss: str, name: str, meant: str) -> None:
    inputs = {"weights": ONES} if loss == "cross_entropy" else {}
    good = datum([1, 2], **GSPO, **inputs)
    bad = {key: value for key, value in {**GSPO, **inputs}.items() if key != meant}
    sent = message(good, datum([1, 2], **{**bad, name: ONES}), loss=loss)
    refused(
        sent.SerializeToString(),
        ["data[1].loss_fn_inputs", repr(name), loss, f"did you mean {meant!r}", "It reads target_"],
    )


# --- refusals ------------------------------------------------------------------------------------


def first_targets(sent: Any) -> Any:
    return sent.data[0].loss_fn_inputs["target_tokens"]


def with_csr(
    crow: list[int], columns: list[int], values: list[int], shape: list[int]
) -> Callable[[Any], None]:
    def change(sent: Any) -> None:
        tensor = first_targets(sent)
        tensor.sparse_csr.crow_indices = np.array(crow, "<i8").tobytes()
        tensor.sparse_csr.col_indices = np.array(columns, "<i8").tobytes()
        tensor.sparse_csr.values = np.array(values, "<i8").tobytes()
        tensor.shape[:] = shape

    return change


def with_chunk(kind: str) -> Callable[[Any], None]:
    def change(sent: Any) -> None:
        chunk = sent.data[0].model_input[0]
        if kind == "image":
            chunk.image.format = "png"
        elif kind == "dmel":
            chunk.dmel.dmel = b"x"
        else:
            chunk.Clear()

    return change


def with_raw_tokens(raw: bytes) -> Callable[[Any], None]:
    def change(sent: Any) -> None:
        sent.data[0].model_input[0].encoded_text.tokens = raw

    return change


def with_dtype(number: int) -> Callable[[Any], None]:
    def change(sent: Any) -> None:
        first_targets(sent).dtype = number

    return change


def with_shape(*shape: int) -> Callable[[Any], None]:
    def change(sent: Any) -> None:
        first_targets(sent).shape[:] = shape

    return change


def with_float_ids(sent: Any) -> None:
    first_targets(sent).dtype = wire.DTYPE_FLOAT32
    first_targets(sent).dense = np.array([2, 3], "<f4").tobytes()


def with_half_a_value(sent: Any) -> None:
    first_targets(sent).dense = b"123"


def with_text_config(sent: Any) -> None:
    sent.loss_fn, sent.loss_fn_config_v2["beta"].text = "dro", "much"


def with_loss(loss: str) -> Callable[[Any], None]:
    def change(sent: Any) -> None:
        sent.loss_fn = loss

    return change


def without_data(sent: Any) -> None:
    del sent.data[:]


def with_many_datums(sent: Any) -> None:
    sent.data.extend([sent.data[0]] * 1024)


HUGE = 2**63 - 1
MALFORMED: dict[str, tuple[Callable[[Any], None], list[str]]] = {
    "no datum": (without_data, ["data has 0", "1 to 1024"]),
    "too many datums": (with_many_datums, ["data has 1025", "1 to 1024", "split"]),
    "image": (with_chunk("image"), ["data[0].model_input[0] is image", "encoded_text"]),
    "audio": (with_chunk("dmel"), ["data[0].model_input[0] is dmel", "encoded_text"]),
    "empty chunk": (with_chunk("none"), ["data[0].model_input[0] is empty", "encoded_text"]),
    "cut token": (with_raw_tokens(b"12345"), ["data[0].model_input[0]", "5 bytes", "int32"]),
    "no token": (with_raw_tokens(b""), ["data[0].model_input", "0 tokens", "1 to 8"]),
    "dtype 0": (with_dtype(0), ["data[0].target_tokens", "dtype number 0", "int64"]),
    "dtype 9": (with_dtype(9), ["data[0].target_tokens", "dtype number 9", "int64"]),
    "float ids": (with_float_ids, ["data[0].target_tokens", "float32", "int64"]),
    "half a value": (with_half_a_value, ["data[0].target_tokens", "3 bytes", "8-byte"]),
    "shape and data": (with_shape(3), ["data[0].target_tokens", "[3]", "2 values"]),
    "negative shape": (with_shape(-2, -1), ["data[0].target_tokens", "[-2, -1]", "at least 1"]),
    "zero shape": (with_shape(HUGE, 0), ["data[0].target_tokens", "at least 1"]),
    "three dimensions": (with_shape(2, 1, 1), ["data[0].target_tokens", "3 dimensions"]),
    "100 dimensions": (with_shape(*[1] * 100), ["data[0].target_tokens", "100 dimensions"]),
    "CSR of wrong rank": (
        with_csr([0, 1, 2], [0, 0], [1, 1], [2]),
        ["data[0].target_tokens", "[2]", "3 row offsets", "[N, K]"],
    ),
    "CSR of negative size": (with_csr([], [], [], [-1, 1]), ["data[0].target_tokens", "[-1, 1]"]),
    "CSR too wide": (
        with_csr([0, 0, 0], [], [], [2, 65]),
        ["data[0].target_tokens", "[2, 65]", "up to 64"],
    ),
    "CSR too tall": (
        with_csr([0, 0, 0], [], [], [HUGE, 2]),
        ["data[0].target_tokens", str(HUGE), "3 row offsets"],
    ),
    "CSR that falls": (
        with_csr([0, 2, 1], [0, 1], [1], [2, 2]),
        ["data[0].target_tokens", "row offsets", "0 to 1 values"],
    ),
    "CSR that wraps around": (
        with_csr([0, HUGE, -2, 5], [0] * 5, [1] * 5, [3, 2]),
        ["data[0].target_tokens", "row offsets", "0 to 5 values"],
    ),
    "CSR column": (
        with_csr([0, 1, 2], [0, 2], [1, 1], [2, 2]),
        ["data[0].target_tokens", "column", "0 to 1"],
    ),
    "CSR without columns": (
        with_csr([0, 1, 2], [0], [1, 1], [2, 2]),
        ["data[0].target_tokens", "column", "2 numbers"],
    ),
    "unknown loss": (with_loss("mse"), ["loss_fn 'mse'", "cross_entropy", "gspo"]),
    "long loss name": (with_loss("x" * 10**6), ["loss_fn 'xxx", "cross_entropy"]),
    "custom without a graph": (with_loss("custom"), ["custom", "no loss_id"]),
    "text config": (with_text_config, ["loss_fn_config['beta']", "'much'", "number"]),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_body_is_refused_with_field_value_and_limit(case: str) -> None:
    change, fragments = MALFORMED[case]
    sent = message(datum([1, 2], target_tokens=[2, 3]))
    change(sent)
    refused(sent.SerializeToString(), fragments)


def refused(body: bytes, fragments: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        decode_request(body, INFO)
    text = str(caught.value)
    assert all(fragment in text for fragment in fragments), text
    assert len(text) < 400


NAN, INF = float("nan"), float("inf")
REFUSED: dict[str, tuple[dict[str, Any], Any, dict[str, Any], list[str]]] = {
    "token too large": (
        {"tokens": [1, 100], "target_tokens": [1, 2]},
        "cross_entropy",
        {},
        ["data[1].model_input", "token 100", "position 1", "0 to 99"],
    ),
    "negative token": (
        {"tokens": [-1], "target_tokens": [1]},
        "cross_entropy",
        {},
        ["data[1].model_input", "token -1", "position 0", "0 to 99"],
    ),
    "target too large": (
        {"tokens": [1], "target_tokens": [2**40]},
        "cross_entropy",
        {},
        ["data[1].target_tokens", f"token {2**40}", "0 to 99"],
    ),
    "too long": (
        {"tokens": [1] * 9, "target_tokens": [1] * 9},
        "cross_entropy",
        {},
        ["data[1].model_input", "9 tokens", "1 to 8"],
    ),
    "no targets": (
        {"tokens": [1], "weights": [1.0]},
        "cross_entropy",
        {},
        ["data[1].loss_fn_inputs lacks target_tokens"],
    ),
    "short targets": (
        {"tokens": [1, 2], "target_tokens": [1]},
        "cross_entropy",
        {},
        ["data[1].target_tokens", "[1]", "2 input tokens"],
    ),
    "short weights": (
        {"tokens": [1, 2], "target_tokens": [1, 2], "weights": [1.0]},
        "cross_entropy",
        {},
        ["data[1].weights", "[1]", "[2]"],
    ),
    "flat weights of 2-D targets": (
        {"tokens": [1, 2], "target_tokens": [[1, 2], [3, 4]], "weights": [1.0, 1.0]},
        "cross_entropy",
        {},
        ["data[1].weights", "[2]", "[2, 2]"],
    ),
    "too many targets": (
        {"tokens": [1], "target_tokens": [[1] * 65]},
        "cross_entropy",
        {},
        ["data[1].target_tokens", "65 targets", "limit 64"],
    ),
    "NaN weight": (
        {"tokens": [1, 2], "target_tokens": [1, 2], "weights": [1.0, NAN]},
        "cross_entropy",
        {},
        ["data[1].weights", "nan", "position 1", "finite"],
    ),
    "infinite advantage": (
        {"tokens": [1, 2], **POLICY, "advantages": [0.0, -INF]},
        "ppo",
        {},
        ["data[1].advantages", "-inf", "position 1", "finite"],
    ),
    "short logprobs": (
        {"tokens": [1, 2], **POLICY, "logprobs": [0.0]},
        "cispo",
        {},
        ["data[1].logprobs", "[1]", "[2]"],
    ),
    "short clip threshold": (
        {"tokens": [1, 2], **POLICY, "clip_low_threshold": [0.0]},
        "ppo",
        {},
        ["data[1].clip_low_threshold", "[1]", "[2]"],
    ),
    "missing advantages": (
        {"tokens": [1], "target_tokens": [1], "logprobs": [0.0]},
        "importance_sampling",
        {},
        ["data[1].loss_fn_inputs lacks advantages", "importance_sampling"],
    ),
    "missing mask": (
        {"tokens": [1, 2], **POLICY},
        "gspo",
        {},
        ["data[1].loss_fn_inputs lacks sequence_ratio_mask", "gspo"],
    ),
    "2-D policy targets": (
        {"tokens": [1, 2], **POLICY, "target_tokens": [[1, 2], [3, 4]]},
        "ppo",
        {},
        ["data[1].target_tokens", "[2, 2]", "ppo takes [2]"],
    ),
    "unknown config key": (
        {"tokens": [1, 2], **POLICY},
        "ppo",
        {"epsilon": 0.2},
        ["'epsilon'", "ppo", "clip_low_threshold, clip_high_threshold"],
    ),
    "config where there is none": (
        {"tokens": [1], "target_tokens": [1]},
        "cross_entropy",
        {"beta": 0.2},
        ["'beta'", "cross_entropy", "no config"],
    ),
    "NaN config": (
        {"tokens": [1, 2], **POLICY},
        "dro",
        {"beta": NAN},
        ["loss_fn_config['beta']", "nan", "finite"],
    ),
    "config beyond float32": (
        {"tokens": [1, 2], **POLICY},
        "dro",
        {"beta": 1e300},
        ["loss_fn_config['beta']", "1e+300", "float32"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_values_are_refused_with_field_value_and_limit(case: str) -> None:
    inputs, loss, config, fragments = REFUSED[case]
    good = datum([1, 2], **POLICY, sequence_ratio_mask=[1.0, 1.0])
    sent = message(good, datum(**inputs), loss=loss, config=config)
    refused(sent.SerializeToString(), fragments)


def test_targets_described_by_few_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneserve_engine.worker.codecs.training.MAX_TARGET_CELLS", 300)
    sent = message(datum([1, 2], target_tokens=[2, 3]))
    with_csr([0, 0, 0], [], [], [2, 64])(sent)
    sent.data.extend([sent.data[0]] * 3)
    refused(sent.SerializeToString(), ["data[:3]", "384 targets", "300", "split"])


def test_targets_are_counted_with_their_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneserve_engine.worker.codecs.training.MAX_TARGET_CELLS", 300)
    pair = datum([1, 2], target_tokens=np.array([[2, 3], [4, 5]]))
    sent = message(pair, pair, pair).SerializeToString()
    refused(sent, ["data[:3]", "384 targets", "300", "64 are counted for each position", "split"])
    static_shapes = StaticShapes(INFO.context_length)
    assert len(decode(pair, pair).data) * 2 * static_shapes.target_bucket(2) <= 300
    assert len(decode(*[datum([1, 2], target_tokens=[2, 3])] * 150).data) == 150


def test_a_sparse_tensor_is_not_made_dense_before_its_size_is_known() -> None:
    sent = message(datum([1, 2], target_tokens=[2, 3]))
    rows = 2_000_000  # x 64 columns x 8 bytes would be a gigabyte
    with_csr([0] * (rows + 1), [], [], [rows, 64])(sent)
    tracemalloc.start()
    try:
        refused(sent.SerializeToString(), [f"[{rows}, 64]", str(MAX_TARGET_CELLS), "split"])
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_the_tokens_of_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneserve_engine.worker.codecs.training.MAX_TOKENS", 5)
    sent = message(*[datum([1, 2], target_tokens=[2, 3])] * 3)
    refused(sent.SerializeToString(), ["data[:3]", "6 tokens", "up to 5", "split"])


@pytest.mark.parametrize(
    "body",
    [
        wire.ForwardBackwardRequest(data=[wire.Datum()]).SerializeToString() * 2**24,
        wire.ForwardBackwardRequest(
            data=[wire.Datum(model_input=[wire.Chunk()]) for _ in range(8)] * 40_000
        ).SerializeToString(),
        b"\x30\x01" * 2**24,
    ],
    ids=["datums", "chunks", "numbers"],
)
def test_millions_of_tiny_parts_are_refused_before_decoding(body: bytes) -> None:
    """Decoding 32 MiB of them would take gigabytes."""
    started_s = time.process_time()
    refused(body, [str(MAX_FIELDS), "split"])
    assert time.process_time() - started_s < 1


def test_a_tensor_of_millions_of_dimensions_is_refused_early_too() -> None:
    sent = message(datum([1, 2], target_tokens=[2, 3]))
    with_shape(*[1] * 2**22)(sent)
    refused(sent.SerializeToString(), ["[1, 1, 1]", f"{2**22} dimensions"])


def test_a_malformed_message_is_refused() -> None:
    body = message(datum([1, 2], target_tokens=[2, 3])).SerializeToString()
    for broken in (body[:-1], b"\xff" * 20, b"{}"):
        refused(broken, ["ForwardBackwardRequest"])
    refused(b"", ["loss_fn ''"])


BODY = message(
    datum([1, 2, 3], target_tokens=torch.tensor([[0, 0, 0, 0, 5]] * 3)),
    datum([1, 2], target_tokens=[2, 3], weights=[1.0, 0.5]),
    loss="cross_entropy",
).SerializeToString()


@given(
    st.lists(st.tuples(st.integers(0, len(BODY) - 1), st.integers(0, 255)), min_size=1, max_size=6),
    st.integers(0, len(BODY)),
)
@settings(deadline=None, max_examples=1000)
def test_a_mutated_body_is_decoded_or_refused(edits: list[tuple[int, int]], keep: int) -> None:
    body = bytearray(BODY)
    for at, value in edits:
        body[at] = value
    for candidate in (bytes(body), bytes(body[:keep])):
        try:
            decoded = decode_request(candidate, INFO)
        except UserError:
            continue
        for each in decoded.data:
            assert each.tokens.min() >= 0 and each.tokens.max() < INFO.vocab_size
            assert each.targets.min() >= 0 and each.targets.max() < INFO.vocab_size
            assert np.isfinite(each.weights).all()
            assert len(each.tokens) == len(each.targets) == len(each.weights)


sizes = st.one_of(st.integers(-3, 70), st.sampled_from([HUGE, -HUGE - 1, 2**62, 2**32]))


@given(
    crow=st.lists(sizes, max_size=5),
    columns=st.lists(sizes, max_size=5),
    values=st.lists(sizes, max_size=5),
    shape=st.lists(sizes, max_size=4),
    sparse=st.booleans(),
    dtype=st.integers(0, 5),
)
@settings(deadline=None, max_examples=500)
def test_a_hostile_tensor_is_decoded_or_refused(
    crow: list[int],
    columns: list[int],
    values: list[int],
    shape: list[int],
    sparse: bool,
    dtype: int,
) -> None:
    sent = message(datum([1, 2], target_tokens=[2, 3]))
    tensor = first_targets(sent)
    if sparse:
        with_csr(crow, columns, values, shape)(sent)
    else:
        tensor.dense = np.array(values, "<i8").tobytes()
        tensor.shape[:] = shape
    tensor.dtype = dtype
    try:
        decoded = decode_request(sent.SerializeToString(), INFO)
    except UserError:
        return
    assert decoded.data[0].targets.shape[0] == 2


# --- answers to the SDK --------------------------------------------------------------------------


def test_outputs_read_back_in_the_shape_of_their_targets() -> None:
    rng = np.random.default_rng(0)
    shapes = [(3,), (2,), (2, 4), (5, 4), (1, 3), (4,)]
    sent = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    output = deserialize_forward_backward_output(encode_output(sent, 1.25))
    assert output.metrics == {"loss:sum": 1.25}
    assert output.loss_fn_output_type == "ArrayRecord"
    assert len(output.loss_fn_outputs) == len(sent)
    for read, want in zip(output.loss_fn_outputs, sent, strict=True):
        assert read.keys() == {"logprobs"}
        assert read["logprobs"].dtype == "float32"
        assert read["logprobs"].shape == list(want.shape)
        np.testing.assert_array_equal(read["logprobs"].to_numpy(), want, strict=True)


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from([None, 1, 2])).flatmap(
            lambda at: arrays.arrays(
                np.float32,
                (at[0],) if at[1] is None else at,
                elements=st.floats(width=32, allow_nan=False),
            )
        ),
        min_size=1,
        max_size=8,
    ),
    st.floats(),
)
@settings(deadline=None, max_examples=50)
def test_any_outputs_read_back_bit_for_bit(sent: list[Any], loss: float) -> None:
    output = deserialize_forward_backward_output(encode_output(sent, loss))
    np.testing.assert_array_equal(output.metrics["loss:sum"], loss)
    got = [read["logprobs"].to_numpy() for read in output.loss_fn_outputs]
    for read, want in zip(got, sent, strict=True):
        assert read.shape == want.shape
        assert read.tobytes() == want.tobytes()


def test_columns_of_a_larger_array_are_encoded_as_their_own_values() -> None:
    wide = np.arange(12, dtype=np.float32).reshape(4, 3)
    output = deserialize_forward_backward_output(encode_output([wide[:, 1], wide[:2, 2]], 0.0))
    assert [list(read["logprobs"].to_numpy()) for read in output.loss_fn_outputs] == [
        [1, 4, 7, 10],
        [2, 5],
    ]


def test_every_metric_name_has_exactly_one_colon() -> None:
    metrics = wire.ForwardBackwardOutput.FromString(encode_output([np.zeros(1, "f4")], 0.0)).metrics
    assert all(name.count(":") == 1 for name in metrics)


def test_an_output_has_the_same_bytes_in_every_process() -> None:
    """Protobuf may write a map in an order that differs by process, and replay compares bytes."""
    names = [f"metric{i}:sum" for i in range(20)]
    output = encode_output([np.zeros(1, "f4")], 0.0, dict.fromkeys(names, 1.0))
    at = [output.index(name.encode()) for name in sorted(names)]
    assert at == sorted(at)
