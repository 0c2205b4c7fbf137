"""Gradients of bins on several devices are added in the order of the devices."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.adapters import SMALL
from tests.support.compiled import memory_of
from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights
from tuneserve_engine.backend.jax.mesh import OWN, WHOLE, DeviceMesh, Parts
from tuneserve_engine.backend.jax.training.adapter_slots import copy_gradient, new_gradient_slots
from tuneserve_engine.backend.jax.training.gradient_sums import sum_gradients

DEVICES, SLOTS, RANK = 4, 3, 4


@pytest.fixture(scope="module")
def mesh() -> DeviceMesh:
    return DeviceMesh(jax.local_devices()[:DEVICES])


def gradients(seed: int, like: Any) -> Any:
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), like)


@pytest.mark.parametrize("holders", [(0,), (2,), (1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("is_continued", [False, True])
def test_a_sum_has_the_bits_of_adding_one_device_after_the_other(
    holders: Sequence[int], is_continued: bool, mesh: DeviceMesh
) -> None:
    """Compared with a loop in NumPy. Afterwards every device has the sum, in this slot alone."""
    own = jax.eval_shape(lambda: new_gradient_slots(SMALL, RANK, SLOTS))
    each = [gradients(number, own) for number in range(DEVICES)]
    together = mesh.put(jax.tree.map(lambda *x: np.concatenate(x), *each), OWN)
    earlier = None
    if is_continued:
        earlier = jax.tree.map(lambda x: x[:, 0], gradients(9, own))
    parts = Parts((OWN, WHOLE, WHOLE, WHOLE), OWN)
    holds = np.isin(np.arange(DEVICES), holders)
    found = jax.jit(mesh.on_each(sum_gradients, parts))(
        together, np.int32(1), holds, mesh.put(earlier)
    )
    for index, leaf in enumerate(jax.tree.leaves(found)):
        own_parts = [jax.tree.leaves(x)[index] for x in each]
        terms = [own_parts[number][:, 1] for number in holders]
        if is_continued:
            terms.insert(0, jax.tree.leaves(earlier)[index])
        want = reduce(np.add, terms)
        for number, got in enumerate(np.split(np.asarray(leaf), DEVICES)):
            np.testing.assert_array_equal(got[:, 1], want)
            np.testing.assert_array_equal(got[:, [0, 2]], own_parts[number][:, [0, 2]])


def test_sums_work_in_place_with_room_for_a_layer_of_each_device(mesh: DeviceMesh) -> None:
    """Temporary memory is that of a matrix in one layer, from every device, and of its sum."""
    own = jax.eval_shape(lambda: new_gradient_slots(SMALL, RANK, SLOTS))
    parts = Parts((OWN, WHOLE, WHOLE, WHOLE), OWN)
    program = jax.jit(
        mesh.on_each(sum_gradients, parts),
        in_shardings=mesh.sharding(parts.arguments),
        donate_argnums=0,
    )
    earlier = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype), own)
    holds = np.ones(DEVICES, np.bool_)
    memory = memory_of(program.lower(mesh.of_all(own), np.int32(1), holds, earlier))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(own))
    layer = max(x.size * x.dtype.itemsize // x.shape[0] // SLOTS for x in jax.tree.leaves(own))
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes <= 2 * DEVICES * layer + 4096


def test_a_copy_is_that_of_every_device(mesh: DeviceMesh) -> None:
    one = gradients(0, jax.eval_shape(lambda: new_gradient_slots(SMALL, RANK, SLOTS)))
    together = mesh.put(jax.tree.map(lambda x: np.concatenate([x] * DEVICES), one), OWN)
    copied = jax.jit(mesh.on_each(copy_gradient, Parts((OWN, WHOLE), WHOLE)))(together, np.int32(2))
    assert isinstance(copied, LoraWeights)
    for got, want in zip(jax.tree.leaves(copied), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(got, want[:, 2])
