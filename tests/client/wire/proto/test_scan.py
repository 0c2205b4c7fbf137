"""The head of a message, read without its data, equals the fields that protobuf reads."""

import time

from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_client.wire.proto.scan import RequestHead, read_config, read_head, read_sizes

MESSAGES = st.builds(
    wire.ForwardBackwardRequest,
    model_id=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    seq_id=st.integers(0, 2**31 - 1),
    data=st.lists(st.builds(wire.Datum), max_size=3),
    loss_fn=st.sampled_from(["", "cross_entropy", "stable_reinforce"]),
    loss_fn_config=st.dictionaries(st.sampled_from(["a", "b"]), st.floats(allow_nan=False)),
    forward_only=st.booleans(),
)


@given(MESSAGES)
def test_the_key_of_a_whole_message_is_read(message):
    head = read_head(message.SerializeToString())
    assert head == RequestHead(
        message.model_id or None, message.seq_id or None, True, message.loss_fn
    )


@given(MESSAGES, st.binary(max_size=8), st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=300)
def test_a_message_that_protobuf_accepts_has_the_same_head_here(message, noise, start, cut):
    body = message.SerializeToString()
    body = body[:start] + noise + body[start + cut :]
    head = read_head(body)
    try:
        expected = wire.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        return
    if head.whole:
        assert (head.model_id or "") == expected.model_id
        assert (head.seq_id or 0) % 2**32 == expected.seq_id % 2**32
        assert head.loss == expected.loss_fn or len(expected.loss_fn) > 64


@given(st.binary(max_size=200))
def test_no_input_raises(body):
    read_head(body)


def test_a_truncated_message_still_has_its_key():
    body = wire.ForwardBackwardRequest(model_id="m", seq_id=7, loss_fn="x" * 100)
    assert read_head(body.SerializeToString()[:20]) == RequestHead("m", 7, whole=False)


def test_the_last_of_several_keys_counts():
    first = wire.ForwardBackwardRequest(model_id="a", seq_id=1).SerializeToString()
    second = wire.ForwardBackwardRequest(model_id="b", seq_id=2).SerializeToString()
    assert read_head(first + second) == RequestHead("b", 2, whole=True)


def test_protobuf_groups_are_refused():
    assert read_head(b"\x0b\x0c").whole is False


def test_an_endless_varint_is_refused():
    assert read_head(b"\x10" + b"\x80" * 20).whole is False


def test_reading_a_body_of_millions_of_fields_stops_early():
    started_s = time.process_time()
    assert not read_head(b"\x0a\x01m" + b"\x30\x01" * 8_000_000).whole
    assert time.process_time() - started_s < 1


PARTS = st.builds(
    wire.Datum,
    model_input=st.lists(st.builds(wire.Chunk), max_size=3),
    loss_fn_inputs=st.dictionaries(st.sampled_from("ab"), st.builds(wire.Tensor)),
)


@given(st.lists(PARTS, max_size=3), st.integers(0, 1), st.integers(0, 30))
def test_the_fields_of_a_message_and_of_its_datums_are_counted(data, seq_id, most):
    body = wire.ForwardBackwardRequest(data=data, seq_id=seq_id).SerializeToString()
    expected = seq_id + sum(1 + len(d.model_input) + len(d.loss_fn_inputs) for d in data)
    assert read_sizes(body, most)[0] == min(expected, most)


@given(st.binary(max_size=200))
def test_counting_never_raises(body):
    assert 0 <= read_sizes(body, 1000)[0] <= 200


LENGTHS = st.integers(0, 600_000) | st.integers(4090, 4100) | st.integers(28, 36)


@given(st.lists(st.lists(LENGTHS, max_size=3), max_size=4), st.integers(0, 1))
@example([[size] for size in range(28, 36)], 0)
@example([[size] for size in range(4090, 4100)], 0)
@example([[524_285, 524_287], [524_288], [524_289]], 0)
@settings(max_examples=50)
def test_the_length_of_a_datum_is_the_sum_of_its_chunks(data, seq_id):
    body = wire.ForwardBackwardRequest(seq_id=seq_id, loss_fn="ppo")
    for lengths in data:
        datum = body.data.add()
        datum.loss_fn_inputs["advantages"].dense = bytes(12)
        for length in lengths:
            datum.model_input.add().encoded_text.tokens = bytes(4 * length)
    _, found = read_sizes(body.SerializeToString(), 100)
    assert found == [sum(lengths) for lengths in data]


@given(st.binary(max_size=200), st.integers(0, 20))
def test_measuring_data_ends_and_never_raises(body, most):
    fields, lengths = read_sizes(body, most)
    assert len(lengths) <= fields <= most and all(0 <= length <= 200 for length in lengths)


def test_measuring_a_body_of_millions_of_fields_stops_early():
    body = wire.ForwardBackwardRequest(data=[wire.Datum()]).SerializeToString()
    started_s = time.process_time()
    assert read_sizes(body * 8_000_000, 1000) == (1000, [0] * 1000)
    _, lengths = read_sizes(b"\x1a\x80\x80\x80\x07" + b"\x0a\x00" * 8_000_000, 1000)
    assert len(lengths) == 1
    assert time.process_time() - started_s < 1


@given(MESSAGES, st.dictionaries(st.sampled_from(["loss_id", "b"]), st.text(max_size=200)))
def test_the_config_of_a_message_is_read_alone(message, texts):
    for key, text in texts.items():
        message.loss_fn_config_v2[key].text = text.encode("utf-8", "ignore").decode()
    found = read_config(message.SerializeToString(), 4096)
    expected = wire.ForwardBackwardRequest(loss_fn_config_v2=message.loss_fn_config_v2)
    assert wire.ForwardBackwardRequest.FromString(found) == expected


def test_a_config_of_many_bytes_is_not_read():
    message = wire.ForwardBackwardRequest()
    message.loss_fn_config_v2["loss_id"].text = "x" * 200
    assert read_config(message.SerializeToString(), 200) is None
