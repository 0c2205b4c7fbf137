"""The conversion of an ``asample`` body into the command that a sampler runs.

Checks that need only the request and the base model's size happen here, before the request takes a
place in the queue; the worker checks the rest.
"""

from tuneserve_client.wire.body import MAX_INT32
from tuneserve_client.wire.types import Chunk, IntTensor, SampleRequest
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.errors import UserError, shown_number
from tuneserve_engine.core.jobs import MAX_SAMPLES, SampleCommand, SparseTargets
from tuneserve_engine.core.recordings import sequence_id
from tuneserve_engine.core.sampling_options import check_sampling_options
from tuneserve_server.commands.common import checked_seed

_NAMES = {
    name: f"sampling_params.{name}" for name in ("max_tokens", "temperature", "top_k", "top_p")
}
"""Where the fields of a command are in a request, if they are not at its top."""

_MAX_STOPS = 256
_MAX_STOP_CHARS = 256  # each token is matched against this much text while the device waits


def sample_command(
    request: SampleRequest, file_id: str | None, info: BaseModelInfo | None
) -> SampleCommand:
    """Return the command for a request. Raises ``UserError``."""
    params = request.sampling_params
    prompt = _tokens(request.prompt.chunks)
    stop_tokens, stop_strings = checked_stops("sampling_params.stop", params.stop)
    targets = request.target_prompt_logprobs
    command = SampleCommand(
        prompt=prompt,
        seed=checked_seed(params.seed),
        file_id=file_id,
        num_samples=request.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_logprobs_last_n=_last_n(request),
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=None if targets is None else _ids("data", targets.data, low=-1),
        target_shape=[] if targets is None else _shape(targets, len(prompt)),
        target_sparse=None if targets is None else _sparse(targets),
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
    )
    checked_prompt(prompt, info, room=-1 if command.only_scores else 1)
    check_sampling_options(command, _NAMES)
    return command


def sequence_ids(sampling_session_id: str, seq: int, count: int) -> list[str]:
    """Return an id for each sequence of the answer; the client requires ``count`` of them."""
    count = min(max(count, 1), MAX_SAMPLES)
    return [sequence_id(sampling_session_id, seq, index) for index in range(count)]


def _tokens(chunks: list[Chunk]) -> list[int]:
    """Return the tokens of all chunks in order. A prompt may be cut into chunks anywhere."""
    prompt: list[int] = []
    for index, chunk in enumerate(chunks):
        if chunk.type != "encoded_text":
            raise UserError(
                f"prompt.chunks[{index}] is not text; the base model of this server reads only "
                "text: send encoded_text chunks"
            )
        if chunk.tokens is None:
            raise UserError(f"prompt.chunks[{index}].tokens is missing; send the token ids")
        prompt += chunk.tokens
    return prompt


def checked_prompt(prompt: list[int], info: BaseModelInfo | None, *, room: int = 1) -> list[int]:
    """Return the prompt if the context has room for it and ``room`` more tokens.

    Pass -1 as ``room`` for a prompt that is only scored: its last token is a target, as in
    training, and needs no position. Raises ``UserError``.
    """
    if not prompt:
        raise UserError("the prompt has no tokens; send at least one, a BOS token for example")
    limit = info.vocab_size - 1 if info else MAX_INT32
    worst = next((t for t in (min(prompt), max(prompt)) if not 0 <= t <= limit), None)
    if worst is not None:
        raise UserError(
            f"the prompt has token {shown_number(worst)}; token ids are 0 to {limit}; check that "
            "you use the base model's tokenizer"
        )
    if info and len(prompt) + room > info.context_length:
        told = (
            "and one token must be left to sample" if room > 0 else "and one more token is scored"
        )
        raise UserError(
            f"the prompt has {len(prompt)} tokens; {info.name} has a context of "
            f"{info.context_length}, {told}; send up to {info.context_length - room}"
        )
    return prompt


def checked_stops(
    name: str, stop: str | list[str] | list[int] | None
) -> tuple[list[int] | None, list[str] | None]:
    """Return the stop tokens and the stop strings; an empty list means never to stop."""
    if stop is None:
        return None, None
    if isinstance(stop, str):
        stop = [stop]
    if len(stop) > _MAX_STOPS:
        raise UserError(f"{name} has {len(stop)} entries; the limit is {_MAX_STOPS}")
    strings = [s for s in stop if isinstance(s, str)]
    tokens = [t for t in stop if isinstance(t, int)]
    if strings:
        if not all(0 < len(s) <= _MAX_STOP_CHARS for s in strings):
            raise UserError(
                f"{name} has an empty string or one of more than {_MAX_STOP_CHARS} characters; "
                "leave that string out"
            )
        return None, strings
    return _ids(name, tokens), None


def _ids(name: str, values: list[int], low: int = 0) -> list[int]:
    """Return the values. Raises ``UserError`` unless each can be a token id."""
    if values and not low <= min(values) <= max(values) <= MAX_INT32:
        raise UserError(f"{name} has numbers outside {low} to {MAX_INT32}; send token ids")
    return values


def _last_n(request: SampleRequest) -> int | None:
    n = request.prompt_logprobs_last_n
    if n is None:
        return None
    if not (request.prompt_logprobs or request.topk_prompt_logprobs):
        raise UserError(
            "prompt_logprobs_last_n asks for part of prompt_logprobs, which is not set; set "
            "prompt_logprobs"
        )
    return n


def _shape(targets: IntTensor, length: int) -> list[int]:
    shape = targets.shape or []
    if len(shape) != 2 or shape[0] != length - 1 or not 0 < shape[1] <= MAX_INT32:
        raise UserError(
            f"target_prompt_logprobs must have the shape [{length - 1}, K] for a prompt of "
            f"{length} tokens"
        )
    return shape


def _sparse(targets: IntTensor) -> SparseTargets | None:
    crow, col = targets.sparse_crow_indices, targets.sparse_col_indices
    if crow is None and col is None:
        return None
    if crow is None or col is None:
        raise UserError(
            "target_prompt_logprobs has only one of sparse_crow_indices and sparse_col_indices; "
            "a CSR matrix needs both"
        )
    return SparseTargets(_ids("sparse_crow_indices", crow), _ids("sparse_col_indices", col))
