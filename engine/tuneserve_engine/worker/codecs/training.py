"""The codec of ``forward_backward``: bodies to checked arrays, results to bytes.

Everything a client can get wrong in a datum is refused here, before the device, with the field, the
value and the limit. N is the number of input tokens of a datum, K the targets per position. NumPy
and protobuf only.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_client.wire.proto.scan import read_sizes
from tuneserve_engine.backend.base import LOSS_NAMES, FloatArray, IntArray
from tuneserve_engine.core import provenance
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.errors import UserError, shown
from tuneserve_engine.custom_loss.evaluate import LossResult
from tuneserve_engine.custom_loss.graph import CustomLoss
from tuneserve_engine.worker.codecs import custom_losses, input_names

MAX_TARGETS = 64
"""The most targets per position that ``cross_entropy`` accepts."""

MAX_DATUMS = 1024
"""The most datums in one request; the SDK splits at the same number."""

MAX_TOKENS = 2_000_000
"""The most input tokens of one request."""

MAX_FIELDS = provenance.MAX_FIELDS
"""The most fields of a request and its datums: ten in each of 1,024 datums, and many chunks."""

MAX_TARGET_CELLS = 1 << 24
"""The most targets of one request, as padded by the static shapes: few bytes can name many targets,
and each takes four bytes in every array of targets, in the answer too."""

MAX_NAMED_ELEMENTS = 1 << 25
"""The most numbers in the inputs of a custom loss, over all datums of a request."""

_DTYPES: dict[int, np.dtype[Any]] = {
    wire.DTYPE_FLOAT32: np.dtype("<f4"),
    wire.DTYPE_INT64: np.dtype("<i8"),
    wire.DTYPE_INT32: np.dtype("<i4"),
    wire.DTYPE_BFLOAT16: np.dtype("<u2"),
}


@dataclass(frozen=True)
class LossSpec:
    """The inputs of a loss, required and optional, and its config keys with their defaults."""

    inputs: tuple[str, ...]
    optional: tuple[str, ...]
    config: Mapping[str, float]


_POLICY = ("logprobs", "advantages")
_CLIPS = ("clip_low_threshold", "clip_high_threshold")
_RATIO_BOUNDS = dict(zip(_CLIPS, (0.8, 1.2), strict=True))
LOSS_SPECS: dict[str, LossSpec] = dict(
    zip(
        LOSS_NAMES,
        (
            LossSpec((), ("weights",), {}),
            LossSpec(_POLICY, (), {}),
            LossSpec(_POLICY, _CLIPS, _RATIO_BOUNDS),
            LossSpec(_POLICY, _CLIPS, dict(zip(_CLIPS, (0.0, 4.0), strict=True))),
            LossSpec(_POLICY, (), {"beta": 0.01}),
            LossSpec((*_POLICY, "sequence_ratio_mask"), _CLIPS, _RATIO_BOUNDS),
            LossSpec(
                (*_POLICY, provenance.MASK), (), {"clip_high_threshold": 2.0, "kl_coeff": 0.0}
            ),
        ),
        strict=True,
    )
)


_READ: dict[str, list[str]] = {
    loss: [
        "target_tokens",
        *(name for name in (*spec.inputs, *spec.optional) if name != provenance.MASK),
    ]
    for loss, spec in LOSS_SPECS.items()
}
"""By loss: the inputs of a datum that the loss reads and a client sends."""

_SPECS = {**LOSS_SPECS, custom_losses.LOSS: LossSpec((), (), {})}
_KNOWN_INPUTS = {name for names in _READ.values() for name in names}
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class DecodedDatum:
    """One checked training example.

    ``per_token`` holds [N] inputs of the policy losses, ``named`` the inputs of a custom loss, in
    their own shapes.
    """

    tokens: IntArray  # [N]
    targets: IntArray  # [N, K]
    weights: FloatArray  # [N, K]
    flat: bool  # targets came as [N]; the answer has that shape too
    per_token: dict[str, FloatArray] = field(default_factory=dict)
    named: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingData:
    """One decoded ``forward_backward`` request.

    ``custom`` is the graph of a custom loss, and ``computed`` what the graph gave: then the weights
    are those with which ``cross_entropy`` has the gradient of the custom loss.
    """

    loss: str
    config: dict[str, float]
    forward_only: bool
    data: list[DecodedDatum]
    custom: CustomLoss | None = None
    computed: LossResult | None = None


def decode_request(payload: bytes, info: BaseModelInfo) -> TrainingData:
    """Return the request's checked data. Raises ``UserError`` if the model cannot train on it."""
    fields, _ = read_sizes(payload, MAX_FIELDS + 1)
    if fields > MAX_FIELDS:
        raise UserError(
            f"the request has more than {MAX_FIELDS} chunks, inputs and spans in its data; split it"
        )
    try:
        request = wire.ForwardBackwardRequest.FromString(payload)
    except DecodeError as error:
        raise UserError(f"the body is no ForwardBackwardRequest message: {error}") from error
    custom = None
    if request.loss_fn == custom_losses.LOSS:
        custom = custom_losses.loss_of(request)
        loss, config = custom_losses.LOSS, dict[str, float]()
        read = ["target_tokens", *(each.name for each in custom.inputs[1:])]
    else:
        loss, config = _loss_and_config(request)
        read = _READ[loss]
    if not 1 <= len(request.data) <= MAX_DATUMS:
        raise UserError(
            f"data has {len(request.data)} datums; a request takes 1 to {MAX_DATUMS}; split it"
        )
    names = {name for datum in request.data for name in datum.loss_fn_inputs}
    if unread := names.difference(read, [provenance.MASK]):
        input_names.check_unread(unread, request.data, loss, read, _KNOWN_INPUTS)

    data: list[DecodedDatum] = []
    tokens = cells = elements = 0
    for i, message in enumerate(request.data):
        datum = _datum(f"data[{i}]", message, loss, info)
        if custom is not None:
            named = custom_losses.named_inputs(f"data[{i}]", message, custom, _tensor)
            custom_losses.check_targets(f"data[{i}]", datum.flat, custom)
            elements += sum(each.size for each in named.values())
            if elements > MAX_NAMED_ELEMENTS:
                raise UserError(
                    f"data[:{i + 1}] has {elements} numbers in the inputs of its custom loss; a "
                    f"request takes up to {MAX_NAMED_ELEMENTS}; split it"
                )
            datum = replace(datum, named=named)
        data.append(datum)
        tokens += datum.tokens.size
        if tokens > MAX_TOKENS:
            raise UserError(
                f"data[:{i + 1}] has {tokens} tokens; a request takes up to {MAX_TOKENS}; split it"
            )
        cells += len(datum.tokens) * (1 if datum.targets.shape[1] == 1 else MAX_TARGETS)
        if cells > MAX_TARGET_CELLS:
            raise _too_many_cells(f"data[:{i + 1}]", cells)
    return TrainingData(loss, config, request.forward_only, data, custom)


