"""A sequence that is being sampled: its tokens, its end, and the parts reported to a client."""

from dataclasses import replace

import numpy as np
import pytest

from tuneserve_engine.backend.base import SamplingRequest
from tuneserve_engine.backend.jax.sampling.sequence import DecodedSequence
from tuneserve_engine.backend.jax.sampling.snapshots import NO_ADAPTER, Snapshot
from tuneserve_engine.backend.jax.sampling.stop_criteria import StopCriteria

REQUEST = SamplingRequest(np.array([5, 6, 7], np.int32), None, 0, num_samples=2, max_tokens=3)


@pytest.fixture
def sequence() -> DecodedSequence:
    """The second sample of a prompt of three tokens; it ends at token 9 or after three."""
    stops = StopCriteria(max_tokens=3, stop_tokens={9}, stop_strings=(), tokenizer=None)
    return DecodedSequence(REQUEST, 1, Snapshot("s", NO_ADAPTER, 8), stops)


def test_decoding_begins_with_the_last_token_of_the_prompt(sequence: DecodedSequence) -> None:
    assert sequence.context == 2
    sequence.request = replace(REQUEST, prompt=np.array([5], np.int32))
    assert sequence.context == 0


@pytest.mark.parametrize(
    ("tokens", "reason"), [((1, 2, 3), "length"), ((1, 9), "stop"), ((9,), "stop")]
)
def test_the_last_token_is_part_of_the_result(
    tokens: tuple[int, ...], reason: str, sequence: DecodedSequence
) -> None:
    ends = [sequence.push(token, -0.5 * token, None) for token in tokens]
    assert ends == [False] * (len(tokens) - 1) + [True]
    result = sequence.result()
    np.testing.assert_array_equal(result.tokens, tokens)
    np.testing.assert_array_equal(result.logprobs, [-0.5 * token for token in tokens])
    assert (result.stop_reason, result.topk) == (reason, None)
    assert (result.tokens.dtype, result.logprobs.dtype) == (np.int32, np.float32)


def test_an_unfinished_sequence_has_no_result(sequence: DecodedSequence) -> None:
    sequence.push(1, -1.0, None)
    with pytest.raises(AssertionError, match="left unfinished"):
        sequence.result()


def test_every_token_is_reported_once(sequence: DecodedSequence) -> None:
    assert sequence.take_new_tokens() is None
    sequence.push(1, -1.0, None)
    sequence.push(2, -2.0, None)
    first = sequence.take_new_tokens()
    assert first is not None and (first.sequence, first.start) == (1, 0)
    np.testing.assert_array_equal(first.tokens, [1, 2])
    assert sequence.take_new_tokens() is None
    sequence.push(3, -3.0, None)
    second = sequence.take_new_tokens()
    assert second is not None and second.start == 2
    np.testing.assert_array_equal(second.logprobs, [-3])


def test_the_likeliest_tokens_are_reported_with_the_drawn_ones(sequence: DecodedSequence) -> None:
    for token in (1, 2):
        ids = np.array([token, token + 10], np.int32)
        sequence.push(token, -1.0, (ids, np.array([-1, -2], np.float32)))
    sequence.reported = 1
    delta = sequence.take_new_tokens()
    assert delta is not None and delta.topk is not None
    np.testing.assert_array_equal(delta.topk.token_ids, [[2, 12]])
    sequence.push(9, -1.0, (np.array([9, 19], np.int32), np.array([0, -4], np.float32)))
    topk = sequence.result().topk
    assert topk is not None
    np.testing.assert_array_equal(topk.token_ids, [[1, 11], [2, 12], [9, 19]])
    np.testing.assert_array_equal(topk.logprobs, [[-1, -2], [-1, -2], [0, -4]])


def test_32_prefilled_tokens_are_the_work_of_one_drawn_token(sequence: DecodedSequence) -> None:
    sequence.prefilled_tokens = 48
    sequence.push(1, -1.0, None)
    assert sequence.work == 2.5
