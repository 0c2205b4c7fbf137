"""What the chunked head takes, from its compiled programs: memory, and talk between devices."""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array

from tests.engine.head_case import (
    EPS,
    J,
    Request,
    Sizes,
    adapters_of,
    head_of,
    micro_of,
    stale_scratch,
    train,
)
from tuneserve_engine.backend.jax.head import Head, HeadAdapters, head_chunk_blocks


@pytest.mark.parametrize("targets", [1, 64])
def test_at_eight_chunks_the_head_takes_a_fifth_of_full_logits_memory(targets: int):
    sizes = Sizes(block=64, hidden=128, vocabulary=16384, targets=targets)
    micro = micro_of([Request(1, 0, (2048,))], sizes, n=32)
    head, adapters = head_of(sizes), adapters_of(sizes)
    donating = jax.jit(train, static_argnums=4, donate_argnums=3)
    chunked = donating.lower(head, micro, adapters, stale_scratch(sizes), 4).compile()

    @partial(jax.grad, argnums=0)
    def full(x: Array, head: Head, targets: Array, weights: Array) -> Array:
        normed = x * jax.lax.rsqrt((x**2).mean(axis=1, keepdims=True) + EPS) * head.norm[None]
        z = jnp.einsum("TD,VD->TV", normed, head.unembedding)
        return -(
            jnp.take_along_axis(jax.nn.log_softmax(z, axis=1), targets, axis=1) * weights
        ).sum()

    flat = [x.reshape(2048, -1) for x in (micro.x, micro.targets, micro.inputs.weights)]
    whole = jax.jit(full).lower(flat[0], head, *flat[1:]).compile()

    assert temp_bytes(whole) > 4 * 2048 * 16384
    assert temp_bytes(chunked) <= 0.2 * temp_bytes(whole)


def test_the_scratch_is_updated_in_place():
    """Adapters and scratch larger than a chunk's logits: no copy of them among the temporaries."""
    sizes = Sizes(block=64, hidden=1024, vocabulary=4096)
    micro = micro_of([Request(1, 0, (128,))], sizes, n=4)
    big = {"a": jnp.zeros((1, J, 1024, 128)), "b": jnp.zeros((1, J, 128, 4096))}
    adapters = HeadAdapters(big["a"][0], big["b"][0], jnp.ones(J), jnp.ones(J, bool))
    donating = jax.jit(train, static_argnums=4, donate_argnums=3)
    compiled = donating.lower(head_of(sizes), micro, adapters, big, 1).compile()
    scratch = sum(x.nbytes for x in big.values())
    one_slot = scratch // J
    logits = 4 * 64 * 4096
    assert compiled.memory_analysis().alias_size_in_bytes == scratch
    assert temp_bytes(compiled) < one_slot + 4 * logits + 4 * micro.x.nbytes


def temp_bytes(compiled: Any) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


_ON_EIGHT_DEVICES = """
from functools import partial

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np
from tests.engine.head_case import MIXED, SMALL, adapters_of, head_of, micro_of, score

assert jax.device_count() == 8
head, adapters = head_of(SMALL), adapters_of(SMALL)
micro = micro_of(MIXED, SMALL, n=16)
mesh = Mesh(jax.devices(), "B")
split, whole = NamedSharding(mesh, P("B")), NamedSharding(mesh, P())

def collectives(function, micro, shardings):
    lowered = jax.jit(function, in_shardings=(whole, shardings, whole)).lower(head, micro, adapters)
    text = lowered.compile().as_text()
    names = "all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"
    return sum(text.count(f" {name}(") + text.count(f" {name}-start(") for name in names)

@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("B"), P()), out_specs=P("B"), check_vma=False)
def each(head, micro, adapters):
    one = score(head, jax.tree.map(lambda x: x[0], micro), adapters, 4)
    return jax.tree.map(lambda x: x[None], one)

streams = jax.tree.map(lambda x: np.repeat(x[None], 8, axis=0), micro)
print(collectives(each, streams, split))
over_blocks = jax.tree.map(lambda _: split, micro)._replace(used=whole)
print(collectives(partial(score, chunk=4), micro, over_blocks))
"""


def test_streams_on_eight_devices_need_no_collective():
    """A stream each. The control splits one stream over the devices: under the loop that takes
    some."""
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", _ON_EIGHT_DEVICES],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    by_stream, by_block = map(int, done.stdout.split())
    assert by_stream == 0 and by_block > 0


@pytest.mark.parametrize(
    ("block", "chunk", "vocabulary", "blocks"),
    [
        (64, 256, 8192, 4),
        (64, 256, 131_072, 4),  # 128 MiB exactly
        (64, 256, 131_073, 2),
        (64, 384, 131_072, 3),
        (64, 256, 10**7, 1),
    ],
)
def test_chunks_are_the_largest_whole_part_that_fits_the_room(
    block: int, chunk: int, vocabulary: int, blocks: int
):
    assert head_chunk_blocks(block, chunk, vocabulary) == blocks
