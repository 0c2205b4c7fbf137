"""The outputs of a running batch, the requests that are not finite, and the gaps of policies."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.conftest import Row
from tuneserve_engine.backend.base import MicroBatch, TrainBatch
from tuneserve_engine.backend.jax.training.adapter_slots import (
    new_adapter_slots,
    new_gradient_slots,
)
from tuneserve_engine.backend.jax.training.programs import ScoredMicroBatch
from tuneserve_engine.backend.jax.training.running_batch import RunningBatch, TrainingCounts
from tuneserve_engine.backend.jax.training.slots import BatchSlots, RankSlots

POLICY = "importance_sampling"


def running_batch(micro_batch: MicroBatch, claimed: BatchSlots) -> RunningBatch:
    """Two requests of one micro-batch, finite so far."""
    batch = TrainBatch(("a", "b"), True, [micro_batch])
    return RunningBatch(batch, claimed, np.ones(2, np.bool_), TrainingCounts())


@pytest.fixture
def running(micro_batch_of: Any) -> Iterator[RunningBatch]:
    """Two requests, of two tokens each, in blocks 0 and 1 of eight tokens."""
    row = Row([1, 2], [2, 3], weights=[1.0, 1.0])
    micro_batch = micro_batch_of((0, row), (1, row))
    with RankSlots(
        8, 2, partial(new_adapter_slots, {}, 8, 2), partial(new_gradient_slots, {}, 8, 2)
    ).claimed(2) as claimed:
        yield running_batch(micro_batch, claimed)


def scored(n: int, **bad: int) -> ScoredMicroBatch:
    """Logprobs of -1 and losses of 1 in blocks of eight, but for a NaN at the named tokens."""
    arrays = {"logprobs": np.full((n, 1), -1, np.float32), "loss": np.ones(n, np.float32)}
    for name, token in bad.items():
        arrays[name][token] = np.nan
    return ScoredMicroBatch(
        jnp.asarray(arrays["logprobs"].reshape(-1, 8, 1)),
        jnp.asarray(arrays["loss"].reshape(-1, 8)),
    )


@pytest.mark.parametrize(
    ("bad", "finite"),
    [
        ({}, [True, True]),
        ({"logprobs": 1}, [False, True]),
        ({"loss": 8}, [True, False]),
        ({"loss": 1, "logprobs": 9}, [False, False]),
        ({"loss": 2, "logprobs": 15}, [True, True]),  # padding
        ({"loss": 40}, [True, True]),  # an unused block
    ],
)
def test_a_request_is_finite_if_all_its_own_tokens_are(
    bad: dict[str, int], finite: list[bool], running: RunningBatch
) -> None:
    (micro_batch,) = running.batch.micro_batches
    assert running.finite.tolist() == [True, True]
    running.add_outputs([micro_batch], scored(len(micro_batch.tokens), **bad), 1)
    assert running.finite.tolist() == finite


def test_a_request_stays_not_finite_and_outputs_keep_their_order(running: RunningBatch) -> None:
    (micro_batch,) = running.batch.micro_batches
    n = len(micro_batch.tokens)
    running.add_outputs([micro_batch], scored(n, loss=0), 1)
    running.add_outputs([micro_batch], scored(n), 1)
    outputs = running.outputs
    assert running.finite.tolist() == [False, True]
    assert (outputs[1].logprobs.shape, outputs[1].loss.shape) == ((n, 1), (n,))
    assert np.isnan(outputs[0].loss[0]) and not np.isnan(outputs[1].loss[0])


def test_gaps_are_those_of_policy_losses_with_an_advantage(micro_batch_of: Any) -> None:
    policy = Row(
        [1, 2, 3],
        [2, 3, 4],
        POLICY,
        inputs={"old_logprobs": [-1.5, -5.0, -0.25], "advantages": [1.0, 0.0, -2.0]},
    )
    plain = Row([1, 2], [2, 3], weights=[1.0, 1.0])
    micro_batch = micro_batch_of((0, policy), (1, plain))
    with RankSlots(
        8, 2, partial(new_adapter_slots, {}, 8, 2), partial(new_gradient_slots, {}, 8, 2)
    ).claimed(2) as claimed:
        batch = running_batch(micro_batch, claimed)
        batch.add_outputs([micro_batch], scored(len(micro_batch.tokens)), 1)
        assert (batch.counts.policy_tokens, batch.counts.policy_gap) == (2, 0.5 + 0.75)
        batch.add_outputs([micro_batch], scored(len(micro_batch.tokens), logprobs=0), 1)
    assert (batch.counts.policy_tokens, batch.counts.policy_gap) == (3, 0.5 + 0.75 + 0.75)
