"""The kernels for adapters of blocks, interpreted, against NumPy and ``lora_delta``."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.compiled import UNOPTIMISED
from tuneserve_engine.backend.jax.model import block_lora
from tuneserve_engine.backend.jax.model.block_lora import (
    BlockLora,
    Factors,
    add_deltas,
    blank_factors,
    fits,
)
from tuneserve_engine.backend.jax.model.lora import lora_delta
from tuneserve_engine.backend.jax.model.tile import TILE

LAYERS, SLOTS, SIZE = 2, 3, 16
OUTPUTS = {"q": 2 * TILE, "k": TILE}
NAMES = tuple(OUTPUTS)
SLOT = [1, 2, 0, 0, 2, 1]
"""The adapter slots of a micro-batch's blocks. The chunk begins with the second of them."""
AT, BLOCKS = 1, 4
CASES = [
    (2, 128, jnp.bfloat16),
    (24, 384, jnp.float32),
    (32, 640, jnp.bfloat16),
    (64, 256, jnp.float32),
]


@pytest.fixture(autouse=True)
def _several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide few inputs into parts, as the kernels do with many: a part for each tile."""
    monkeypatch.setattr(block_lora, "_PART_TILES", 1)


def lora(rank: int, inputs: int, dtype: Any, slot: list[int] = SLOT) -> BlockLora:
    rng = np.random.default_rng(rank + inputs)

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(LAYERS, SLOTS, *shape)), jnp.float32)

    a = {name: numbers(inputs, rank) for name in NAMES}
    b = {name: numbers(rank, outputs) for name, outputs in OUTPUTS.items()}
    return BlockLora(
        a=a,
        b=b,
        scale=jnp.array([0.5, 2.0, 1.5], jnp.float32),
        slot=jnp.array(slot, jnp.int32),
        at=jnp.int32(AT),
        layer=jnp.int32(1),
        factors=blank_factors(a, b, [NAMES], (BLOCKS, SIZE), dtype),
    )


def numbers(seed: int, width: int, dtype: Any) -> jax.Array:
    """Numbers of a chunk [c, S, width], those of a block by its place alone."""
    each = [np.random.default_rng([seed, i, width]) for i in range(BLOCKS)]
    return jnp.asarray(np.array([rng.normal(size=(SIZE, width)) for rng in each]), dtype)


@partial(jax.jit, compiler_options=UNOPTIMISED)
def run(
    products: list[jax.Array], x: jax.Array, by_outs: list[jax.Array], adapters: BlockLora
) -> tuple[list[jax.Array], list[jax.Array], jax.Array, Factors]:
    """Return the outputs, the gradient by the products and by x, and the factors."""

    def forward(products: list[jax.Array], x: jax.Array, factors: Any) -> list[jax.Array]:
        return add_deltas(products, x, NAMES, adapters.with_trained(factors))

    outs, pull = jax.vjp(forward, products, x, adapters.trained)
    by_products, by_x, factors = pull(by_outs)
    return outs, by_products, by_x, factors["q"]


def case(inputs: int, dtype: Any) -> tuple[list[jax.Array], jax.Array, list[jax.Array]]:
    products = [numbers(0, width, jnp.float32) for width in OUTPUTS.values()]
    return products, numbers(1, inputs, dtype), [numbers(2, n, dtype) for n in OUTPUTS.values()]


def parts(adapters: BlockLora, name: str, block: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return a block's A, B and scale in float64."""
    slot = int(adapters.slot[AT + block])
    a, b = (np.asarray(side[name][1, slot], np.float64) for side in (adapters.a, adapters.b))
    return a, b, float(adapters.scale[slot])


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def assert_near(got: Any, want: np.ndarray, size: np.ndarray) -> None:
    """Compare to 1e-6 of the sum of the terms' sizes, or as bfloat16 rounds."""
    part = 2.0**-8 if got.dtype == jnp.bfloat16 else 0.0
    assert (abs(wide(got) - want) <= 1e-6 * size + part * abs(want)).all()


