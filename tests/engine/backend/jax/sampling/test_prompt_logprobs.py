"""The questions about a prompt go to the rows of a chunk, and the answers come from there."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tuneserve_engine.backend.base import SamplingRequest
from tuneserve_engine.backend.jax.sampling.programs import (
    PromptScoreRequest,
    PromptScores,
    TopTokens,
)
from tuneserve_engine.backend.jax.sampling.prompt_logprobs import PromptLogprobs

BLOCK, CHUNK, IDS, MOST = 2, 3, 4, 5
PLAIN = SamplingRequest(
    np.array([5, 6, 7, 8], np.int32), None, seed=2**32 + 9, num_samples=1, max_tokens=0
)
TARGETS = np.array([[1, 2], [3, -1], [4, 5]], np.int32)


@pytest.mark.parametrize(
    ("change", "asks"),
    [
        ({}, False),
        ({"topk_sample": 3}, False),
        ({"prompt_logprobs": True}, True),
        ({"topk_prompt": 1}, True),
        ({"alt_tokens": 1}, True),
        ({"targets": TARGETS}, True),
    ],
)
def test_a_request_asks_about_its_prompt_or_not(change: dict[str, Any], asks: bool) -> None:
    assert PromptLogprobs.are_requested(replace(PLAIN, **change)) is asks


def test_each_row_asks_for_the_next_token_and_the_targets() -> None:
    """The last part has one position: the prompt has three positions to score."""
    request = replace(PLAIN, prompt_logprobs=True, targets=TARGETS, topk_prompt=2, temperature=0.5)
    asked = PromptScoreRequest(
        ids=np.full((CHUNK, BLOCK, IDS), -1, np.int32),
        top=np.zeros(CHUNK, bool),
        alternatives=np.zeros(CHUNK, bool),
        seed=np.zeros((CHUNK, 2), np.uint32),
        positions=np.zeros((CHUNK, BLOCK), np.int32),
        temperature=np.zeros(CHUNK, np.float32),
    )
    scores = PromptLogprobs(request, BLOCK)
    scores.request_scores(asked, 2, 0)
    scores.request_scores(asked, 0, 1)
    assert asked.ids.tolist() == [
        [[8, 4, 5, -1], [-1] * 4],
        [[-1] * 4] * 2,
        [[6, 1, 2, -1], [7, 3, -1, -1]],
    ]
    assert asked.top.tolist() == [True, False, True]
    assert not asked.alternatives.any()
    assert asked.seed.tolist() == [[1, 9], [0, 0], [1, 9]]
    assert asked.positions.tolist() == [[3, 4], [0, 0], [1, 2]]
    assert asked.temperature.tolist() == [0.5, 0.0, 0.5]


def answers(first: int) -> PromptScores:
    """Consecutive numbers, from ``first`` on in each array."""
    ids = np.arange(CHUNK * BLOCK * MOST, dtype=np.int32).reshape(CHUNK, BLOCK, MOST) + first
    logprobs = np.arange(CHUNK * BLOCK * IDS, dtype=np.float32).reshape(CHUNK, BLOCK, IDS) + first
    top = TopTokens(ids, ids.astype(np.float32))
    return PromptScores(logprobs, top, TopTokens(ids + 1000, top.logprobs + 1000))


def test_the_result_has_the_answers_in_the_order_of_the_prompt() -> None:
    """Row 2 of a chunk starts with number 2 * 2 * 4 = 16 of the logprobs and 20 of the ids."""
    request = replace(PLAIN, prompt_logprobs=True, targets=TARGETS, topk_prompt=2, alt_tokens=1)
    scores = PromptLogprobs(request, BLOCK)
    scores.add_scores(1, 0, answers(100))
    scores.add_scores(0, 2, answers(0))
    result = scores.result()
    assert result.sequences == ()
    assert result.prompt_logprobs is not None and result.target_logprobs is not None
    assert np.isnan(result.prompt_logprobs[0])
    assert result.prompt_logprobs[1:].tolist() == [16, 20, 100]
    assert result.target_logprobs.tolist() == [[17, 18], [21, 22], [101, 102]]
    assert result.topk_prompt is not None and result.alt_tokens is not None
    assert result.topk_prompt.token_ids.tolist() == [[20, 21], [25, 26], [100, 101]]
    assert result.alt_tokens.logprobs.tolist() == [[1020], [1025], [1100]]


def test_an_answer_that_was_not_requested_is_none() -> None:
    scores = PromptLogprobs(replace(PLAIN, topk_prompt=1), BLOCK)
    scores.add_scores(0, 0, answers(0))
    result = scores.result()
    assert result.prompt_logprobs is result.target_logprobs is result.alt_tokens is None
    assert result.topk_prompt is not None
