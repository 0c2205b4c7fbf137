"""A request's questions about its own prompt: logprobs, targets, the top k, alternatives.

Dimension key: N prompt tokens, K ids per position, n blocks of a chunk, S positions of a block.
"""

from typing import Any

import jax
import numpy as np

from tuneserve_engine.backend.base import FloatArray, IntArray, SampleResult, SamplingRequest, TopK
from tuneserve_engine.backend.jax.sampling.logits import seed_halves
from tuneserve_engine.backend.jax.sampling.programs import (
    PromptScoreRequest,
    PromptScores,
    TopTokens,
)


class PromptLogprobs:
    """Collects the answers for one request by block. Row i of a matrix is prompt position i + 1."""

    def __init__(self, request: SamplingRequest, block: int) -> None:
        self._request = request
        self._block = block
        self._ids = _asked_ids(request)
        self._scores: list[tuple[int, int, Any, TopTokens | None, TopTokens | None]] = []

    @staticmethod
    def are_requested(request: SamplingRequest) -> bool:
        """Return whether the request asks anything about its prompt."""
        return bool(
            request.prompt_logprobs
            or request.targets is not None
            or request.topk_prompt
            or request.alt_tokens
        )

    def request_scores(self, score_request: PromptScoreRequest, number: int, part: int) -> None:
        """Write the questions about a part of the prompt to row ``number`` of the chunk."""
        rows = self._rows(part)
        score_request.ids[number, : rows.stop - rows.start, : self._ids.shape[1]] = self._ids[rows]
        score_request.top[number] = self._request.topk_prompt > 0
        score_request.alternatives[number] = self._request.alt_tokens > 0
        score_request.seed[number] = seed_halves(self._request.seed)
        score_request.positions[number] = rows.start + 1 + np.arange(self._block)
        score_request.temperature[number] = self._request.temperature

    def add_scores(self, part: int, number: int, scores: PromptScores) -> None:
        """Keep the scores of row ``number`` of a chunk, to be fetched with the result.

        Scores that were not asked for are dropped, so that they can leave the device earlier.
        """
        asked = self._request
        self._scores.append(
            (
                part,
                number,
                scores.logprobs if self._ids.shape[1] else None,
                scores.top if asked.topk_prompt else None,
                scores.alternatives if asked.alt_tokens else None,
            )
        )

    def result(self) -> SampleResult:
        """Return all answers, in a result without sequences."""
        request, ids = self._request, self._ids
        logprobs = np.zeros(ids.shape, np.float32)
        top = _no_choices(len(ids), request.topk_prompt)
        alternatives = _no_choices(len(ids), request.alt_tokens)
        for part, number, scored, best, drawn in self._scores:
            rows = self._rows(part)
            if scored is not None:
                found = jax.device_get(scored)[number]
                logprobs[rows] = found[: rows.stop - rows.start, : ids.shape[1]]
            if best is not None:
                _fill(top, rows, best, number)
            if drawn is not None:
                _fill(alternatives, rows, drawn, number)
        targets = request.targets
        return SampleResult(
            sequences=(),
            prompt_logprobs=_shifted(logprobs[:, 0]) if request.prompt_logprobs else None,
            topk_prompt=top if request.topk_prompt else None,
            target_logprobs=None if targets is None else logprobs[:, -targets.shape[1] :],
            alt_tokens=alternatives if request.alt_tokens else None,
        )

    def _rows(self, part: int) -> slice:
        return slice(part * self._block, min((part + 1) * self._block, len(self._ids)))


def _asked_ids(request: SamplingRequest) -> IntArray:
    """Return [N-1, K] ids to score, -1 = none: the prompt's own tokens first, then the targets."""
    columns: list[IntArray] = [np.zeros((len(request.prompt) - 1, 0), np.int32)]
    if request.prompt_logprobs:
        columns.append(request.prompt[1:, None])
    if request.targets is not None:
        columns.append(request.targets)
    return np.concatenate(columns, axis=1).astype(np.int32)


def _no_choices(rows: int, k: int) -> TopK:
    return TopK(np.zeros((rows, k), np.int32), np.zeros((rows, k), np.float32))


def _fill(choices: TopK, rows: slice, answers: TopTokens, number: int) -> None:
    ids, logprobs = jax.device_get(answers)
    count, k = rows.stop - rows.start, choices.token_ids.shape[1]
    choices.token_ids[rows] = ids[number, :count, :k]
    choices.logprobs[rows] = logprobs[number, :count, :k]


def _shifted(logprobs: FloatArray) -> FloatArray:
    """Return one logprob per prompt token: NaN for the first, which nothing precedes."""
    return np.concatenate([np.full(1, np.nan, np.float32), logprobs])
