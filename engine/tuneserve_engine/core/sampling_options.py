"""The limits of a sample's options. The API process and the worker both check them."""

import math
from collections.abc import Mapping

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.errors import UserError, shown_number
from tuneserve_engine.core.grammar import check_grammar
from tuneserve_engine.core.jobs import MAX_SAMPLES, SampleCommand
from tuneserve_engine.core.shapes import MAX_LOGIT_BIASES

MAX_TOP_K = 64
"""The most entries of one top-k or alternatives list."""

MAX_BIAS, MAX_PENALTY = 100.0, 2.0
"""The largest absolute bias and penalty, as at OpenAI."""

_MAX_INT32 = 2**31 - 1


def bounded(name: str, value: int, low: int = 0, high: int = _MAX_INT32) -> int:
    """Return the value. Raises ``UserError`` if it is outside the limits."""
    if not low <= value <= high:
        raise UserError(f"{name} is {shown_number(value)}; it must be {low} to {high}")
    return value


def check_sampling_options(command: SampleCommand, names: Mapping[str, str] | None = None) -> None:
    """Raise ``UserError`` for an option outside its limits.

    ``names`` has the fields that the client calls by another name.
    """
    names = names or {}
    limits = {
        "num_samples": (1, MAX_SAMPLES),
        "topk_prompt_logprobs": (0, MAX_TOP_K),
        "topk_sample_logprobs": (0, MAX_TOP_K),
        "prompt_alt_tokens_k": (0, MAX_TOP_K),
        "prompt_logprobs_last_n": (1, len(command.prompt) - 1),
        # A request that only scores its prompt may ask for no token.
        "max_tokens": (0 if command.only_scores else 1, _MAX_INT32),
    }
    for field, (low, high) in limits.items():
        value = getattr(command, field)
        if value is not None:
            bounded(names.get(field, field), value, low, high)
    temperature = command.temperature
    if not (math.isfinite(temperature) and temperature >= 0):
        name = names.get("temperature", "temperature")
        raise UserError(f"{name} is {temperature}; it must be finite and at least 0")
    if not 0 < command.top_p <= 1:
        name = names.get("top_p", "top_p")
        raise UserError(f"{name} is {command.top_p}; it must be above 0 and at most 1")
    if command.top_k != -1 and not 1 <= command.top_k <= _MAX_INT32:
        raise UserError(
            f"{names.get('top_k', 'top_k')} is {shown_number(command.top_k)}; it must be 1 to "
            f"{_MAX_INT32}, or -1 for all tokens"
        )
    _check_edits(command)
    if command.grammar is not None:
        check_grammar(command.grammar)


def check_biased_tokens(command: SampleCommand, info: BaseModelInfo) -> None:
    """Raise ``UserError`` for a bias of a token that the base model does not have."""
    for token in command.logit_bias:
        if not 0 <= token < info.vocab_size:
            raise UserError(
                f"logit_bias has token {shown_number(token)}; tokens of {info.name} are 0 to "
                f"{info.vocab_size - 1}; send token ids of the base model's tokenizer"
            )


def _check_edits(command: SampleCommand) -> None:
    """Raise ``UserError`` for a bias or a penalty outside its limits."""
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(command, name)
        if not abs(penalty) <= MAX_PENALTY:  # NaN too
            raise UserError(f"{name} is {penalty}; it must be -{MAX_PENALTY:g} to {MAX_PENALTY:g}")
    count = len(command.logit_bias)
    if count > MAX_LOGIT_BIASES:
        raise UserError(
            f"logit_bias has {count} tokens; the limit is {MAX_LOGIT_BIASES}; leave out those with "
            "the smallest biases"
        )
    for token, bias in command.logit_bias.items():
        if not abs(bias) <= MAX_BIAS:
            raise UserError(
                f"logit_bias has {bias} for token {shown_number(token)}; it must be -{MAX_BIAS:g} "
                f"to {MAX_BIAS:g}"
            )