def _too_many_cells(name: str, cells: int) -> UserError:
    return UserError(
        f"{name} has {cells} targets; a request takes up to {MAX_TARGET_CELLS}, and "
        f"{MAX_TARGETS} are counted for each position with several; split it"
    )


def _loss_and_config(request: wire.ForwardBackwardRequest) -> tuple[str, dict[str, float]]:
    spec = LOSS_SPECS.get(request.loss_fn)
    if spec is None:
        raise UserError(
            f"loss_fn {shown(request.loss_fn)} is not offered here; use one of "
            + ", ".join((*LOSS_SPECS, custom_losses.LOSS))
        )
    given: dict[str, float] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise UserError(
                f"loss_fn_config[{shown(key)}] is {shown(value.text)}; it takes a number"
            )
        given[key] = value.number
    for key, number in given.items():
        if key not in spec.config:
            raise UserError(
                f"loss_fn_config key {shown(key)} is unknown to {request.loss_fn}; it takes "
                f"{', '.join(spec.config) or 'no config'}"
            )
        if not abs(number) <= _LARGEST:
            raise UserError(f"loss_fn_config[{key!r}] is {number}; it must be a finite float32")
    if request.loss_fn == provenance.LOSS:
        provenance.check_config({**spec.config, **given})
    return request.loss_fn, {**spec.config, **given}


