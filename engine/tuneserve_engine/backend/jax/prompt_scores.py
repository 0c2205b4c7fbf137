"""What a request asks about its own prompt: logprobs, targets, the top k, alternatives.

Dimension key: N prompt tokens, K ids per position, P positions per chunk, V vocabulary.
"""

from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Array, Float

from tuneserve_engine.backend.base import FloatArray, IntArray, SampleRequest, SampleResult, TopK
from tuneserve_engine.backend.jax.sample_programs import Adapter, Programs, top_rows
from tuneserve_engine.backend.jax.sampling_math import AnyArray, seed_halves
from tuneserve_engine.backend.jax.train import chunk_length
from tuneserve_engine.lattice import power_of_two_from


def score_prompt(
    programs: Programs,
    request: SampleRequest,
    hidden: Float[Array, "1 T D"],
    adapter: Adapter,
) -> SampleResult:
    """The scores that the request asks for, in a result without sequences.

    Row i of a matrix is about prompt position i + 1. Logits exist for one chunk at a time.
    """
    rows = len(request.prompt) - 1
    ids = _asked_ids(request)
    scores = np.zeros((rows, ids.shape[1]), np.float32)
    top = _no_choices(rows, request.topk_prompt)
    alternatives = _no_choices(rows, request.alt_tokens)
    if ids.shape[1] or request.topk_prompt or request.alt_tokens:
        for start, logits in _chunks(programs, rows, hidden, adapter):
            part = slice(start, min(start + logits.shape[0], rows))
            if ids.shape[1]:
                scores[part] = _logprobs(programs, logits, ids[part])
            if request.topk_prompt:
                ones = np.ones(logits.shape[0], np.float32)
                _fill(top, part, top_rows(programs, logits, ones, request.topk_prompt))
            if request.alt_tokens:
                _fill(alternatives, part, _alternatives(programs, request, logits, start))
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
    programs: Programs, rows: int, hidden: Float[Array, "1 T D"], adapter: Adapter
) -> Iterator[tuple[int, Float[Array, "P V"]]]:
    """Start and logits of each chunk that holds one of the first ``rows`` positions."""
    length = hidden.shape[1]
    positions = chunk_length(1, length, programs.vocab_size)
    for start in range(0, rows, positions):
        yield start, programs.head(hidden, np.int32(start), adapter, positions=positions)


def _logprobs(programs: Programs, logits: Float[Array, "P V"], ids: IntArray) -> FloatArray:
    rows, columns = ids.shape
    padded = np.full((logits.shape[0], power_of_two_from(columns)), -1, np.int32)
    padded[:rows, :columns] = ids
    scores: FloatArray = jax.device_get(programs.score(logits, padded))
    return scores[:rows, :columns]


def _alternatives(
    programs: Programs, request: SampleRequest, logits: Float[Array, "P V"], start: int
) -> tuple[IntArray, FloatArray]:
    positions = np.arange(logits.shape[0], dtype=np.int32) + np.int32(start + 1)
    temperature = np.full(logits.shape[0], request.temperature, np.float32)
    k = request.alt_tokens
    ids, logprobs = jax.device_get(
        programs.alternatives(
            logits, seed_halves(request.seed), positions, temperature, k=power_of_two_from(k)
        )
    )
    return ids[:, :k], logprobs[:, :k]


def _no_choices(rows: int, k: int) -> TopK:
    return TopK(np.zeros((rows, k), np.int32), np.zeros((rows, k), np.float32))


def _fill(choices: TopK, part: slice, values: tuple[AnyArray, AnyArray]) -> None:
    ids, logprobs = values
    choices.token_ids[part] = ids[: part.stop - part.start]
    choices.logprobs[part] = logprobs[: part.stop - part.start]


def _shifted(logprobs: FloatArray) -> FloatArray:
    """One per prompt token: nothing comes before the first."""
    return np.concatenate([np.full(1, np.nan, np.float32), logprobs])
