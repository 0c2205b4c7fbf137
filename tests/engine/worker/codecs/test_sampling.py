"""Sample commands become backend requests, and results become what the official SDK reads."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.lib.public_interfaces.sampling_client import (
    _check_prompt_alt_tokens_returned,
    _check_prompt_logprobs_last_n_honored,
)
from tinker.proto.response_conv import deserialize_sample_response

from tuneserve_engine.backend.base import SampledSequence, SampleResult, TopK
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import SampleCommand, SparseTargets, decode, encode
from tuneserve_engine.worker.codecs.sampling import encode_response, to_request

INFO = BaseModelInfo(
    name="tiny",
    architecture="qwen3",
    vocab_size=100,
    context_length=10,
    max_rank=8,
    tokenizer_id="tiny",
    eos_token_ids=(90, 91),
)
PROMPT = [5, 6, 7, 8]
NAN = float("nan")
HUGE = 2**63 - 1


def command(**fields: Any) -> SampleCommand:
    return SampleCommand(**{"prompt": PROMPT, "seed": 1, **fields})


def sequence(*tokens: int, stop: Any = "stop", topk: TopK | None = None) -> SampledSequence:
    ids = np.array(tokens, np.int32)
    return SampledSequence(ids, -ids.astype(np.float32) / 8, stop, topk)


ONE = (sequence(1),)


def read(asked: SampleCommand, result: SampleResult) -> types.SampleResponse:
    """The SDK's reading of our answer."""
    return deserialize_sample_response(encode_response(asked, result))


# --- requests ------------------------------------------------------------------------------------


def test_a_bare_prompt_gets_the_documented_defaults() -> None:
    request = to_request(command(), INFO)
    np.testing.assert_array_equal(request.prompt, np.array(PROMPT, np.int32), strict=True)
    assert (request.num_samples, request.temperature, request.top_k, request.top_p) == (1, 1, -1, 1)
    assert request.max_tokens == 6  # the rest of the context
    assert request.stop_tokens == {90, 91}  # without stop: EOS
    assert request.snapshot_id is None
    assert not request.prompt_logprobs
    assert (request.topk_prompt, request.topk_sample, request.alt_tokens) == (0, 0, 0)
    assert request.targets is None


def test_options_are_passed_on() -> None:
    asked = command(
        file_id="f",
        num_samples=3,
        max_tokens=2,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        prompt_alt_tokens_k=4,
    )
    request = to_request(decode(encode(asked), SampleCommand), INFO)
    assert (request.snapshot_id, request.seed) == ("f", 1)
    assert (request.num_samples, request.max_tokens) == (3, 2)
    assert (request.temperature, request.top_k, request.top_p) == (0.5, 4, 0.9)
    assert request.prompt_logprobs
    assert (request.topk_prompt, request.topk_sample, request.alt_tokens) == (2, 3, 4)


ASKING: dict[str, dict[str, Any]] = {
    "logprobs": {"prompt_logprobs": True},
    "top-k": {"topk_prompt_logprobs": 2},
    "alternatives": {"prompt_alt_tokens_k": 1},
}


@pytest.mark.parametrize("asked", ASKING)
@pytest.mark.parametrize(("length", "drawn"), [(9, 1), (10, 0), (11, 0)])
def test_a_prompt_is_scored_if_the_trainer_would_accept_it(
    asked: str, length: int, drawn: int
) -> None:
    """Eleven tokens are ten inputs and targets. Clients that want no sample ask for one token."""
    asking = ASKING[asked]
    assert (
        to_request(command(prompt=[1] * length, max_tokens=1, **asking), INFO).max_tokens == drawn
    )
    assert to_request(command(prompt=[1] * length, max_tokens=0, **asking), INFO).max_tokens == 0


def test_max_tokens_beyond_the_context_are_cut_to_it() -> None:
    assert to_request(command(max_tokens=7), INFO).max_tokens == 6
    assert to_request(command(prompt=[1] * 9, max_tokens=7), INFO).max_tokens == 1


