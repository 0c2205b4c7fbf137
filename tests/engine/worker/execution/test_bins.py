"""Datums longer than a micro-batch are divided among devices; every token stays in its place.

``test_packing`` has the bins of all other datums.
"""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.worker.execution.test_packing import BLOCK, alone, sft, training_datum
from tuneserve_engine.backend.base import MicroBatchOutput
from tuneserve_engine.backend.jax.training.rounds import rounds_of
from tuneserve_engine.core.shapes import StaticShapes, multiple_from
from tuneserve_engine.worker.execution.packing import PackingRequest, pack, unpack

DEVICES = 4
SHAPES = StaticShapes(
    context_length=200,
    block=BLOCK,
    chunk=8,
    requested_tokens=60,
    request_slots=3,
    rank_buckets=(4, 8),
    devices_per_datum=DEVICES,
)
"""A micro-batch has 64 tokens, and a bin up to 32."""


def test_a_micro_batch_has_room_for_a_part_of_the_context() -> None:
    assert SHAPES.micro_batch_tokens == 64
    assert replace(SHAPES, context_length=300).micro_batch_tokens == 80  # 75, in whole chunks
    assert replace(SHAPES, devices_per_datum=1).micro_batch_tokens == 200


def test_a_long_datum_has_a_part_on_each_device() -> None:
    """149 tokens are 38 blocks: 10 for each device but the last, in whole chunks of 2 blocks."""
    request = alone(30, 149, 3)
    (batch,) = pack([alone(64), request], SHAPES, 0, lambda *_: None, DEVICES)
    rounds = [[x.part for x in due] for due in rounds_of(batch.batch.micro_batches, DEVICES)]
    assert rounds == [[0, 1, 2, 3], [None, None, None]]
    parts = list(batch.batch.micro_batches)[:4]
    assert [x.blocks for x in parts] == [10, 10, 10, 8]
    datum = request.data.data[1]
    for number, part in enumerate(parts):
        own = slice(40 * number, min(40 * (number + 1), 149))
        count = own.stop - own.start
        np.testing.assert_array_equal(part.tokens[:count], datum.tokens[own])
        np.testing.assert_array_equal(part.targets[:count], datum.targets[own])
        np.testing.assert_array_equal(part.positions[:count], np.arange(own.start, own.stop))
        assert (part.segment_ids[:count] == 0).all() and (part.segment_ids[count:] == -1).all()
        assert (part.block_request[: part.blocks] == 1).all()
        assert (part.block_request[part.blocks :] == -1).all()
        assert (part.first_visible_block[: part.blocks] == 0).all()
    assert batch.locations[1][1] == (0, 0, 40)
    assert batch.computed[1] == 152 + 40  # the rest is a bin of 36 tokens, in whole chunks
    assert batch.paced_tokens == 4 * 40 + 4 * 64


def test_parts_of_two_datums_are_two_rounds() -> None:
    (batch,) = pack([alone(70, 100)], SHAPES, 0, lambda *_: None, DEVICES)
    rounds = [[x.part for x in due] for due in rounds_of(batch.batch.micro_batches, DEVICES)]
    assert rounds == [[0, 1, 2, 3], [0, 1, 2]]
    assert [x.blocks for x in batch.batch.micro_batches] == [8, 8, 8, 1, 6, 6, 6]


lengths = st.lists(st.integers(1, 200), min_size=1, max_size=5)


@given(st.lists(lengths, min_size=1, max_size=4), st.integers(2, 8))
@settings(deadline=None, max_examples=60)
def test_unpacking_gives_each_datum_its_own_outputs(
    requests: list[list[int]], devices: int
) -> None:
    shapes = replace(SHAPES, devices_per_datum=devices)
    asked = [
        PackingRequest(
            "a", 4, sft(*(training_datum(n, None, 1000 * (i + 1)) for i, n in enumerate(of_one)))
        )
        for of_one in requests
    ]
    for batch in pack(asked, shapes, 0, lambda *_: None, devices):
        longest = [
            max(multiple_from(BLOCK * x.blocks, shapes.chunk) for x in due)
            for due in rounds_of(batch.batch.micro_batches, devices)
        ]
        assert batch.paced_tokens == devices * sum(longest)
        outputs = [
            MicroBatchOutput(x.targets.astype(np.float32), x.targets[:, 0].astype(np.float32))
            for x in batch.batch.micro_batches
        ]
        used = sum((x.segment_ids >= 0).sum() for x in batch.batch.micro_batches)
        assert used == sum(sum(requests[member]) for member in batch.members)
        for index, member in enumerate(batch.members):
            data = asked[member].data
            logprobs, loss = unpack(batch, outputs, index, data)
            for got, datum in zip(logprobs, data.data, strict=True):
                np.testing.assert_array_equal(got, datum.targets[:, 0])
            assert loss == sum(float(datum.targets.sum()) for datum in data.data)
