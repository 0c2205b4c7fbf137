"""The conversion of results into OpenAI's answers: text without stops, logprobs, usage, chunks."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple, Protocol

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.jobs import SampleCommand
from tuneserve_server.base_model_text import BaseText
from tuneserve_server.openai.requests import Echo

Json = dict[str, Any]

_CUT = "\ufffd"  # a tokenizer's text for part of a character
_LOWEST = -9999.0  # OpenAI's value for "impossible", because JSON has no infinity


class Likely(NamedTuple):
    """A token, its text, and the logarithm of its probability."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True)
class ScoredToken:
    """A token of the text, its offset there, and the likeliest tokens at its position.

    The first token of a prompt has neither a logprob nor likeliest tokens.
    """

    token: int
    text: str
    offset: int
    logprob: float | None
    top: list[Likely]


@dataclass(frozen=True)
class Choice:
    """One continuation, or a piece of it."""

    text: str
    finish_reason: Literal["stop", "length"] | None  # None: more follows
    scored: list[ScoredToken] | None
    stop: str | None = None  # the stop string that ended the text


@dataclass(frozen=True)
class SampledAnswer:
    """The continuations of one prompt, and their token counts."""

    choices: list[Choice]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class AnswerReader:
    """The options for reading results as answers."""

    text: BaseText
    eos: Sequence[int]
    scored: bool = False
    echo: Echo = Echo.NONE
    kept: int | None = None  # the number of samples in the answer, the likeliest of all