@pytest.mark.parametrize(
    ("stop", "tokens", "strings"),
    [
        ({}, {90, 91}, ()),
        ({"stop_tokens": []}, set(), ()),
        ({"stop_strings": []}, set(), ()),
        ({"stop_tokens": [3, 4]}, {3, 4, 90, 91}, ()),
        ({"stop_strings": ["a", "b"]}, {90, 91}, ("a", "b")),
    ],
)
def test_eos_ends_a_sample_unless_stop_is_an_empty_list(
    stop: dict[str, Any], tokens: set[int], strings: tuple[str, ...]
) -> None:
    request = to_request(command(**stop), INFO)
    assert request.stop_tokens == tokens
    assert request.stop_strings == strings


def test_dense_targets_keep_their_layout() -> None:
    asked = command(target_prompt_logprobs=[1, -1, 2, 3, -1, -1], target_shape=[3, 2])
    np.testing.assert_array_equal(
        to_request(asked, INFO).targets, np.array([[1, -1], [2, 3], [-1, -1]], np.int32)
    )


def csr(dense: torch.Tensor) -> dict[str, Any]:
    """The fields of a command for the SDK's sparse layout, in which -1 is left out."""
    data = types.TensorData.from_torch_sparse(dense, pad_value=-1)
    assert data.sparse_crow_indices is not None and data.sparse_col_indices is not None
    return {
        "target_prompt_logprobs": data.data,
        "target_shape": data.shape,
        "target_sparse": SparseTargets(data.sparse_crow_indices, data.sparse_col_indices),
    }


SPARSE = torch.full((3, 6), -1)
SPARSE[0, 4], SPARSE[2, 1], SPARSE[2, 5] = 10, 20, 30


