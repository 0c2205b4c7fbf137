"""Memory and communication of the chunked head, read from its compiled programs."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from tests.engine.backend.jax.training.lm_head_case import (
    EPS,
    MIXED,
    SMALL,
    J,
    Micro,
    Request,
    Sizes,
    adapters_of,
    head_of,
    micro_of,
    score,
    stale_gradient_slots,
    train,
)
from tuneserve_engine.backend.jax.training.lm_head import HeadAdapters, LmHead


@pytest.mark.acceptance("H2")
@pytest.mark.parametrize("targets", [1, 64])
def test_at_eight_chunks_the_head_takes_a_fifth_of_full_logits_memory(targets: int):
    sizes = Sizes(block=64, hidden=128, vocabulary=16384, targets=targets)
    micro = micro_of([Request(1, 0, (2048,))], sizes, n=32)
    head, adapters = head_of(sizes), adapters_of(sizes)
    donating = jax.jit(train, static_argnums=4, donate_argnums=3)
    chunked = donating.lower(head, micro, adapters, stale_gradient_slots(sizes), 4).compile()

    @partial(jax.grad, argnums=0)
    def full(x: Array, head: LmHead, targets: Array, weights: Array) -> Array:
        normed = x * jax.lax.rsqrt((x**2).mean(axis=1, keepdims=True) + EPS) * head.norm[None]
        z = jnp.einsum("TD,VD->TV", normed, head.unembedding)
        return -(
            jnp.take_along_axis(jax.nn.log_softmax(z, axis=1), targets, axis=1) * weights
        ).sum()

    flat = [x.reshape(2048, -1) for x in (micro.x, micro.targets, micro.inputs.weights)]
    whole = jax.jit(full).lower(flat[0], head, *flat[1:]).compile()

    assert temp_bytes(whole) > 4 * 2048 * 16384
    assert temp_bytes(chunked) <= 0.2 * temp_bytes(whole)


def test_the_gradient_slots_are_updated_in_place():
    """Adapters and gradient slots are larger than a chunk's logits, and are not copied."""
    sizes = Sizes(block=64, hidden=1024, vocabulary=4096)
    micro = micro_of([Request(1, 0, (128,))], sizes, n=4)
    big = {"a": jnp.zeros((1, J, 1024, 128)), "b": jnp.zeros((1, J, 128, 4096))}
    adapters = HeadAdapters(big["a"][0], big["b"][0], jnp.ones(J), jnp.ones(J, bool))
    donating = jax.jit(train, static_argnums=4, donate_argnums=3)
    compiled = donating.lower(head_of(sizes), micro, adapters, big, 1).compile()
    gradient_slots = sum(x.nbytes for x in big.values())
    one_slot = gradient_slots // J
    logits = 4 * 64 * 4096
    assert compiled.memory_analysis().alias_size_in_bytes == gradient_slots
    assert temp_bytes(compiled) < one_slot + 4 * logits + 4 * micro.x.nbytes


def temp_bytes(compiled: Any) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


COLLECTIVE = re.compile(
    r"= (\S+) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def collectives(function: Callable[..., Any], micro: Micro, over: Micro) -> set[tuple[str, ...]]:
    """Shapes and names of the collectives that XLA makes. ``over`` says what is split."""
    mesh = Mesh(np.array(jax.devices()), "B")
    placed = jax.tree.map(lambda axis: NamedSharding(mesh, PartitionSpec(axis)), over)
    whole = NamedSharding(mesh, PartitionSpec())
    program = jax.jit(function, in_shardings=(whole, placed, whole))
    compiled = program.lower(head_of(SMALL), micro, adapters_of(SMALL)).compile()
    return set(COLLECTIVE.findall(compiled.as_text()))


@pytest.mark.acceptance("H6")
def test_micro_batches_split_over_devices_exchange_only_loop_conditions():
    """One micro-batch per device of four. The control splits one, so its chunks cross devices."""
    assert jax.device_count() == 4
    head = partial(score, chunk=4)
    micro = micro_of(MIXED, SMALL, n=16)
    micro_batches = jax.tree.map(lambda x: np.repeat(x[None], 4, axis=0), micro)
    each = jax.vmap(head, in_axes=(None, 0, None))
    by_micro_batch = collectives(each, micro_batches, jax.tree.map(lambda _: "B", micro))
    assert by_micro_batch == {("pred[]", "all-reduce")}
    by_block = collectives(head, micro, jax.tree.map(lambda _: "B", micro)._replace(used=None))
    assert "all-gather" in {name for _, name in by_block}


def print_exchanged_by_eight() -> None:
    """Print the collectives of a micro-batch per device, and of one split over eight devices."""
    assert jax.device_count() == 8
    mesh = Mesh(np.array(jax.devices()), "B")
    micro = micro_of(MIXED, SMALL, n=16)
    micro_batches = jax.tree.map(lambda x: np.repeat(x[None], 8, axis=0), micro)

    def one(head: LmHead, micro_batches: Micro, adapters: HeadAdapters) -> Any:
        mine = jax.tree.map(lambda x: x[0], micro_batches)
        return jax.tree.map(lambda x: x[None], score(head, mine, adapters, chunk=4))

    whole, split = PartitionSpec(), PartitionSpec("B")
    each = jax.shard_map(
        one, mesh=mesh, in_specs=(whole, split, whole), out_specs=split, check_vma=False
    )
    compiled = jax.jit(each).lower(head_of(SMALL), micro_batches, adapters_of(SMALL)).compile()
    by_device = {name for _, name in COLLECTIVE.findall(compiled.as_text())}
    by_block = jax.tree.map(lambda _: "B", micro)._replace(used=None)
    control = {name for _, name in collectives(partial(score, chunk=4), micro, by_block)}
    print(json.dumps([sorted(by_device), sorted(control)]))


@pytest.mark.acceptance("H6")
def test_a_micro_batch_on_each_of_eight_devices_needs_nothing_from_the_others():
    """This needs its own process with eight devices. The control shows that collectives are
    found.
    """
    here = "tests.engine.backend.jax.training.test_lm_head_memory"
    code = f"import {here} as here; here.print_exchanged_by_eight()"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[5],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    by_device, control = json.loads(ran.stdout)
    assert by_device == []
    assert "all-gather" in control