def read_answer(result: bytes, command: SampleCommand, reading: AnswerReader) -> SampledAnswer:
    """Return the answer in a ``SampleResponse``. Blocks."""
    response = wire.SampleResponse.FromString(result)
    sampled = [] if reading.echo is Echo.ALONE else list(response.sequences)
    kept = _best(response.sequences, reading.kept)
    if reading.echo is Echo.NONE:
        choices = [_choice(each, command, reading) for each in kept]
    else:
        choices = _echoed(response, kept, command, reading)
    return SampledAnswer(
        choices=choices,
        prompt_tokens=len(command.prompt),
        completion_tokens=sum(len(each.tokens) // 4 for each in sampled),
        cached_tokens=response.prompt_cache_hit_tokens,
    )


def _best(
    sequences: Sequence[wire.SampledSequence], count: int | None
) -> Sequence[wire.SampledSequence]:
    """Return the sequences with the highest mean logprob per token, best first, or all as drawn.

    All drawn tokens count, the end of sequence included. Of equals, the first drawn is first.
    """
    if count is None or count >= len(sequences):
        return sequences
    means = [fmean(_floats(each.logprobs) or [0.0]) for each in sequences]
    order = sorted(range(len(means)), key=lambda index: -means[index])
    return [sequences[index] for index in order[:count]]


def _choice(
    sequence: wire.SampledSequence, command: SampleCommand, reading: AnswerReader
) -> Choice:
    text = reading.text
    tokens, stopped = _tokens(sequence, reading.eos)
    stops = command.stop_strings or []
    whole = text.decode(tokens)
    said = cut_at(whole, stops)
    cut = whole[len(said) :]
    return Choice(
        text=said,
        finish_reason="stop" if stopped else "length",
        scored=_scored(sequence, tokens, text, len(said)) if reading.scored else None,
        stop=next((stop for stop in stops if cut.startswith(stop)), None),
    )


def _tokens(sequence: wire.SampledSequence, eos: Sequence[int]) -> tuple[list[int], bool]:
    """Return the tokens without the end of sequence, and whether a stop ended the sequence."""
    tokens = ints(sequence.tokens)
    stopped = sequence.stop_reason == wire.STOP_REASON_STOP
    return (tokens[:-1] if stopped and tokens[-1] in eos else tokens), stopped


def _echoed(
    response: wire.SampleResponse,
    sequences: Sequence[wire.SampledSequence],
    command: SampleCommand,
    reading: AnswerReader,
) -> list[Choice]:
    """Return the continuations, each behind its prompt, or the prompt alone."""
    text, prompt = reading.text, command.prompt
    start = len(text.decode(prompt))
    choices = []
    for sequence in sequences:
        tokens: list[int] = []
        stopped = False
        if reading.echo is not Echo.ALONE:
            tokens, stopped = _tokens(sequence, reading.eos)
        whole = text.decode([*prompt, *tokens])
        said = whole[:start] + cut_at(whole[start:], command.stop_strings or [])
        scored = None
        if reading.scored:
            # All tokens count, the end of sequence and those without a text included: harnesses
            # take all but the last ones as the prompt's. After a stop string, none count.
            is_cut = len(said) < len(whole)
            sampled = tokens if is_cut or reading.echo is Echo.ALONE else ints(sequence.tokens)
            begins = offsets([*prompt, *sampled], text)
            scored = [
                _prompt_token(response, place, prompt[place], offset, text)
                for place, offset in enumerate(begins[: len(prompt)])
            ] + [
                scored_token(sequence, place, offset, text)
                for place, offset in enumerate(begins[len(prompt) :])
                if offset < len(said) or not is_cut
            ]
        choices.append(Choice(said, "stop" if stopped else "length", scored))
    return choices


def _prompt_token(
    response: wire.SampleResponse, place: int, token: int, offset: int, text: BaseText
) -> ScoredToken:
    """Return a token of the prompt. The first has no logprob, because nothing comes before it."""
    if place == 0:
        return ScoredToken(token, text.piece(token), offset, None, [])
    (logprob,) = _floats(_row(response.prompt_logprobs, place, 1))
    top = _likeliest(response.topk_prompt_logprobs, place, text)
    return ScoredToken(token, text.piece(token), offset, max(logprob, _LOWEST), top)


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string in it."""
    ends = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(ends)] if ends else text


def _scored(
    sequence: wire.SampledSequence, tokens: Sequence[int], text: BaseText, length: int
) -> list[ScoredToken]:
    """Return the tokens that begin in the first ``length`` characters."""
    return [
        scored_token(sequence, place, offset, text)
        for place, offset in enumerate(offsets(tokens, text))
        if offset < length
    ]


def scored_token(
    sequence: wire.SampledSequence, place: int, offset: int, text: BaseText
) -> ScoredToken:
    """Return token ``place`` of the sequence; it begins at ``offset`` of the text."""
    (token,) = ints(_row(sequence.tokens, place, 1))
    (logprob,) = _floats(_row(sequence.logprobs, place, 1))
    top = _likeliest(sequence.topk_sampled_logprobs, place, text)
    return ScoredToken(token, text.piece(token), offset, max(logprob, _LOWEST), top)


def _likeliest(top: wire.TopkLogprobs, place: int, text: BaseText) -> list[Likely]:
    ids = ints(_row(top.token_ids, place, top.k))
    values = _floats(_row(top.logprobs, place, top.k))
    return [
        Likely(each, text.piece(each), max(value, _LOWEST))
        for each, value in zip(ids, values, strict=True)
    ]


class IncrementalText:
    """The text of tokens as they arrive, in whole characters, which later tokens do not change.

    ``offsets`` says where each token begins in the text; a token inside a character begins where
    the character does.

    Only the tokens after the last whole character but one are decoded again, so decoding takes
    linear time. One more is kept for decoders that write no space before the first token.
    """

    def __init__(self, text: BaseText) -> None:
        self.tokens: list[int] = []
        self.offsets: list[int] = []
        self.text = ""
        self._decode = text.decode
        self._whole = ""  # the text of all tokens before ``_start``
        self._start = 0
        self._before = 0  # from here on tokens are decoded
        self._shown = 0  # characters of the tokens from ``_before`` to ``_start``

    def push(self, token: int) -> None:
        self.offsets.append(len(self.text))
        self.tokens.append(token)
        piece = self._decode(self.tokens[self._before :])[self._shown :]
        if piece.endswith(_CUT):
            self.text = self._whole + piece.rstrip(_CUT)
        elif piece:
            self.text = self._whole = self._whole + piece
            self._before, self._start = self._start, len(self.tokens)
            self._shown = len(self._decode(self.tokens[self._before :]))


def offsets(tokens: Sequence[int], text: BaseText) -> list[int]:
    """Return where each token begins in the text of all tokens."""
    spoken = IncrementalText(text)
    for token in tokens:
        spoken.push(token)
    return spoken.offsets


def ints(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}i", packed))


def _floats(packed: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))


def _row(packed: bytes, row: int, width: int) -> bytes:
    """Return row ``row`` of a matrix of 4-byte numbers with ``width`` columns."""
    return packed[4 * row * width : 4 * (row + 1) * width]


# --- completions ---------------------------------------------------------------------------------


class ResponseFormat(Protocol):
    """The format in which one of the routes answers."""

    id_prefix: str
    whole: str
    chunk: str

    def choice(self, index: int, choice: Choice) -> Json:
        """Return the whole continuation."""
        ...

    def pieces(self, index: int, choice: Choice, *, is_first: bool) -> list[Json]:
        """Return the parts of a stream's chunks for a part of the continuation."""
        ...


class CompletionShape:
    id_prefix = "cmpl-"
    whole = chunk = "text_completion"

    def __init__(self, *, as_ids: bool = False) -> None:
        self._as_ids = as_ids  # tokens of logprobs are named by their ids

    def choice(self, index: int, choice: Choice) -> Json:
        return {
            "index": index,
            "text": choice.text,
            "logprobs": None
            if choice.scored is None
            else _completion_logprobs(choice.scored, as_ids=self._as_ids),
            "finish_reason": choice.finish_reason,
        }

    def pieces(self, index: int, choice: Choice, *, is_first: bool) -> list[Json]:
        return [self.choice(index, choice)]


def _completion_logprobs(scored: Sequence[ScoredToken], *, as_ids: bool) -> Json:
    names = [_names(token, as_ids=as_ids) for token in scored]
    tops = [
        None if token.logprob is None else {name[each.token]: each.logprob for each in token.top}
        for token, name in zip(scored, names, strict=True)
    ]
    return {
        "tokens": [name[token.token] for token, name in zip(scored, names, strict=True)],
        "token_logprobs": [token.logprob for token in scored],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": [token.offset for token in scored],
    }


def _names(scored: ScoredToken, *, as_ids: bool) -> dict[int, str]:
    """Return a unique name for each token at one position: its text or its id.

    The id is used with ``as_ids``, and for a text that is part of a character or the text of a
    likelier token.
    """
    names: dict[int, str] = {}
    for token, text in [
        *((each.token, each.text) for each in scored.top),
        (scored.token, scored.text),
    ]:
        if token not in names:
            is_ambiguous = as_ids or _CUT in text or text in names.values()
            names[token] = f"token_id:{token}" if is_ambiguous else text
    return names


def is_whole(text: str) -> bool:
    """Return whether the text has no token that is part of a character."""
    return _CUT not in text


def usage(answers: Sequence[SampledAnswer]) -> Json:
    """Return the token counts of all prompts together."""
    prompt = sum(each.prompt_tokens for each in answers)
    completion = sum(each.completion_tokens for each in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in answers)},
    }