def _datum(name: str, datum: wire.Datum, loss: str, info: BaseModelInfo) -> DecodedDatum:
    tokens = _tokens(name, datum.model_input, info)
    inputs = datum.loss_fn_inputs
    spec = _SPECS[loss]
    missing = [key for key in ("target_tokens", *spec.inputs) if key not in inputs]
    if missing:
        raise UserError(f"{name}.loss_fn_inputs lacks {', '.join(missing)}, which {loss} needs")
    sent = _targets(f"{name}.target_tokens", inputs["target_tokens"], len(tokens), loss, info)

    floats: dict[str, FloatArray] = {}
    for key in (*spec.inputs, *spec.optional):
        if key not in inputs:
            continue
        values = _tensor(f"{name}.{key}", inputs[key]).astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            at = int(bad[0])
            raise UserError(
                f"{name}.{key} is {values.flat[at]} at position {at}; values must be finite"
            )
        if values.shape != sent.shape:
            expected = (
                f"; target_tokens has {list(sent.shape)}; they must agree"
                if key == "weights"
                else f" for {len(tokens)} input tokens; expected {list(sent.shape)}"
            )
            raise UserError(f"{name}.{key} has shape {list(values.shape)}{expected}")
        floats[key] = values

    if loss == provenance.LOSS:
        provenance.check_advantages(name, floats)
    targets = sent.reshape(len(tokens), -1)
    if "weights" in floats:
        weights = floats.pop("weights").reshape(targets.shape)
    else:  # the policy losses read none
        weights = np.full_like(targets, 1 if loss == "cross_entropy" else 0, np.float32)
    return DecodedDatum(tokens, targets, weights, sent.ndim == 1, floats)


def _tokens(name: str, chunks: Iterable[wire.Chunk], info: BaseModelInfo) -> IntArray:
    """Return all text chunks of a datum, in order, as [N] int32."""
    parts = []
    for i, chunk in enumerate(chunks):
        which = chunk.WhichOneof("chunk")
        if which != "encoded_text":
            raise UserError(
                f"{name}.model_input[{i}] is {which or 'empty'}; {info.name} reads encoded_text"
            )
        raw = chunk.encoded_text.tokens
        if len(raw) % 4:
            raise UserError(f"{name}.model_input[{i}] has {len(raw)} bytes, no whole int32 tokens")
        parts.append(np.frombuffer(raw, "<i4"))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not 1 <= len(tokens) <= info.context_length:
        raise UserError(
            f"{name}.model_input has {len(tokens)} tokens; {info.name} takes 1 to "
            f"{info.context_length}; shorten or split the datum"
        )
    if tokens.min() < 0 or tokens.max() >= info.vocab_size:
        raise _unknown_token(f"{name}.model_input", tokens, info)
    return tokens.astype(np.int32)


def _unknown_token(name: str, ids: np.ndarray[Any, Any], info: BaseModelInfo) -> UserError:
    at = int(np.flatnonzero((ids < 0) | (ids >= info.vocab_size))[0])
    return UserError(
        f"{name} has token {int(ids.flat[at])} at position {at}; tokens of {info.name} are "
        f"0 to {info.vocab_size - 1}; check that the tokenizer is the base model's"
    )


def _targets(name: str, tensor: wire.Tensor, n: int, loss: str, info: BaseModelInfo) -> IntArray:
    """Return the targets as they were sent: [N] or [N, K]."""
    targets = _tensor(name, tensor)
    if not np.issubdtype(targets.dtype, np.integer):
        raise UserError(f"{name} has dtype {targets.dtype}; token ids are int64")
    if targets.shape[0] != n:
        raise UserError(
            f"{name} has shape {list(targets.shape)} for {n} input tokens; "
            f"expected [{n}] or [{n}, K]"
        )
    if targets.ndim == 2 and loss not in ("cross_entropy", custom_losses.LOSS):
        raise UserError(f"{name} has shape {list(targets.shape)}; {loss} takes [{n}]")
    if targets.ndim == 2 and not 1 <= targets.shape[1] <= MAX_TARGETS:
        raise UserError(f"{name} has {targets.shape[1]} targets per position; limit {MAX_TARGETS}")
    if targets.min() < 0 or targets.max() >= info.vocab_size:
        raise _unknown_token(name, targets, info)
    return targets.astype(np.int32)


