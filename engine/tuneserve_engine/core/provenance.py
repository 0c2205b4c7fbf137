"""The origin of the tokens of a ``stable_reinforce`` datum, checked and made plain arrays.

A token comes from a span of a prompt, or of a sequence that was sampled from it. A datum's spans
come in two lists, which tile its inputs and its targets. Training needs to know which targets were
sampled, and the logprob with which each was drawn: both go into the request as inputs of its loss,
in place of the client's, so that a replay needs only the request. Protobuf and NumPy only.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_client.wire.proto.scan import read_sizes
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.recordings import RecordedSequence, SampleKey

LOSS = "stable_reinforce"
MASK = "sampled_mask"
"""The input of the loss that says which targets were sampled. A client's own value is replaced."""
STAND_IN = "tuneserve_truncated_reinforce"
"""The name of this loss in its metrics: the vendor's formula is not public, so this is our own."""

MAX_FIELDS = 1 << 18
"""The most fields of a request and its datums, spans included; ``worker.codecs.training`` has the
same limit."""

_SAMPLED = "sampled_tokens"
_MOST_SEQ = 2**63 - 1
_IDS: dict[int, np.dtype[Any]] = {
    wire.DTYPE_INT64: np.dtype("<i8"),
    wire.DTYPE_INT32: np.dtype("<i4"),
}


@dataclass(frozen=True)
class Source:
    """One sampled sequence, and the number of tokens of its prompt."""

    drawn: RecordedSequence
    prompt: int

    @property
    def tokens(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.drawn.tokens, "<i4")

    @property
    def logprobs(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.drawn.logprobs, "<f4")


@dataclass(frozen=True)
class _Span:
    """A run of tokens of a sequence's prompt, or of the sequence itself.

    ``at`` is its position in the datum, ``name`` its name in error messages.
    """

    name: str
    is_sampled: bool
    sequence_id: str
    offset: int
    length: int
    at: int

    @property
    def part(self) -> slice:
        return slice(self.at, self.at + self.length)


@dataclass(frozen=True)
class _Datum:
    name: str
    message: wire.Datum
    tokens: np.ndarray[Any, Any]
    targets: np.ndarray[Any, Any]
    inputs: list[_Span]
    losses: list[_Span]
    mask: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]

    def take_spans(self, span: _Span, source: Source) -> None:
        """Mark the targets of the span as sampled, with the logprobs of the sequence."""
        self.mask[span.part] = 1.0
        self.logprobs[span.part] = source.logprobs[span.offset :][: span.length]


class Provenance:
    """The spans of one request. Raises ``UserError`` if they do not tile its datums.

    ``take`` gets the sequences a few at a time: all of them may be far larger than the request,
    which may name a single token of each.
    """

    def __init__(self, payload: bytes, session_id: str) -> None:
        self._request = _parsed(payload)
        self._data = [_datum(i, each) for i, each in enumerate(self._request.data)]
        self.samples: dict[str, tuple[SampleKey, int]] = {}
        """By the id of each named sequence: its sample, and its index in the sample."""
        self.first: dict[SampleKey, str] = {}
        """By sample: the span that names it first, as text for an error message."""
        self._naming: dict[str, list[tuple[_Datum, _Span, bool]]] = {}
        for datum, span, is_loss in self._spans():
            if not span.length:
                continue
            if span.sequence_id not in self.samples:
                key, index = _read_id(span, session_id)
                self.samples[span.sequence_id] = key, index
                self.first.setdefault(key, f"{span.name} names sequence {span.sequence_id!r}")
            self._naming.setdefault(span.sequence_id, []).append((datum, span, is_loss))

    def _spans(self) -> Iterator[tuple[_Datum, _Span, bool]]:
        """Yield all spans, each with its datum and whether it is of the targets."""
        for datum in self._data:
            for span in datum.inputs:
                yield datum, span, False
            for span in datum.losses:
                yield datum, span, True

    def take_sequences(self, sources: Mapping[str, Source]) -> None:
        """Check the spans that name these sequences, and keep the logprobs of sampled targets.

        ``sources`` is by sequence id. Raises ``UserError`` for a span that does not match its
        sequence.
        """
        for sequence_id, source in sources.items():
            for datum, span, is_loss in self._naming[sequence_id]:
                if is_loss:
                    _check(span, source, datum.targets, "target")
                    if span.is_sampled:
                        datum.take_spans(span, source)
                else:
                    _check(span, source, datum.tokens, "input")

    def joined(self) -> bytes:
        """Return the request with ``MASK`` and ``logprobs`` as inputs of the loss, without spans.

        ``logprobs`` are the recorded ones where the mask is 1. Call it once every sequence has been
        taken.
        """
        for datum in self._data:
            _put(datum.message, MASK, datum.mask)
            _put(datum.message, "logprobs", datum.logprobs)
            del datum.message.model_input_spans[:]
            del datum.message.loss_fn_input_spans[:]
        return self._request.SerializeToString(deterministic=True)


