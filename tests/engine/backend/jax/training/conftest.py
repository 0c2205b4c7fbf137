"""A micro-batch of three requests, and its results."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from tests.engine.backend.jax.training.packed_case import ADAPTERS, TINY, Ran, model_of, run
from tests.engine.conftest import Row
from tuneserve_engine.backend.base import MicroBatch

Datum = Callable[..., Row]
BatchOf = Callable[..., MicroBatch]


@pytest.fixture(scope="module")
def requests(datum: Datum) -> dict[int, list[Row]]:
    """Each slot's datums, of odd lengths: over blocks, over chunks, and several in a block."""
    random = np.random.default_rng(9)
    drawn = {
        "old_logprobs": random.uniform(-6, -2, 19).tolist(),
        "advantages": random.choice([0.0, -1.3, 0.7], 19).tolist(),
    }
    return {
        0: [datum(1, 21), datum(2, 5), datum(3, 7)],
        1: [datum(4, 37)],
        2: [datum(5, 3), datum(6, 19, "importance_sampling", **drawn)],
    }


@pytest.fixture(scope="module")
def mixed(micro_batch_of: BatchOf, requests: dict[int, list[Row]]) -> MicroBatch:
    """13 blocks of 16: the last chunk in use is half full, and the first request has two bins."""
    first, second, third = requests.values()
    return micro_batch_of((0, *first[:2]), (0, first[2]), (1, *second), (2, *third))


@pytest.fixture(scope="module")
def ran(mixed: MicroBatch) -> Callable[[str], Ran]:
    """The mixed micro-batch under each policy, run once."""
    return cache(lambda remat: run(model_of(TINY, remat), ADAPTERS, mixed))
