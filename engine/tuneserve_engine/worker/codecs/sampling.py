"""The codec of samples: commands to checked requests, results to ``SampleResponse`` bytes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.backend.base import (
    FloatArray,
    IntArray,
    SampledSequence,
    SampleResult,
    SamplingRequest,
    TokenDelta,
    TopK,
)
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import (
    MAX_BODY_BYTES,
    EncodedTokenDelta,
    SampleCommand,
    SparseTargets,
)
from tuneserve_engine.core.sampling_options import (
    MAX_TOP_K,
    check_biased_tokens,
    check_sampling_options,
)

_LEFT = "of which at least one must be left to sample"
_EMPTY = (0, -99999.0)
"""The token and the logprob of an empty cell in a top-k matrix."""


def to_request(command: SampleCommand, info: BaseModelInfo) -> SamplingRequest:
    """Return the command as a request, checked against the base model and with stops resolved.

    Raises ``UserError`` if a check fails.
    """
    prompt = _prompt(command, info)
    check_sampling_options(command)
    check_biased_tokens(command, info)
    most = _most_tokens(command, info)
    _check_size(command, most)
    return SamplingRequest(
        prompt=prompt,
        snapshot_id=command.file_id,
        seed=command.seed,
        num_samples=command.num_samples,
        max_tokens=most,
        temperature=command.temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        logit_bias=command.logit_bias,
        presence_penalty=command.presence_penalty,
        frequency_penalty=command.frequency_penalty,
        grammar=command.grammar,
        stop_tokens=_stop_tokens(command, info),
        stop_strings=tuple(command.stop_strings or ()),
        prompt_logprobs=command.prompt_logprobs,
        topk_prompt=command.topk_prompt_logprobs,
        topk_sample=command.topk_sample_logprobs,
        targets=_targets(command, len(prompt), info),
        alt_tokens=command.prompt_alt_tokens_k,
        stream=bool(command.stream),
    )


def _prompt(command: SampleCommand, info: BaseModelInfo) -> IntArray:
    if not command.prompt:
        raise UserError("prompt has no tokens; send at least one (a BOS token, for example)")
    prompt = np.asarray(command.prompt, np.int64)
    outside = prompt[(prompt < 0) | (prompt >= info.vocab_size)]
    if outside.size:
        raise UserError(
            f"prompt has token {int(outside[0])}; tokens of {info.name} are 0 to "
            f"{info.vocab_size - 1}; check that the tokenizer is the base model's"
        )
    return prompt.astype(np.int32)


def _most_tokens(command: SampleCommand, info: BaseModelInfo) -> int:
    """Return the most tokens to draw per sequence; 0 if the prompt is only scored.

    A prompt that is only scored may have one token more than the context: its last token is a
    target, as in training, and nothing follows it.
    """
    room = info.context_length - len(command.prompt)
    if room >= 1:
        return room if command.max_tokens is None else min(command.max_tokens, room)
    if command.only_scores and room >= -1:
        return 0
    least, told = (-1, "and one token more can be scored") if command.only_scores else (1, _LEFT)
    raise UserError(
        f"prompt has {len(command.prompt)} tokens; {info.name} has a context of "
        f"{info.context_length}, {told}; send at most {info.context_length - least}"
    )


def _check_size(command: SampleCommand, max_tokens: int) -> None:
    """Raise ``UserError`` for a command whose answer could get too large.

    A token takes an id and a logprob, and the same again for each of its top-k entries.
    """
    size = command.num_samples * max_tokens * 8 * (1 + command.topk_sample_logprobs)
    if size > MAX_BODY_BYTES:
        raise UserError(
            f"{command.num_samples} samples of up to {max_tokens} tokens with "
            f"{command.topk_sample_logprobs} top logprobs each can come to {size} bytes; the limit "
            f"is {MAX_BODY_BYTES}; ask for fewer samples, tokens or top-k entries"
        )


def _stop_tokens(command: SampleCommand, info: BaseModelInfo) -> frozenset[int]:
    """Return EOS and the command's stop tokens; none if ``stop`` is an empty list.

    A form of the text ends with EOS whatever ``stop`` is.
    """
    if command.grammar is None and (command.stop_tokens == [] or command.stop_strings == []):
        return frozenset()
    for token in command.stop_tokens or ():
        if not 0 <= token < info.vocab_size:
            raise UserError(f"stop token {token} is outside 0 to {info.vocab_size - 1}")
    return frozenset(info.eos_token_ids) | frozenset(command.stop_tokens or ())


def _targets(command: SampleCommand, length: int, info: BaseModelInfo) -> IntArray | None:
    """Return ``target_prompt_logprobs`` as dense [N-1, K], -1 where nothing is asked."""
    if command.target_prompt_logprobs is None:
        return None
    shape, ids = command.target_shape, np.asarray(command.target_prompt_logprobs, np.int64)
    if len(shape) != 2 or shape[0] != length - 1 or not 0 < shape[1] <= MAX_TOP_K:
        raise UserError(
            f"target_prompt_logprobs has shape {shape} for a prompt of {length} tokens; expected "
            f"[{length - 1}, K] with K up to {MAX_TOP_K}"
        )
    if ((ids < -1) | (ids >= info.vocab_size)).any():
        raise UserError(
            f"target_prompt_logprobs has ids outside -1 (skip) to {info.vocab_size - 1}"
        )
    dense = np.full(shape, -1, np.int32)
    if command.target_sparse is None:
        if ids.size != dense.size:
            raise UserError(f"target_prompt_logprobs has {ids.size} ids for shape {shape}")
        return ids.reshape(shape).astype(np.int32)
    dense[_csr_cells(command.target_sparse, shape, ids.size)] = ids
    return dense


def _csr_cells(
    sparse: SparseTargets, shape: Sequence[int], count: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the row and column of each stored value. Raises ``UserError`` if the layout is bad."""
    rows_at = np.asarray(sparse.crow_indices, np.int64)
    columns = np.asarray(sparse.col_indices, np.int64)
    if (
        rows_at.size != shape[0] + 1
        or (rows_at[1:] < rows_at[:-1]).any()
        or rows_at[0] != 0
        or rows_at[-1] != count
        or columns.size != count
        or ((columns < 0) | (columns >= shape[1])).any()
    ):
        raise UserError(f"target_prompt_logprobs is no CSR matrix of shape {shape}: {count} ids")
    return np.repeat(np.arange(shape[0]), np.diff(rows_at)), columns


