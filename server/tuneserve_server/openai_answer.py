"""From results to OpenAI's answers: text without its stop, logprobs, usage, chunks of a stream."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tuneserve_client.proto import wire_pb2 as wire
from tuneserve_engine.jobs import Sample
from tuneserve_server.openai_text import BaseText

Json = dict[str, Any]

_CUT = "\ufffd"  # what a tokenizer shows for part of a character
_LOWEST = -9999.0  # OpenAI's word for "impossible": JSON has no infinity


@dataclass(frozen=True)
class ScoredToken:
    """A token of the text, where it begins there, and the likeliest at its place."""

    text: str
    offset: int
    logprob: float
    top: list[tuple[str, float]]


@dataclass(frozen=True)
class Choice:
    """One continuation."""

    text: str
    finish_reason: Literal["stop", "length"]
    scored: list[ScoredToken] | None


@dataclass(frozen=True)
class Answer:
    """The continuations of one prompt, and what they cost."""

    choices: list[Choice]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def read_answer(
    result: bytes, command: Sample, text: BaseText, eos: Sequence[int], *, scored: bool
) -> Answer:
    """What a ``SampleResponse`` says. Blocks."""
    response = wire.SampleResponse.FromString(result)
    stops = command.stop_strings or []
    return Answer(
        choices=[_choice(each, stops, text, eos, scored) for each in response.sequences],
        prompt_tokens=len(command.prompt),
        completion_tokens=sum(len(each.tokens) // 4 for each in response.sequences),
        cached_tokens=response.prompt_cache_hit_tokens,
    )


def _choice(
    sequence: wire.SampledSequence,
    stops: Sequence[str],
    text: BaseText,
    eos: Sequence[int],
    scored: bool,
) -> Choice:
    tokens = _ints(sequence.tokens)
    stopped = sequence.stop_reason == wire.STOP_REASON_STOP
    if stopped and tokens[-1] in eos:
        tokens = tokens[:-1]
    said = cut_at(text.decode(tokens), stops)
    return Choice(
        text=said,
        finish_reason="stop" if stopped else "length",
        scored=_scored(sequence, tokens, text, len(said)) if scored else None,
    )


def cut_at(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop strings in it."""
    ends = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(ends)] if ends else text


def _scored(
    sequence: wire.SampledSequence, tokens: Sequence[int], text: BaseText, length: int
) -> list[ScoredToken]:
    """The tokens that begin in the first ``length`` characters."""
    logprobs = _floats(sequence.logprobs)
    top = sequence.topk_sampled_logprobs
    ids, values = _ints(top.token_ids), _floats(top.logprobs)
    found = []
    for i, offset in enumerate(offsets(tokens, text)):
        if offset >= length:
            break
        row = slice(i * top.k, (i + 1) * top.k)
        others = [
            (text.piece(token), max(value, _LOWEST))
            for token, value in zip(ids[row], values[row], strict=True)
        ]
        found.append(ScoredToken(text.piece(tokens[i]), offset, max(logprobs[i], _LOWEST), others))
    return found


def offsets(tokens: Sequence[int], text: BaseText) -> list[int]:
    """Where each token begins in the text of all; inside a character, where that begins.

    Only what follows the last whole character is decoded again, so that this takes linear time.
    """
    found, base, start = [], 0, 0
    for i in range(len(tokens)):
        piece = text.decode(tokens[start:i])
        if piece.endswith(_CUT):
            found.append(base + len(piece.rstrip(_CUT)))
        else:
            base, start = base + len(piece), i
            found.append(base)
    return found


def _ints(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}i", packed))


def _floats(packed: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))


# --- the two shapes ------------------------------------------------------------------------------


class Shape(Protocol):
    """How one of the routes puts its answers."""

    id_prefix: str
    whole: str
    chunk: str

    def choice(self, index: int, choice: Choice) -> Json:
        """The whole continuation."""
        ...

    def pieces(self, index: int, choice: Choice) -> list[Json]:
        """The same for a stream, piece by piece."""
        ...


class CompletionShape:
    id_prefix = "cmpl-"
    whole = chunk = "text_completion"

    def choice(self, index: int, choice: Choice) -> Json:
        return {
            "index": index,
            "text": choice.text,
            "logprobs": None if choice.scored is None else _completion_logprobs(choice.scored),
            "finish_reason": choice.finish_reason,
        }

    def pieces(self, index: int, choice: Choice) -> list[Json]:
        return [self.choice(index, choice)]


def _completion_logprobs(scored: Sequence[ScoredToken]) -> Json:
    tops: list[dict[str, float]] = []
    for token in scored:
        tops.append({})
        for piece, logprob in token.top:
            tops[-1].setdefault(piece, logprob)  # of two that read alike, the likelier
    return {
        "tokens": [token.text for token in scored],
        "token_logprobs": [token.logprob for token in scored],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": [token.offset for token in scored],
    }


class ChatShape:
    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, index: int, choice: Choice) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _chat_logprobs(choice),
            "finish_reason": choice.finish_reason,
        }

    def pieces(self, index: int, choice: Choice) -> list[Json]:
        start = {"role": "assistant", "content": ""}
        logprobs = _chat_logprobs(choice)
        return [
            _piece(index, start, None, None),
            _piece(index, {"content": choice.text}, logprobs, None),
            _piece(index, {}, None, choice.finish_reason),
        ]


def _piece(index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _chat_logprobs(choice: Choice) -> Json | None:
    if choice.scored is None:
        return None
    content = [
        {
            **_token(token.text, token.logprob),
            "top_logprobs": [_token(*each) for each in token.top],
        }
        for token in choice.scored
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> Json:
    """``bytes`` is null for a token that is part of a character."""
    whole = _CUT not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def usage(answers: Sequence[Answer]) -> Json:
    """What all prompts together cost."""
    prompt = sum(each.prompt_tokens for each in answers)
    completion = sum(each.completion_tokens for each in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in answers)},
    }
