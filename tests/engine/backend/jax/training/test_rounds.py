"""Micro-batches that run at once: in order, of one program, and apart again afterwards."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.engine.backend.jax.training.conftest import BatchOf, Datum
from tests.engine.conftest import STATIC_SHAPES
from tuneserve_engine.backend.base import MicroBatch
from tuneserve_engine.backend.jax.training.programs import DeviceMicroBatch, ScoredMicroBatch
from tuneserve_engine.backend.jax.training.rounds import joined, parted, rounds_of

BLOCK = STATIC_SHAPES.block


@pytest.fixture
def of(micro_batch_of: BatchOf, datum: Datum) -> Callable[..., MicroBatch]:
    return lambda request, length=5: micro_batch_of((request, datum(request, length)))


def test_a_round_has_up_to_so_many_micro_batches_of_one_width(
    of: Callable[..., MicroBatch],
) -> None:
    narrow = [of(number) for number in range(3)]
    wide = [x._replace(targets=np.zeros((len(x.tokens), 64), np.int32)) for x in narrow[:2]]
    for count, sizes in ((1, [1] * 5), (2, [2, 1, 2]), (4, [3, 2])):
        rounds = list(rounds_of([*narrow, *wide], count))
        assert [len(due) for due in rounds] == sizes
        assert [x.targets.shape[1] for due in rounds for x in due] == [1, 1, 1, 64, 64]
        assert [id(x) for due in rounds for x in due] == [id(x) for x in [*narrow, *wide]]


def test_the_parts_of_a_divided_datum_are_a_round(of: Callable[..., MicroBatch]) -> None:
    other, part = of(0), of(1)
    parts = [part._replace(part=number) for number in range(3)]
    given = [other, *parts, *parts[:2], other, other]
    rounds = list(rounds_of(given, 4))
    assert [[x.part for x in due] for due in rounds] == [[None], [0, 1, 2], [0, 1], [None, None]]


def test_a_round_on_one_device_is_its_micro_batch(of: Callable[..., MicroBatch]) -> None:
    sent = joined([of(2)], 1, BLOCK, 3)
    assert isinstance(sent, DeviceMicroBatch) and sent.layers.blocks.shape == ()
    assert sent.owners.slot[0] == 5


def test_devices_without_a_micro_batch_get_one_without_blocks(
    of: Callable[..., MicroBatch],
) -> None:
    first, second = of(0, 9), of(1)
    sent = joined([first, second], 4, BLOCK, 0)
    assert sent.layers.blocks.tolist() == [2, 1, 0, 0]
    rows = sent.tokens.reshape(4, -1)
    np.testing.assert_array_equal(rows[0], first.tokens)
    np.testing.assert_array_equal(rows[1], second.tokens)
    assert not sent.owners.is_used.reshape(4, -1)[2:].any()
    assert (sent.layers.segment_ids.reshape(4, -1)[2:] == -1).all()


def test_results_are_apart_again() -> None:
    out = ScoredMicroBatch(np.arange(12).reshape(6, 2, 1), np.arange(12).reshape(6, 2))
    parts = parted(out, 3)
    assert [x.loss.tolist() for x in parts] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8, 9], [10, 11]],
    ]
    assert [x.logprobs.shape for x in parts] == [(2, 2, 1)] * 3
