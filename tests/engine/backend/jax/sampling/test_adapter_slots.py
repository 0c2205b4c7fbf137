"""The adapters of decode slots: one is replaced at a time, and no other changes."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.adapters import SMALL
from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights
from tuneserve_engine.backend.jax.sampling.adapter_slots import (
    FrozenAdapter,
    adapter_specs,
    empty_adapters,
    set_slot_adapter,
    weights_bytes,
)
from tuneserve_engine.core.adapter import UNEMBED

RANK, SLOTS = 4, 3


def adapter_of(seed: int) -> FrozenAdapter:
    random = np.random.default_rng(seed)
    specs = adapter_specs(SMALL, RANK).weights
    weights: LoraWeights = jax.tree.map(
        lambda x: jnp.asarray(random.standard_normal(x.shape, np.float32)), specs
    )
    return FrozenAdapter(weights, np.float32(seed))


def test_an_adapter_takes_its_weights_in_float32() -> None:
    """Inputs and outputs by hand, in the order of SMALL: three layers, and the unembedding."""
    numbers = RANK * (3 * (7 + 5 + 7 + 2 + 7 + 2 + 5 + 7) + (7 + 11))
    assert weights_bytes(SMALL, RANK) == 4 * numbers
    assert adapter_of(1).rank_bucket == RANK


def test_a_slot_takes_an_adapter_and_the_others_keep_theirs() -> None:
    adapters = empty_adapters(adapter_of(1).weights, slots=SLOTS)
    assert not any(x.any() for x in jax.tree.leaves(adapters))
    for slot, seed in ((0, 5), (2, 7), (0, 6)):
        adapters = set_slot_adapter(adapters, jnp.int32(slot), adapter_of(seed))
    assert adapters.scale.tolist() == [6.0, 0.0, 7.0]
    for slot, seed in ((0, 6), (2, 7)):
        weights = adapter_of(seed).weights
        for layer in range(3):
            row = adapters.of_layer(layer)
            np.testing.assert_array_equal(row.a["q_proj"][slot], weights.a["q_proj"][layer])
            np.testing.assert_array_equal(row.b["o_proj"][slot], weights.b["o_proj"][layer])
        row = adapters.of_unembedding()
        np.testing.assert_array_equal(row.a[UNEMBED][slot], weights.a[UNEMBED])
    assert not any(x[1].any() for x in jax.tree.leaves(adapters))


def test_a_single_row_has_an_axis_for_the_row() -> None:
    row = adapter_of(5).one_row()
    assert row.a["q_proj"].shape == (3, 1, 7, RANK)
    assert row.b[UNEMBED].shape == (1, RANK, 11)
    assert row.scale.tolist() == [5.0]