def encode_response(command: SampleCommand, result: SampleResult) -> bytes:
    """Return the ``SampleResponse`` message: the sequences in order, and the requested scores."""
    response = wire.SampleResponse(
        sequences=[_sequence(s) for s in result.sequences],
        prompt_cache_hit_tokens=result.prompt_cache_hit_tokens,
    )
    n = len(command.prompt)
    if result.prompt_logprobs is not None:
        logprobs = result.prompt_logprobs.astype("<f4")
        logprobs[: _first_scored(command)] = np.nan
        response.prompt_logprobs = logprobs.tobytes()
    if result.topk_prompt is not None:
        rows = _topk_rows(result.topk_prompt, command)
        response.topk_prompt_logprobs.CopyFrom(_topk(rows))
    if result.target_logprobs is not None:
        response.target_prompt_logprobs.CopyFrom(_target_tensor(command, result.target_logprobs))
    if result.alt_tokens is not None:
        k = result.alt_tokens.token_ids.shape[1]
        response.prompt_alt_tokens.tokens.CopyFrom(
            _tensor(result.alt_tokens.token_ids, "<i4", wire.DTYPE_INT32, [n - 1, k])
        )
        response.prompt_alt_tokens.logprobs.CopyFrom(
            _tensor(result.alt_tokens.logprobs, "<f4", wire.DTYPE_FLOAT32, [n - 1, k])
        )
    return response.SerializeToString(deterministic=True)


def _first_scored(command: SampleCommand) -> int:
    """Return the first prompt position that has an answer.

    Position 0 has none. If only the last n positions were asked, the positions before them have
    none either.
    """
    last_n = command.prompt_logprobs_last_n
    return 1 if last_n is None else len(command.prompt) - last_n


def _topk_rows(scored: TopK, command: SampleCommand) -> TopK:
    """Return a row for every prompt position, empty for positions without an answer."""
    shape = len(command.prompt), scored.token_ids.shape[1]
    rows = TopK(np.full(shape, _EMPTY[0], np.int32), np.full(shape, _EMPTY[1], np.float32))
    first = _first_scored(command)
    rows.token_ids[first:] = scored.token_ids[first - 1 :]
    rows.logprobs[first:] = scored.logprobs[first - 1 :]
    return rows


def encode_part(drawn: TokenDelta) -> EncodedTokenDelta:
    """Return drawn tokens in the encoded form that streaming clients get."""
    return EncodedTokenDelta(
        drawn.sequence, drawn.start, _drawn(drawn).SerializeToString(deterministic=True)
    )


def _sequence(sequence: SampledSequence) -> wire.SampledSequence:
    reason = wire.STOP_REASON_STOP if sequence.stop_reason == "stop" else wire.STOP_REASON_LENGTH
    message = _drawn(sequence)
    message.stop_reason = reason
    return message


def _drawn(sequence: SampledSequence | TokenDelta) -> wire.SampledSequence:
    return wire.SampledSequence(
        tokens=sequence.tokens.astype("<i4").tobytes(),
        logprobs=sequence.logprobs.astype("<f4").tobytes(),
        topk_sampled_logprobs=None if sequence.topk is None else _topk(sequence.topk),
    )


def _topk(topk: TopK) -> wire.TopkLogprobs:
    length, k = topk.token_ids.shape
    return wire.TopkLogprobs(
        token_ids=topk.token_ids.astype("<i4").tobytes(),
        logprobs=topk.logprobs.astype("<f4").tobytes(),
        k=k,
        length=length,
    )


def _target_tensor(command: SampleCommand, logprobs: FloatArray) -> wire.Tensor:
    """Return the scores in the layout of the request: dense, or CSR with the same indices."""
    sparse = command.target_sparse
    if sparse is None:
        return _tensor(logprobs, "<f4", wire.DTYPE_FLOAT32, command.target_shape)
    count = len(command.target_prompt_logprobs or ())
    cells = _csr_cells(sparse, command.target_shape, count)
    csr = wire.SparseCsr(
        values=logprobs[cells].astype("<f4").tobytes(),
        crow_indices=np.asarray(sparse.crow_indices, "<i8").tobytes(),
        col_indices=np.asarray(sparse.col_indices, "<i8").tobytes(),
    )
    return wire.Tensor(sparse_csr=csr, dtype=wire.DTYPE_FLOAT32, shape=command.target_shape)


def _tensor(
    values: np.ndarray[Any, Any], dtype: str, number: wire.DType, shape: Sequence[int]
) -> wire.Tensor:
    return wire.Tensor(dense=values.astype(dtype).tobytes(), dtype=number, shape=shape)
