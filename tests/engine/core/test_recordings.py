"""Recordings of samples survive their encoding, in the byte order of the wire."""

import numpy as np

from tuneserve_engine.core.recordings import (
    RecordedSequence,
    Recording,
    decode,
    encode,
    sequence_id,
)


def test_a_recording_survives_its_encoding_in_little_endian_numbers() -> None:
    drawn = [
        (np.array([1, 256], np.int64), np.array([1.0, -2.0], np.float64)),
        (np.array([], np.int32), np.array([], np.float32)),
    ]
    first = RecordedSequence(
        bytes.fromhex("01000000" + "00010000"), bytes.fromhex("0000803f" + "000000c0")
    )
    assert decode(encode(7, drawn)) == Recording(7, [first, RecordedSequence(b"", b"")])


def test_a_sequence_is_named_by_its_session_request_and_index() -> None:
    assert sequence_id("s-1:sample:0", 5, 2) == "s-1:sample:0:5:2"
