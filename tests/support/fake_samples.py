"""The samples of the fake backend: known numbers for a request, complete or partial."""

import numpy as np

from tuneserve_engine.backend.base import (
    FloatArray,
    SampledSequence,
    SampleResult,
    SamplingRequest,
    TokenDelta,
    TopK,
)


def sampled(request: SamplingRequest, logprobs: FloatArray) -> SampleResult:
    prompt, n = request.prompt, len(request.prompt)
    rows = logprobs[prompt[:-1]]  # [N-1, V]: after each token but the last
    scores = np.full(n, np.nan, np.float32)
    scores[1:] = rows[np.arange(n - 1), prompt[1:]]
    targets = request.targets
    at = np.arange(n - 1)[:, None]
    alternatives = None
    if request.alt_tokens:
        draws = (request.seed + at + np.arange(request.alt_tokens)) % logprobs.shape[1]
        alternatives = TopK(draws.astype(np.int32), rows[at, draws])
    return SampleResult(
        sequences=tuple(_sequence(request, s, logprobs) for s in range(request.num_samples)),
        prompt_logprobs=scores if request.prompt_logprobs else None,
        topk_prompt=_topk(rows, request.topk_prompt) if request.topk_prompt else None,
        target_logprobs=None
        if targets is None
        else np.where(targets < 0, np.float32(0), rows[at, np.maximum(targets, 0)]),
        alt_tokens=alternatives,
    )


def _sequence(request: SamplingRequest, index: int, logprobs: FloatArray) -> SampledSequence:
    first = 0 if request.temperature == 0 else request.seed + index
    previous = int(request.prompt[-1])
    tokens: list[int] = []
    befores: list[int] = []
    text = ""
    stopped = False
    while not stopped and len(tokens) < request.max_tokens:
        token = (first + len(request.prompt) + len(tokens)) % logprobs.shape[1]
        befores.append(previous)
        tokens.append(token)
        previous = token
        text += chr(97 + token % 26)
        stopped = token in request.stop_tokens or any(s in text for s in request.stop_strings if s)
    rows = logprobs[befores]
    return SampledSequence(
        tokens=np.array(tokens, np.int32),
        logprobs=rows[np.arange(len(tokens)), tokens],
        stop_reason="stop" if stopped else "length",
        topk=_topk(rows, request.topk_sample) if request.topk_sample else None,
    )


def _topk(rows: FloatArray, k: int) -> TopK:
    ids = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    return TopK(ids.astype(np.int32), np.take_along_axis(rows, ids, axis=1))


def drawn_between(result: SampleResult, start: int, end: int) -> list[TokenDelta]:
    """The tokens of each sequence in these positions."""
    part = slice(start, end)
    return [
        TokenDelta(
            index,
            start,
            each.tokens[part],
            each.logprobs[part],
            each.topk and TopK(each.topk.token_ids[part], each.topk.logprobs[part]),
        )
        for index, each in enumerate(result.sequences)
        if len(each.tokens) > start
    ]
