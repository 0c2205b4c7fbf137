"""Datums and results as messages, and requests of a size that the server takes."""

import numpy as np

from tuneserve_client import Datum
from tuneserve_client.codec import MAX_BYTES, chunks, decode_output, encode_data, joined
from tuneserve_client.results import TrainOutput
from tuneserve_client.wire.proto import wire_pb2 as wire


def test_arrays_are_packed_as_the_protocol_requires() -> None:
    datum = Datum([5, 6], [[6, 1], [7, 2]], weights=np.eye(2), advantages=[1, 2])
    (message,) = encode_data([datum])
    assert message.model_input[0].encoded_text.tokens == b"\5\0\0\0\6\0\0\0"
    targets, weights, advantages = (
        message.loss_fn_inputs[name] for name in ("target_tokens", "weights", "advantages")
    )
    assert targets.dense == bytes([6, *[0] * 7, 1, *[0] * 7, 7, *[0] * 7, 2, *[0] * 7])
    assert (targets.dtype, list(targets.shape)) == (wire.DTYPE_INT64, [2, 2])
    assert weights.dense == bytes.fromhex("0000803f" + "00" * 8 + "0000803f")
    assert (weights.dtype, list(weights.shape)) == (wire.DTYPE_FLOAT32, [2, 2])
    assert (advantages.dtype, list(advantages.shape)) == (wire.DTYPE_FLOAT32, [2])


def test_outputs_of_different_widths_and_half_floats_are_read() -> None:
    """Two records: datums with one target per position in bfloat16, and one with two in float32."""
    half = wire.BatchedTensor(
        data=bytes.fromhex("803f0040" + "40c0"),  # the values 1, 2 and -3
        offsets=np.array([0, 4, 6], "<i8").tobytes(),
        dtype=wire.DTYPE_BFLOAT16,
    )
    wide = wire.BatchedTensor(
        data=np.array([1, 2, 3, 4], "<f4").tobytes(),
        offsets=np.array([0, 16], "<i8").tobytes(),
        dtype=wire.DTYPE_FLOAT32,
        trailing_shape=[2],
    )
    body = wire.ForwardBackwardOutput(
        loss_fn_outputs=[
            wire.ArrayRecord(fields={"logprobs": half}, num_datums=2),
            wire.ArrayRecord(fields={"logprobs": wide}, num_datums=1),
        ],
        metrics={"loss:sum": 2.5},
    )
    output = decode_output(body.SerializeToString())
    assert [each.tolist() for each in output.logprobs] == [[1, 2], [-3], [[1, 2], [3, 4]]]
    assert output.loss == 2.5


def test_requests_are_split_at_their_size_limit() -> None:
    """Each datum has 1.6 MB: 100,000 tokens of 4 bytes, their targets of 8 and weights of 4."""
    big = Datum(np.zeros(100_000, int), np.zeros(100_000, int), np.ones(100_000))
    assert big.size_bytes == 1_600_000
    assert [len(chunk) for chunk in chunks([big] * 7)] == [3, 3, 1]
    huge = Datum(np.zeros(10**6, int), np.zeros(10**6, int))
    assert huge.size_bytes > MAX_BYTES
    assert [len(chunk) for chunk in chunks([big, huge, big])] == [1, 1, 1]


def test_the_end_of_a_metrics_name_says_how_its_parts_are_joined() -> None:
    """Of three datums and one, the mean of 1 and 5 is (3 * 1 + 1 * 5) / 4 = 2."""
    logprobs = [np.full(2, -0.5, np.float32)] * 4
    first = {"loss:sum": 1.0, "a:mean": 1.0, "a:min": 1.0, "a:max": 1.0, "a:other": 1.0}
    second = {"loss:sum": 5.0, "a:mean": 5.0, "a:min": 5.0, "a:max": 5.0, "b:sum": 5.0}
    output = joined([TrainOutput(logprobs[:3], first), TrainOutput(logprobs[3:], second)])
    assert len(output.logprobs) == 4
    assert output.metrics == {"loss:sum": 6.0, "a:mean": 2.0, "a:min": 1.0, "a:max": 5.0}
