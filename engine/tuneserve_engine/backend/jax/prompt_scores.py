"""What a request asks about its own prompt: logprobs, targets, the top k, alternatives.

Dimension key: N prompt tokens, K ids per position, P positions of a chunk, D hidden, T cache
capacity.
"""

from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Array, Float

from tuneserve_engine.backend.base import FloatArray, IntArray, SampleRequest, SampleResult, TopK
from tuneserve_engine.backend.jax.sample_adapters import Adapter
from tuneserve_engine.backend.jax.sample_programs import (
    CHOICES,
    Choices,
    Programs,
    Questions,
    Scores,
)
from tuneserve_engine.backend.jax.sampling_math import seed_halves


def score_prompt(
    programs: Programs,
    request: SampleRequest,
    hidden: Float[Array, "1 T D"],
    adapter: Adapter,
) -> SampleResult:
    """The scores that the request asks for, in a result without sequences.

    Row i of a matrix is about prompt position i + 1.
    """
    rows = len(request.prompt) - 1
    ids = _asked_ids(request)
    scores = np.zeros((rows, ids.shape[1]), np.float32)
    top = _no_choices(rows, request.topk_prompt)
    alternatives = _no_choices(rows, request.alt_tokens)
    if ids.shape[1] or request.topk_prompt or request.alt_tokens:
        # All chunks are under way before the first is waited for.
        for part, answers in list(_chunks(programs, request, ids, hidden, adapter)):
            if ids.shape[1]:
                width = part.stop - part.start
                scores[part] = jax.device_get(answers.logprobs)[:width, : ids.shape[1]]
            if request.topk_prompt:
                _fill(top, part, answers.top)
            if request.alt_tokens:
                _fill(alternatives, part, answers.alternatives)
    return SampleResult(
        sequences=(),
        prompt_logprobs=_shifted(scores[:, 0]) if request.prompt_logprobs else None,
        topk_prompt=top if request.topk_prompt else None,
        target_logprobs=None if request.targets is None else scores[:, -request.targets.shape[1] :],
        alt_tokens=alternatives if request.alt_tokens else None,
    )


def _asked_ids(request: SampleRequest) -> IntArray:
    """[N-1, K] ids to score, -1 = none: the prompt's own tokens first, then the targets."""
    columns: list[IntArray] = [np.zeros((len(request.prompt) - 1, 0), np.int32)]
    if request.prompt_logprobs:
        columns.append(request.prompt[1:, None])
    if request.targets is not None:
        columns.append(request.targets)
    return np.concatenate(columns, axis=1).astype(np.int32)


def _chunks(
    programs: Programs,
    request: SampleRequest,
    ids: IntArray,
    hidden: Float[Array, "1 T D"],
    adapter: Adapter,
) -> Iterator[tuple[slice, Scores]]:
    """The answers, still on the device, and their rows, chunk after chunk."""
    rows, columns = ids.shape
    capacity = hidden.shape[1]
    for start in range(0, rows, programs.positions):
        part = slice(start, min(start + programs.positions, rows))
        padded = np.full((programs.positions, 1 + CHOICES), -1, np.int32)
        padded[: part.stop - start, :columns] = ids[part]
        asked = Questions(
            ids=padded,
            top=np.bool_(request.topk_prompt),
            alternatives=np.bool_(request.alt_tokens),
            seed=seed_halves(request.seed),
            positions=np.arange(start + 1, start + 1 + programs.positions, dtype=np.int32),
            temperature=np.float32(request.temperature),
        )
        chunk = programs.part(capacity, hidden, np.int32(start))
        yield part, programs.score(adapter.rank_class, chunk, adapter, asked)


def _no_choices(rows: int, k: int) -> TopK:
    return TopK(np.zeros((rows, k), np.int32), np.zeros((rows, k), np.float32))


def _fill(choices: TopK, part: slice, answers: Choices) -> None:
    ids, logprobs = jax.device_get(answers)
    rows, k = part.stop - part.start, choices.token_ids.shape[1]
    choices.token_ids[part] = ids[:rows, :k]
    choices.logprobs[part] = logprobs[:rows, :k]


def _shifted(logprobs: FloatArray) -> FloatArray:
    """One per prompt token: nothing comes before the first."""
    return np.concatenate([np.full(1, np.nan, np.float32), logprobs])
