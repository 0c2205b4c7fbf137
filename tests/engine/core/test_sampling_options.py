"""The limits of a sample's options, at both ends of each."""

from typing import Any

import pytest

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import SampleCommand
from tuneserve_engine.core.sampling_options import bounded, check_sampling_options

NAN, INF = float("nan"), float("inf")
MAX_INT32 = 2**31 - 1
SCORES = {"prompt_logprobs": True}


def command(**fields: Any) -> SampleCommand:
    return SampleCommand(**{"prompt": [1, 2, 3, 4], "seed": 1} | fields)


def test_both_limits_belong_to_the_range() -> None:
    assert [bounded("n", value, 1, 3) for value in (1, 3)] == [1, 3]
    for value in (0, 4):
        with pytest.raises(UserError, match=f"n is {value}; it must be 1 to 3"):
            bounded("n", value, 1, 3)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_samples": 1},
        {"num_samples": 256},
        {"topk_prompt_logprobs": 64, "topk_sample_logprobs": 64, "prompt_alt_tokens_k": 64},
        {"max_tokens": 1},
        {"max_tokens": MAX_INT32},
        {"max_tokens": 0, **SCORES},
        {"temperature": 0.0},
        {"temperature": 1e30},
        {"top_p": 1e-30},
        {"top_p": 1.0},
        {"top_k": -1},
        {"top_k": 1},
        {"top_k": MAX_INT32},
        {"prompt_logprobs_last_n": 1},
        {"prompt_logprobs_last_n": 3},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": {0: 100.0, 1: -100.0} | dict.fromkeys(range(2, 300), 0.5)},
    ],
)
def test_options_at_their_limits_are_accepted(fields: dict[str, Any]) -> None:
    check_sampling_options(command(**fields))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_samples": 0}, "num_samples is 0; it must be 1 to 256"),
        ({"num_samples": 257}, "num_samples is 257; it must be 1 to 256"),
        ({"topk_prompt_logprobs": 65}, "topk_prompt_logprobs is 65; it must be 0 to 64"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs is -1; it must be 0 to 64"),
        ({"prompt_alt_tokens_k": 65}, "prompt_alt_tokens_k is 65; it must be 0 to 64"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be 1 to 2147483647"),
        ({"max_tokens": -1, **SCORES}, "max_tokens is -1; it must be 1 to 2147483647"),
        ({"max_tokens": 10**30}, "max_tokens is a number of 100 bits; it must be 1 to"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be finite and at least 0"),
        ({"temperature": NAN}, "temperature is nan; it must be finite"),
        ({"temperature": INF}, "temperature is inf; it must be finite"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": NAN}, "top_p is nan; it must be above 0"),
        ({"top_p": 1.1}, "top_p is 1.1; it must be above 0"),
        ({"top_k": 0}, "top_k is 0; it must be 1 to 2147483647, or -1 for all tokens"),
        ({"top_k": -2}, "top_k is -2; it must be 1 to"),
        ({"top_k": 2**31}, "top_k is 2147483648; it must be 1 to"),
        ({"prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n is 0; it must be 1 to 3"),
        ({"prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n is 4; it must be 1 to 3"),
    ],
)
def test_options_outside_their_limits_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=f"^{told}"):
        check_sampling_options(command(**fields))


@pytest.mark.parametrize("field", ["num_samples", "max_tokens", "temperature", "top_k", "top_p"])
def test_a_client_reads_its_own_name_of_an_option(field: str) -> None:
    with pytest.raises(UserError, match=r"^sampling_params.x is -7"):
        check_sampling_options(command(**{field: -7}), {field: "sampling_params.x"})