def _tensor(name: str, tensor: wire.Tensor) -> np.ndarray[Any, Any]:
    """Return the tensor as a dense array.

    Unlisted cells of a sparse tensor are 0. A tensor without a shape is 1-D.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UserError(f"{name} has dtype number {tensor.dtype}; use float32 or int64")
    shape = tuple(tensor.shape[:3])  # a hostile one has millions
    if len(shape) > 2 or min(shape, default=1) < 1:
        raise UserError(
            f"{name} has shape {list(shape)} in {len(tensor.shape)} dimensions; tensors here have "
            "one or two, each at least 1"
        )
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return _dense_from_csr(name, tensor.sparse_csr, dtype, shape)
    values = _array(name, tensor.dense, dtype)
    if shape and math.prod(shape) != values.size:
        raise UserError(f"{name} has shape {list(shape)} but {values.size} values")
    return values.reshape(shape) if shape else values


def _array(name: str, raw: bytes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if len(raw) % dtype.itemsize:
        raise UserError(
            f"{name} has {len(raw)} bytes, no whole number of {dtype.itemsize}-byte values"
        )
    values = np.frombuffer(raw, dtype)
    if dtype.kind == "u":  # bfloat16 is the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def _dense_from_csr(
    name: str, csr: wire.SparseCsr, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    rows_at = _array(f"{name}.crow_indices", csr.crow_indices, np.dtype("<i8"))
    columns = _array(f"{name}.col_indices", csr.col_indices, np.dtype("<i8"))
    values = _array(f"{name}.values", csr.values, dtype)
    # The bytes sent bound the number of rows; the number of columns needs a bound of its own.
    if len(shape) != 2 or shape[0] + 1 != rows_at.size or shape[1] > MAX_TARGETS:
        raise UserError(
            f"{name} is sparse with shape {list(shape)} and {rows_at.size} row offsets; expected "
            f"[N, K], N + 1 offsets and K up to {MAX_TARGETS}"
        )
    cells = shape[0] * (1 if shape[1] == 1 else MAX_TARGETS)
    if cells > MAX_TARGET_CELLS:
        raise _too_many_cells(f"{name} of shape {list(shape)}", cells)
    # Compare the offsets, do not subtract them: differences of hostile offsets wrap around.
    falls = (rows_at[1:] < rows_at[:-1]).any()
    if rows_at[0] != 0 or rows_at[-1] != values.size or falls:
        raise UserError(f"{name} has row offsets that do not rise from 0 to {values.size} values")
    if columns.size != values.size or ((columns < 0) | (columns >= shape[1])).any():
        raise UserError(
            f"{name} has column indices that are not {values.size} numbers of 0 to {shape[1] - 1}"
        )
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows_at)), columns] = values
    return dense


def encode_output(
    logprobs: Sequence[FloatArray], loss_sum: float, metrics: Mapping[str, float] | None = None
) -> bytes:
    """Return the ``ForwardBackwardOutput`` message: each datum's logprobs, shaped like its targets.

    One record covers consecutive datums of one trailing shape; ``loss:sum`` is always there. Equal
    arguments give equal bytes in every process, because a replay is compared with the first answer.
    """
    records = []
    for trailing, group in groupby(logprobs, key=lambda array: array.shape[1:]):
        arrays = [np.ascontiguousarray(array, "<f4") for array in group]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
        batched = wire.BatchedTensor(
            data=b"".join(array.tobytes() for array in arrays),
            offsets=offsets.tobytes(),
            dtype=wire.DTYPE_FLOAT32,
            trailing_shape=trailing,
        )
        records.append(
            wire.ArrayRecord(
                type_tag="ArrayRecord", fields={"logprobs": batched}, num_datums=len(arrays)
            )
        )
    return wire.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=records,
        metrics={"loss:sum": loss_sum, **(metrics or {})},
    ).SerializeToString(deterministic=True)