def test_sparse_targets_ask_for_the_listed_cells_only() -> None:
    request = to_request(command(**csr(SPARSE)), INFO)
    np.testing.assert_array_equal(request.targets, SPARSE.numpy())


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no prompt": ({"prompt": []}, ["prompt has no tokens", "at least one"]),
    "token": ({"prompt": [1, 100]}, ["prompt has token 100", "0 to 99"]),
    "negative token": ({"prompt": [-1]}, ["prompt has token -1", "0 to 99"]),
    "full context": ({"prompt": [1] * 10}, ["prompt has 10 tokens", "context of 10"]),
    "over the context": (
        {"prompt": [1] * 12, "prompt_logprobs": True, "max_tokens": 1},
        ["prompt has 12 tokens", "context of 10", "send at most 11"],
    ),
    "scores and text": (
        {"prompt": [1] * 10, "prompt_logprobs": True, "max_tokens": 2},
        ["prompt has 10 tokens", "at least one must be left", "send at most 9"],
    ),
    "an option": ({"prompt_logprobs_last_n": 4}, ["prompt_logprobs_last_n is 4", "1 to 3"]),
    "stop token": ({"stop_tokens": [100]}, ["stop token 100", "0 to 99"]),
    "target shape": (
        {"target_prompt_logprobs": [1] * 8, "target_shape": [4, 2]},
        ["target_prompt_logprobs", "[4, 2]", "4 tokens", "[3, K]"],
    ),
    "no target shape": ({"target_prompt_logprobs": [1] * 3}, ["target_prompt_logprobs", "[3, K]"]),
    "wide targets": (
        {"target_prompt_logprobs": [1], "target_shape": [3, 65]},
        ["[3, 65]", "up to 64"],
    ),
    "target id": (
        {"target_prompt_logprobs": [1, 2, 100], "target_shape": [3, 1]},
        ["target_prompt_logprobs", "-1 (skip) to 99"],
    ),
    "too few targets": (
        {"target_prompt_logprobs": [1, 2], "target_shape": [3, 1]},
        ["2 ids", "[3, 1]"],
    ),
    "falling offsets": (
        {
            "target_prompt_logprobs": [1],
            "target_shape": [3, 1],
            "target_sparse": SparseTargets([0, 2, 1, 1], [0]),
        },
        ["no CSR matrix", "[3, 1]", "1 ids"],
    ),
    "offsets that wrap around": (
        {
            "target_prompt_logprobs": [1] * 5,
            "target_shape": [3, 1],
            "target_sparse": SparseTargets([0, HUGE, -2, 5], [0] * 5),
        },
        ["no CSR matrix"],
    ),
    "column": (
        {
            "target_prompt_logprobs": [1],
            "target_shape": [3, 1],
            "target_sparse": SparseTargets([0, 1, 1, 1], [1]),
        },
        ["no CSR matrix"],
    ),
    "no offsets": (
        {
            "target_prompt_logprobs": [],
            "target_shape": [3, 1],
            "target_sparse": SparseTargets([], []),
        },
        ["no CSR matrix"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_values_are_refused_with_field_value_and_limit(case: str) -> None:
    fields, fragments = REFUSED[case]
    with pytest.raises(UserError) as caught:
        to_request(command(**fields), INFO)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


def test_a_request_with_too_large_an_answer_is_refused_before_sampling() -> None:
    """A token and a logprob are 8 bytes, and so is each top token: 32 x 32764 x 8 x 11."""
    info = replace(INFO, context_length=32_768)
    most = command(num_samples=32, topk_sample_logprobs=10)
    with pytest.raises(UserError, match="can come to 92263424 bytes; the limit is 83886080"):
        to_request(most, info)
    assert to_request(replace(most, max_tokens=20_000), info).max_tokens == 20_000


small = st.integers(-3, 102)


@given(
    st.builds(
        SampleCommand,
        prompt=st.lists(small, max_size=12),
        seed=st.integers(-(2**63), 2**64 - 1),
        num_samples=small,
        max_tokens=st.none() | small,
        temperature=st.floats(),
        top_k=small,
        top_p=st.floats(),
        stop_tokens=st.none() | st.lists(small, max_size=2),
        stop_strings=st.none() | st.lists(st.text(max_size=2), max_size=2),
        prompt_logprobs_last_n=st.none() | small,
        target_prompt_logprobs=st.none() | st.lists(small, max_size=4),
        target_shape=st.lists(small, max_size=3),
        target_sparse=st.none()
        | st.builds(
            SparseTargets,
            crow_indices=st.lists(small, max_size=4),
            col_indices=st.lists(small, max_size=4),
        ),
    )
)
@settings(deadline=None, max_examples=300)
def test_every_command_is_converted_or_refused(asked: SampleCommand) -> None:
    try:
        request = to_request(decode(encode(asked), SampleCommand), INFO)
    except UserError:
        return
    assert 1 <= request.max_tokens <= INFO.context_length - len(asked.prompt)


# --- answers -------------------------------------------------------------------------------------


def test_sequences_read_back_in_order_with_their_stop_reasons() -> None:
    result = SampleResult((sequence(9, 3, stop="length"), sequence(90)))
    answer = read(command(num_samples=2), result)
    assert [list(each.tokens) for each in answer.sequences] == [[9, 3], [90]]
    assert [each.stop_reason for each in answer.sequences] == ["length", "stop"]
    assert [each.logprobs for each in answer.sequences] == [[-1.125, -0.375], [-11.25]]
    assert [each.topk_logprobs for each in answer.sequences] == [None, None]
    assert answer.prompt_logprobs is None
    assert answer.topk_prompt_logprobs is None
    assert answer.target_prompt_logprobs is None
    assert answer.prompt_alt_tokens is None
    assert answer.prompt_cache_hit_tokens == 0


SCORES = np.array([NAN, -1, -2, -3], np.float32)
TOPK = TopK(
    np.array([[1, 2], [3, 4], [5, 6]], np.int32),
    np.array([[-1, -2], [-3, -4], [-5, -6]], np.float32),
)


def test_the_first_prompt_token_has_no_logprob() -> None:
    answer = read(command(prompt_logprobs=True), SampleResult(ONE, prompt_logprobs=SCORES))
    assert answer.prompt_logprobs == [None, -1, -2, -3]


def test_topk_has_a_row_per_prompt_token_and_the_first_is_empty() -> None:
    answer = read(command(topk_prompt_logprobs=2), SampleResult(ONE, topk_prompt=TOPK))
    assert answer.topk_prompt_logprobs == [
        None,
        [(1, -1), (2, -2)],
        [(3, -3), (4, -4)],
        [(5, -5), (6, -6)],
    ]


def test_last_n_leaves_earlier_positions_empty_in_logprobs_and_topk() -> None:
    asked = command(prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=1)
    scores = SCORES.copy()
    answer = read(asked, SampleResult(ONE, prompt_logprobs=scores, topk_prompt=TOPK))
    assert answer.prompt_logprobs == [None, None, None, -3]
    assert answer.topk_prompt_logprobs == [None, None, None, [(5, -5), (6, -6)]]
    _check_prompt_logprobs_last_n_honored(answer, 1)
    np.testing.assert_array_equal(scores, SCORES)  # the result itself is unchanged


def test_a_prompt_of_one_token_gets_empty_scores() -> None:
    asked = command(prompt=[5], prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=2)
    asked = replace(asked, target_prompt_logprobs=[], target_shape=[0, 3])
    request = to_request(asked, INFO)
    assert request.targets is not None and request.targets.shape == (0, 3)
    none = TopK(np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32))
    result = SampleResult(
        ONE,
        prompt_logprobs=np.array([NAN], np.float32),
        topk_prompt=none,
        target_logprobs=np.zeros((0, 3), np.float32),
        alt_tokens=none,
    )
    answer = read(asked, result)
    assert answer.prompt_logprobs == [None]
    assert answer.topk_prompt_logprobs == [None]
    assert answer.target_prompt_logprobs is not None
    assert answer.target_prompt_logprobs.shape == [0, 3]
    _check_prompt_alt_tokens_returned(answer, 2)


def test_topk_of_samples_has_a_row_per_token() -> None:
    both = (
        sequence(1, 2, 3, topk=TOPK),
        sequence(4, topk=TopK(TOPK.token_ids[:1], TOPK.logprobs[:1])),
    )
    answer = read(command(num_samples=2, topk_sample_logprobs=2), SampleResult(both))
    assert answer.sequences[0].topk_logprobs == [
        [(1, -1), (2, -2)],
        [(3, -3), (4, -4)],
        [(5, -5), (6, -6)],
    ]
    assert answer.sequences[1].topk_logprobs == [[(1, -1), (2, -2)]]


def test_dense_targets_are_answered_densely() -> None:
    asked = command(target_prompt_logprobs=[1, -1, 2, 3, -1, -1], target_shape=[3, 2])
    logprobs = np.array([[-1, 0], [-2, -3], [0, 0]], np.float32)
    tensor = read(asked, SampleResult(ONE, target_logprobs=logprobs)).target_prompt_logprobs
    assert tensor is not None and tensor.sparse_crow_indices is None
    assert (tensor.dtype, tensor.shape) == ("float32", [3, 2])
    np.testing.assert_array_equal(tensor.to_numpy(), logprobs)


def test_sparse_targets_are_answered_with_the_same_indices() -> None:
    asked = command(**csr(SPARSE))
    logprobs = -SPARSE.numpy().astype(np.float32) / 4 * (SPARSE.numpy() >= 0)
    tensor = read(asked, SampleResult(ONE, target_logprobs=logprobs)).target_prompt_logprobs
    assert tensor is not None and asked.target_sparse is not None
    assert tensor.sparse_crow_indices == asked.target_sparse.crow_indices
    assert tensor.sparse_col_indices == asked.target_sparse.col_indices
    assert tensor.data == [-2.5, -5, -7.5]
    np.testing.assert_array_equal(tensor.to_numpy(), logprobs)


def test_alternatives_are_two_tensors_of_one_shape() -> None:
    answer = read(command(prompt_alt_tokens_k=2), SampleResult(ONE, alt_tokens=TOPK))
    _check_prompt_alt_tokens_returned(answer, 2)
    assert answer.prompt_alt_tokens is not None
    tokens, logprobs = answer.prompt_alt_tokens.tokens, answer.prompt_alt_tokens.logprobs
    assert (tokens.dtype, tokens.shape, logprobs.dtype) == ("int64", [3, 2], "float32")
    np.testing.assert_array_equal(tokens.to_numpy(), TOPK.token_ids)
    np.testing.assert_array_equal(logprobs.to_numpy(), TOPK.logprobs)
