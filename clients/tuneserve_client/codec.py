"""The codec between arrays and protobuf messages: training requests, and the results of training
and sampling."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tuneserve_client.data import Array, Datum
from tuneserve_client.results import (
    Sample,
    SampleOutput,
    StopReason,
    Top,
    TrainOutput,
)
from tuneserve_client.wire.proto import wire_pb2 as wire

MAX_DATUMS, MAX_BYTES = 1024, 5_000_000
"""The most datums that the server takes in one request, and the most bytes of one request that it
can read while it computes another."""

_DTYPES: dict[int, np.dtype[Any]] = {
    wire.DTYPE_FLOAT32: np.dtype("<f4"),
    wire.DTYPE_INT64: np.dtype("<i8"),
    wire.DTYPE_INT32: np.dtype("<i4"),
}
_STOP_REASONS: dict[int, StopReason] = {
    wire.STOP_REASON_STOP: "stop",
    wire.STOP_REASON_LENGTH: "length",
}
_REDUCES: dict[str, Callable[[list[float]], float]] = {
    "sum": lambda values: float(np.sum(values)),
    "min": min,
    "max": max,
}
LossConfig = Mapping[str, float | str]


# --- training -------------------------------------------------------------------------------------


def chunks(data: Sequence[Datum]) -> Iterator[list[Datum]]:
    """Split the data into requests of a size that the server takes; their gradients add up."""
    chunk: list[Datum] = []
    size = 0
    for datum in data:
        if chunk and (len(chunk) == MAX_DATUMS or size + datum.size_bytes > MAX_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(datum)
        size += datum.size_bytes
    if chunk:
        yield chunk


def encode_data(data: Sequence[Datum]) -> list[wire.Datum]:
    messages = []
    for datum in data:
        tokens = np.ascontiguousarray(datum.tokens, "<i4").tobytes()
        inputs = {}
        for name, array in datum.inputs.items():
            dtype = wire.DTYPE_FLOAT32 if array.dtype.kind == "f" else wire.DTYPE_INT64
            dense = np.ascontiguousarray(array, _DTYPES[dtype]).tobytes()
            inputs[name] = wire.Tensor(dense=dense, dtype=dtype, shape=array.shape)
        text = wire.Chunk(encoded_text=wire.EncodedTextChunk(tokens=tokens))
        messages.append(wire.Datum(model_input=[text], loss_fn_inputs=inputs))
    return messages


def encode_gradient(  # noqa: PLR0913 - the parts of the message
    model_id: str,
    seq_id: int,
    data: Sequence[wire.Datum],
    loss: str,
    config: LossConfig,
    *,
    forward_only: bool,
) -> bytes:
    """Return the encoded ``ForwardBackwardRequest`` message."""
    return wire.ForwardBackwardRequest(
        model_id=model_id,
        seq_id=seq_id,
        data=data,
        loss_fn=loss,
        forward_only=forward_only,
        loss_fn_config_v2={
            name: wire.LossConfigValue(text=value)
            if isinstance(value, str)
            else wire.LossConfigValue(number=value)
            for name, value in config.items()
        },
    ).SerializeToString()


def decode_output(body: bytes) -> TrainOutput:
    """Return the output in a ``ForwardBackwardOutput`` message."""
    message = wire.ForwardBackwardOutput.FromString(body)
    logprobs = [
        array for record in message.loss_fn_outputs for array in _split(record.fields["logprobs"])
    ]
    return TrainOutput(logprobs=logprobs, metrics=dict(message.metrics))


def _split(batched: wire.BatchedTensor) -> Iterator[Array]:
    """Yield the array of each datum."""
    values = _floats(batched.data, batched.dtype)
    width = 2 if batched.dtype == wire.DTYPE_BFLOAT16 else 4
    offsets = np.frombuffer(batched.offsets, "<i8") // width
    for start, end in pairwise(offsets):
        yield values[start:end].reshape(-1, *batched.trailing_shape)


def _floats(data: bytes, dtype: int) -> Array:
    if dtype == wire.DTYPE_BFLOAT16:  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return _array(data, _DTYPES[dtype]).astype(np.float32)


def _array(data: bytes, dtype: str | np.dtype[Any]) -> Array:
    """Return the array as a writable copy."""
    return np.frombuffer(data, dtype).copy()


def joined(outputs: Sequence[TrainOutput]) -> TrainOutput:
    """Return the joint output of all chunks of one call.

    The end of a metric's name says how the metric is reduced: ``sum``, ``min``, ``max``, ``mean``.
    """
    if len(outputs) == 1:
        return outputs[0]
    counts = [len(each.logprobs) for each in outputs]
    metrics = {}
    for name in outputs[0].metrics:
        values = [each.metrics[name] for each in outputs if name in each.metrics]
        kind = name.rpartition(":")[2]
        if len(values) == len(outputs) and kind in ("sum", "min", "max", "mean"):
            metrics[name] = _reduced(kind, values, counts)
    return TrainOutput([array for each in outputs for array in each.logprobs], metrics)


def _reduced(kind: str, values: list[float], counts: list[int]) -> float:
    if kind == "mean":
        return float(np.average(values, weights=counts))
    return _REDUCES[kind](values)


# --- sampling -------------------------------------------------------------------------------------


def decode_samples(body: bytes) -> SampleOutput:
    """Return the samples and scores in a ``SampleResponse`` message."""
    message = wire.SampleResponse.FromString(body)
    prompt: Array | None = None
    if message.HasField("prompt_logprobs"):
        prompt = _array(message.prompt_logprobs, "<f4")
    alternatives = None
    if message.HasField("prompt_alt_tokens"):
        alternatives = Top(
            _dense(message.prompt_alt_tokens.tokens), _dense(message.prompt_alt_tokens.logprobs)
        )
    return SampleOutput(
        samples=[_sample(each) for each in message.sequences],
        prompt_logprobs=prompt,
        top_prompt_logprobs=_top(message, "topk_prompt_logprobs"),
        target_logprobs=_dense(message.target_prompt_logprobs)
        if message.HasField("target_prompt_logprobs")
        else None,
        prompt_alternatives=alternatives,
        cached_tokens=message.prompt_cache_hit_tokens,
    )


def _sample(message: wire.SampledSequence) -> Sample:
    return Sample(
        tokens=np.frombuffer(message.tokens, "<i4").tolist(),
        logprobs=_array(message.logprobs, "<f4"),
        stop_reason=_STOP_REASONS[message.stop_reason],
        top_logprobs=_top(message, "topk_sampled_logprobs"),
    )


def _top(message: Any, field: str) -> Top | None:
    if not message.HasField(field):
        return None
    found = getattr(message, field)
    shape = found.length, found.k
    return Top(
        _array(found.token_ids, "<i4").reshape(shape),
        _array(found.logprobs, "<f4").reshape(shape),
    )


def _dense(tensor: wire.Tensor) -> Array:
    return _array(tensor.dense, _DTYPES[tensor.dtype]).reshape(tuple(tensor.shape))