def check_config(config: Mapping[str, float]) -> None:
    """Raise ``UserError`` for a cap of 0 or less, which weighs no token, and for a negative KL."""
    cap, kl = config["clip_high_threshold"], config["kl_coeff"]
    if cap <= 0:
        raise UserError(
            f"loss_fn_config['clip_high_threshold'] is {cap:g}; it is the largest weight that a "
            "token can have, and must be above 0"
        )
    if kl < 0:
        raise UserError(f"loss_fn_config['kl_coeff'] is {kl:g}; it must be at least 0")


def check_advantages(name: str, inputs: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Raise ``UserError`` for an advantage at a position that was not sampled."""
    advantages = inputs["advantages"]
    outside = np.flatnonzero((inputs[MASK] == 0) & (advantages != 0))
    if outside.size:
        at = int(outside[0])
        raise UserError(
            f"{name}.advantages is {advantages[at]:g} at position {at}, which is in no "
            f"sampled_tokens span of loss_fn_input_spans; {LOSS} learns from what was sampled: "
            "send 0 there"
        )


def metrics(
    data: Iterable[tuple[np.ndarray[Any, Any], Mapping[str, np.ndarray[Any, Any]]]], cap: float
) -> dict[str, float]:
    """Return the metrics of the loss, from each datum's logprobs and the inputs of its loss.

    ``cap`` is the largest ratio. The metrics are named after ``STAND_IN``, because the formula is
    our own.
    """
    tokens = truncated = 0
    gap, largest = 0.0, 0.0
    for logprobs, inputs in data:
        sampled = inputs[MASK] != 0
        log_ratios = logprobs[sampled].astype("f8") - inputs["logprobs"][sampled]
        tokens += log_ratios.size
        truncated += int((np.exp(np.minimum(log_ratios, 80.0)) > cap).sum())
        gap += float(log_ratios.sum())
        largest = max(largest, float(np.abs(log_ratios).max(initial=0.0)))
    return {
        f"{STAND_IN}/sampled_tokens:sum": float(tokens),
        f"{STAND_IN}/truncated_tokens:sum": float(truncated),
        f"{STAND_IN}/log_ratio:sum": gap,
        f"{STAND_IN}/abs_log_ratio:max": largest,
    }


def _parsed(payload: bytes) -> wire.ForwardBackwardRequest:
    fields, _ = read_sizes(payload, MAX_FIELDS + 1)
    if fields > MAX_FIELDS:
        raise UserError(
            f"the request has more than {MAX_FIELDS} chunks, inputs and spans in its data; split it"
        )
    try:
        return wire.ForwardBackwardRequest.FromString(payload)
    except DecodeError as error:
        raise UserError(f"the body is no ForwardBackwardRequest message: {error}") from error


def _datum(number: int, message: wire.Datum) -> _Datum:
    name = f"data[{number}]"
    tokens, targets = _tokens(name, message), _targets(name, message)
    if not (message.model_input_spans and message.loss_fn_input_spans):
        missing = "loss_fn_input_spans" if message.model_input_spans else "model_input_spans"
        raise UserError(
            f"{name} has no {missing}; {LOSS} needs to know where each token came from: sample "
            "with record_stability_info, and give each datum its spans by Datum.with_provenance"
        )
    inputs = _tiles(f"{name}.model_input_spans", message.model_input_spans, len(tokens), "input")
    losses = f"{name}.loss_fn_input_spans"
    return _Datum(
        name,
        message,
        tokens,
        targets,
        inputs,
        _tiles(losses, message.loss_fn_input_spans, len(targets), "target"),
        np.zeros(len(targets), "<f4"),
        np.zeros(len(targets), "<f4"),
    )


def _tokens(name: str, message: wire.Datum) -> np.ndarray[Any, Any]:
    """Return the datum's input tokens.

    Chunks other than text count as empty here: the worker refuses them by name.
    """
    raw = b"".join(each.encoded_text.tokens for each in message.model_input)
    if len(raw) % 4:
        raise UserError(f"{name}.model_input has {len(raw)} bytes, no whole int32 tokens")
    return np.frombuffer(raw, "<i4")


def _targets(name: str, message: wire.Datum) -> np.ndarray[Any, Any]:
    if "target_tokens" not in message.loss_fn_inputs:
        raise UserError(f"{name}.loss_fn_inputs lacks target_tokens, which {LOSS} needs")
    tensor = message.loss_fn_inputs["target_tokens"]
    dtype = _IDS.get(tensor.dtype)
    if dtype is None or tensor.WhichOneof("encoding") == "sparse_csr" or len(tensor.shape) > 1:
        raise UserError(f"{name}.target_tokens must be a dense tensor of int64, [N], for {LOSS}")
    if len(tensor.dense) % dtype.itemsize:
        raise UserError(
            f"{name}.target_tokens has {len(tensor.dense)} bytes, no whole number of "
            f"{dtype.itemsize}-byte values"
        )
    return np.frombuffer(tensor.dense, dtype)


def _tiles(name: str, spans: Sequence[wire.ProvenanceSpan], size: int, what: str) -> list[_Span]:
    found = []
    at = 0
    for i, message in enumerate(spans):
        which = message.WhichOneof("span")
        if which is None:
            raise UserError(f"{name}[{i}] is empty; it is of prompt_tokens, or of sampled_tokens")
        arm = getattr(message, which)
        if arm.length < 0 or arm.offset < 0:
            raise UserError(
                f"{name}[{i}] has offset {arm.offset} and length {arm.length}; both are at least 0"
            )
        at = min(at, size)
        found.append(
            _Span(f"{name}[{i}]", which == _SAMPLED, arm.sequence_id, arm.offset, arm.length, at)
        )
        at += arm.length
    covered = sum(span.length for span in found)
    if covered != size:
        raise UserError(
            f"{name} cover {covered} tokens; the datum has {size} {what} tokens, and each is in "
            "exactly one span"
        )
    return found


def _read_id(span: _Span, session_id: str) -> tuple[SampleKey, int]:
    """Return the sample that the span names, and the sequence's index in the sample."""
    scope, _, rest = span.sequence_id.rpartition(":sample:")
    number, *parts = rest.split(":")
    digits = [number, *parts]
    if not scope or len(digits) != 3 or not all(_is_number(each) for each in digits):
        raise UserError(
            f"{span.name} names sequence {_shown(span.sequence_id)}, which is no id that this "
            "server gives; send the sequence_id of a SampledSequence"
        )
    if scope != session_id:
        raise UserError(
            f"{span.name} names sequence {_shown(span.sequence_id)} of session {_shown(scope)}; "
            f"the model is of session {session_id!r}, and recorded sequences are for their own: "
            "sample with the ServiceClient that made the model"
        )
    return SampleKey(f"{scope}:sample:{number}", int(parts[0])), int(parts[1])


def _is_number(text: str) -> bool:
    """Return whether the text is a number in the form that this server writes."""
    return (
        text.isascii()
        and text.isdigit()
        and text == str(int(text[:20]))
        and (int(text) <= _MOST_SEQ)
    )


def _check(span: _Span, source: Source, tokens: np.ndarray[Any, Any], what: str) -> None:
    """Raise ``UserError`` for a span beyond its sequence, or with other tokens than sampled."""
    size = len(source.tokens) if span.is_sampled else source.prompt
    if span.offset + span.length > size:
        of = "sequence" if span.is_sampled else "prompt of sequence"
        raise UserError(
            f"{span.name} ends at {span.offset + span.length}; the {of} "
            f"{_shown(span.sequence_id)} has {size} tokens"
        )
    if not span.is_sampled:
        return
    drawn, found = source.tokens[span.offset :][: span.length], tokens[span.part]
    differ = np.flatnonzero(drawn != found)
    if differ.size:
        at = int(differ[0])
        raise UserError(
            f"{span.name} says that {what} token {span.at + at}, {int(found[at])}, is token "
            f"{span.offset + at} of sequence {_shown(span.sequence_id)}; that is {int(drawn[at])}"
        )


def _put(message: wire.Datum, name: str, values: np.ndarray[Any, Any]) -> None:
    tensor = wire.Tensor(dense=values.tobytes(), dtype=wire.DTYPE_FLOAT32, shape=[len(values)])
    message.loss_fn_inputs[name].CopyFrom(tensor)


def _shown(text: str) -> str:
    """Return a client's text in a form fit for a message: quoted, escaped and short."""
    return repr(text if len(text) <= 128 else f"{text[:128]}…")