@pytest.mark.parametrize(("rank", "inputs", "dtype"), CASES)
def test_each_block_gets_the_delta_of_its_adapter(rank: int, inputs: int, dtype: Any) -> None:
    """In float64 by NumPy, and by the function that other devices use."""
    products, x, by_outs = case(inputs, dtype)
    adapters = lora(rank, inputs, dtype)
    outs, _, _, _ = run(products, x, by_outs, adapters)
    for name, out, base in zip(NAMES, outs, products, strict=True):
        assert out.dtype == dtype
        slot = adapters.slot[AT : AT + BLOCKS]
        a, b = adapters.a[name][1, slot], adapters.b[name][1, slot]
        twin = base + lora_delta(x, a, b, adapters.scale[slot])
        for block in range(BLOCKS):
            a64, b64, scale = parts(adapters, name, block)
            mine, onto = wide(x[block]), wide(base[block])
            size = abs(onto) + scale * abs(mine) @ abs(a64) @ abs(b64)
            assert_near(out[block], onto + scale * mine @ a64 @ b64, size)
            assert_near(out[block], wide(twin[block]), size)


@pytest.mark.parametrize(("rank", "inputs", "dtype"), CASES)
def test_the_gradients_are_those_of_the_deltas(rank: int, inputs: int, dtype: Any) -> None:
    products, x, by_outs = case(inputs, dtype)
    adapters = lora(rank, inputs, dtype)
    _, by_products, by_x, factors = run(products, x, by_outs, adapters)
    for by_product, by_out in zip(by_products, by_outs, strict=True):
        np.testing.assert_array_equal(by_product, by_out.astype(jnp.float32))
    for block in range(BLOCKS):
        by_input, size = 0.0, 0.0
        for index, name in enumerate(NAMES):
            a, b, scale = parts(adapters, name, block)
            mine, by_out = wide(x[block]), wide(by_outs[index][block])
            by_input = by_input + scale * by_out @ b.T @ a.T
            size = size + scale * abs(by_out) @ abs(b.T) @ abs(a.T)
            low, by_low = (wide(each[index, block]) for each in (factors.low, factors.by_low))
            assert not low[:, rank:].any() and not by_low[:, rank:].any()
            assert_near(low[:, :rank], scale * mine @ a, scale * abs(mine) @ abs(a))
            assert_near(by_low[:, :rank], scale * by_out @ b.T, scale * abs(by_out) @ abs(b.T))
        assert_near(by_x[block], np.asarray(by_input), np.asarray(size))
    np.testing.assert_array_equal(factors.x, x)
    for found, by_out in zip(factors.by_outs, by_outs, strict=True):
        np.testing.assert_array_equal(found, by_out)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_block_has_the_same_bits_whatever_its_neighbours_use(dtype: Any) -> None:
    """The neighbours' adapters are NaN the second time."""
    given, adapters = case(640, dtype), lora(32, 640, dtype)
    block, slot = 1, SLOT[AT + 1]
    others = [slot if i == AT + block else 2 for i in range(len(SLOT))]
    broken = adapters._replace(
        a={name: x.at[:, 2].set(jnp.nan) for name, x in adapters.a.items()},
        slot=jnp.array(others, jnp.int32),
    )
    want, got = (run(*given, each) for each in (adapters, broken))
    assert np.isnan(wide(got[0][0][0])).all()
    for x, y in zip(*map(jax.tree.leaves, (want[:3], got[:3])), strict=True):
        np.testing.assert_array_equal(x[block], y[block])
    for x, y in ((want[3].low, got[3].low), (want[3].by_low, got[3].by_low)):
        np.testing.assert_array_equal(x[:, block], y[:, block])


@pytest.mark.parametrize(
    ("size", "inputs", "outputs", "is_taken"),
    [
        (64, 4096, 1024, True),
        (16, 896, 128, True),
        (8, 128, 128, False),
        (48, 128, 128, False),
        (64, 96, 128, False),
        (64, 128, 96, False),
    ],
)
def test_the_kernels_take_whole_tiles_only(
    size: int, inputs: int, outputs: int, is_taken: bool
) -> None:
    a, b = ({"q_proj": jnp.zeros((1, 1, *side))} for side in ((inputs, 8), (8, outputs)))
    assert fits(a, b, size) is is_taken
