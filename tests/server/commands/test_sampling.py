"""The command of an ``asample`` body, and the requests that are refused before they are queued."""

from typing import Any

import pytest

from tests.support.fake_backend import FAKE_INFO
from tuneserve_client.wire.types import SampleRequest
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import SampleCommand, SparseTargets
from tuneserve_server.commands.sampling import (
    checked_prompt,
    checked_stops,
    sample_command,
    sequence_ids,
)


def command(tokens: list[int] | None = None, info: Any = FAKE_INFO, **fields: Any) -> SampleCommand:
    """The command of a prompt of three tokens, in a model of 64 tokens and a context of 64."""
    params = {"seed": 7} | fields.pop("params", {})
    prompt = fields.pop("prompt", {"chunks": [{"tokens": tokens or [1, 2, 3]}]})
    body = {"sampling_session_id": "s", "seq_id": 1, "prompt": prompt, "sampling_params": params}
    return sample_command(SampleRequest.model_validate(body | fields), "f-1", info)


def test_a_plain_request_has_the_defaults() -> None:
    assert command() == SampleCommand([1, 2, 3], 7, "f-1")


def test_every_option_reaches_the_command() -> None:
    found = command(
        params={"max_tokens": 5, "temperature": 0.5, "top_k": 9, "top_p": 0.25, "stop": "END"},
        num_samples=4,
        prompt_logprobs=True,
        prompt_logprobs_last_n=2,
        topk_prompt_logprobs=6,
        topk_sample_logprobs=8,
        prompt_alt_tokens_k=1,
    )
    assert found == SampleCommand(
        **{"prompt": [1, 2, 3], "seed": 7, "file_id": "f-1", "num_samples": 4, "max_tokens": 5},
        **{"temperature": 0.5, "top_k": 9, "top_p": 0.25, "stop_strings": ["END"]},
        **{"prompt_logprobs": True, "prompt_logprobs_last_n": 2, "topk_prompt_logprobs": 6},
        **{"topk_sample_logprobs": 8, "prompt_alt_tokens_k": 1},
    )


def test_a_request_without_a_seed_gets_a_new_one_each_time() -> None:
    assert len({command(params={"seed": None}).seed for _ in range(5)}) == 5


def test_a_prompt_may_be_cut_into_chunks_anywhere() -> None:
    chunks = [{"tokens": [1]}, {"tokens": []}, {"tokens": [2, 3]}]
    assert command(prompt={"chunks": chunks}).prompt == [1, 2, 3]


def test_targets_have_a_shape_and_may_be_sparse() -> None:
    targets = {"dtype": "int64", "data": [4, -1, 5, 6], "shape": [2, 2]}
    found = command(target_prompt_logprobs=targets)
    assert (found.target_prompt_logprobs, found.target_shape) == ([4, -1, 5, 6], [2, 2])
    assert found.target_sparse is None
    indices = {"sparse_crow_indices": [0, 2, 4], "sparse_col_indices": [0, 1, 0, 1]}
    sparse = command(target_prompt_logprobs=targets | indices)
    assert sparse.target_sparse == SparseTargets([0, 2, 4], [0, 1, 0, 1])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_samples": 0}, r"num_samples is 0; it must be 1 to 256"),
        ({"num_samples": 257}, r"num_samples is 257; it must be 1 to 256"),
        ({"params": {"max_tokens": 0}}, r"sampling_params.max_tokens is 0; it must be 1 to"),
        ({"params": {"top_k": -2}}, r"sampling_params.top_k is -2; it must be 1 to"),
        ({"params": {"temperature": -1.0}}, r"sampling_params.temperature is -1.0; it must be"),
        ({"params": {"top_p": 0.0}}, r"sampling_params.top_p is 0.0; it must be above 0"),
        ({"topk_sample_logprobs": 65}, r"topk_sample_logprobs is 65; it must be 0 to 64"),
        ({"params": {"seed": -1}}, r"seed is -1; it must be 0 to"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, r"prompt.chunks\[0\] is not text"),
        ({"prompt": {"chunks": [{}]}}, r"prompt.chunks\[0\].tokens is missing"),
        ({"prompt_logprobs_last_n": 1}, r"asks for part of prompt_logprobs, which is not set"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, r"last_n is 3; .* 1 to 2"),
        (
            {"target_prompt_logprobs": {"dtype": "int64", "data": [1], "shape": [1, 1]}},
            r"must have the shape \[2, K\] for a prompt of 3 tokens",
        ),
    ],
)
def test_a_value_outside_its_limits_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        command(**fields)


def test_a_prompt_that_is_only_scored_may_be_one_longer_than_the_context() -> None:
    scored = {"prompt_logprobs": True, "params": {"max_tokens": 0}}
    assert len(command([1] * 65, **scored).prompt) == 65
    with pytest.raises(UserError, match=r"66 tokens; .* one more token is scored; send up to 65"):
        command([1] * 66, **scored)
    assert len(command([1] * 63).prompt) == 63
    with pytest.raises(UserError, match=r"64 tokens; .* left to sample; send up to 63"):
        command([1] * 64)


@pytest.mark.parametrize(("token", "shown"), [(64, "64"), (-1, "-1"), (10**30, "a number of 100")])
def test_a_token_outside_the_vocabulary_is_named(token: int, shown: str) -> None:
    with pytest.raises(UserError, match=f"has token {shown}.*token ids are 0 to 63"):
        checked_prompt([5, token], FAKE_INFO)


def test_a_base_model_that_is_not_known_yet_has_no_limit_of_its_own() -> None:
    assert checked_prompt([2**31 - 1] * 99, None) == [2**31 - 1] * 99
    with pytest.raises(UserError, match="the prompt has no tokens"):
        checked_prompt([], None)


@pytest.mark.parametrize(
    ("stop", "tokens", "strings"),
    [
        (None, None, None),
        ("END", None, ["END"]),
        (["a", "b"], None, ["a", "b"]),
        ([3, 4], [3, 4], None),
        ([], [], None),
    ],
)
def test_stops_are_tokens_or_strings(stop: Any, tokens: Any, strings: Any) -> None:
    assert checked_stops("stop", stop) == (tokens, strings)


@pytest.mark.parametrize(
    ("stop", "told"),
    [
        (["x"] * 257, "stop has 257 entries; the limit is 256"),
        (["x", ""], "an empty string"),
        (["x" * 257], "more than 256 characters"),
        ([-1], "numbers outside 0 to"),
        ([2**31], "numbers outside 0 to"),
    ],
)
def test_stops_beyond_the_limits_are_refused(stop: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        checked_stops("stop", stop)


@pytest.mark.parametrize(("asked", "count"), [(-5, 1), (0, 1), (3, 3), (10**9, 256)])
def test_a_refused_number_of_samples_still_gets_sequence_ids(asked: int, count: int) -> None:
    ids = sequence_ids("s", 4, asked)
    assert len(set(ids)) == count
    assert ids[0] == "s:4:0"
