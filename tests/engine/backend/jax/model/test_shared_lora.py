"""The kernels for adapters that rows share, interpreted, against NumPy and ``lora_delta``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.compiled import UNOPTIMISED
from tuneserve_engine.backend.jax.model.lora import lora_delta
from tuneserve_engine.backend.jax.model.shared_lora import (
    RowTiles,
    SharedLora,
    add_deltas,
    fits,
    row_tiles,
)

_add_deltas = jax.jit(add_deltas, static_argnums=(2, 4), compiler_options=UNOPTIMISED)
_row_tiles = jax.jit(row_tiles, static_argnums=1)
LAYERS, SLOTS = 2, 3
OUTPUTS = {"q": 256, "k": 128}
COMPANY = [2, 0, 2, 2, 0, *([2] * 18)]
"""The adapter slots of rows. One is unused, and the rows of another fill more than a tile."""


def lora(slot: list[int], rank: int, inputs: int) -> SharedLora:
    rng = np.random.default_rng(rank + inputs)

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(LAYERS, SLOTS, *shape)), jnp.float32)

    return SharedLora(
        a={name: numbers(rank, inputs) for name in OUTPUTS},
        b={name: numbers(outputs, rank) for name, outputs in OUTPUTS.items()},
        scale=jnp.array([0.5, 2.0, 1.5], jnp.float32),
        tiles=_row_tiles(jnp.array(slot, jnp.int32), SLOTS),
        layer=jnp.int32(1),
    )


def rows(count: int, inputs: int, dtype: Any = jnp.float32) -> tuple[list[jax.Array], jax.Array]:
    """Return products and inputs. A row's numbers depend on its place alone."""

    def numbers(width: int) -> jax.Array:
        each = [np.random.default_rng([row, width]).normal(size=width) for row in range(count)]
        return jnp.asarray(np.array(each), jnp.float32)

    return [numbers(outputs) for outputs in OUTPUTS.values()], numbers(inputs).astype(dtype)


def run(given: tuple[list[jax.Array], jax.Array], adapters: SharedLora) -> list[np.ndarray]:
    found = _add_deltas(*given, tuple(OUTPUTS), adapters, given[1].dtype.name)
    return [np.asarray(each) for each in found]


@pytest.mark.parametrize(
    ("rank", "inputs", "dtype"),
    [
        (2, 128, jnp.bfloat16),
        (24, 384, jnp.float32),
        (32, 1152, jnp.bfloat16),
        (48, 512, jnp.bfloat16),
        (64, 256, jnp.float32),
    ],
)
def test_each_row_gets_the_delta_of_its_adapter(rank: int, inputs: int, dtype: Any) -> None:
    """In float64 by NumPy, and by the function that training and other devices use.

    Both to 1e-6 of the sum of the terms' sizes, and as the rows' dtype rounds.
    """
    given, adapters = rows(len(COMPANY), inputs, dtype), lora(COMPANY, rank, inputs)
    products, x = given
    for name, out, product in zip(OUTPUTS, run(given, adapters), products, strict=True):
        a, b = (np.asarray(side[name][1], np.float64) for side in (adapters.a, adapters.b))
        for row, slot in enumerate(COMPANY):
            mine, base = np.asarray(x[row], np.float64), np.asarray(product[row], np.float64)
            scale = float(adapters.scale[slot])
            size = abs(base) + scale * (abs(b[slot]) @ (abs(a[slot]) @ abs(mine)))
            want = base + scale * (b[slot] @ (a[slot] @ mine))
            twin = lora_delta(
                x[row][None, None],
                adapters.a[name][1, slot].T[None],
                adapters.b[name][1, slot].T[None],
                adapters.scale[slot][None],
            )
            assert out.dtype == dtype
            near = 1e-6 * size + (2.0**-8 * abs(want) if dtype == jnp.bfloat16 else 0)
            got = np.asarray(out[row], np.float64)
            assert (abs(got - want) <= near).all()
            assert (abs(got - np.asarray(product[row] + twin[0, 0], np.float64)) <= near).all()


def test_a_row_has_the_same_bits_whatever_its_neighbours_use() -> None:
    inputs = 640
    given = rows(len(COMPANY), inputs, jnp.bfloat16)
    together = run(given, lora(COMPANY, 16, inputs))
    for row in (1, 22):
        others = [slot if number == row else 1 for number, slot in enumerate(COMPANY)]
        mine = run(given, lora(others, 16, inputs))
        alone = run(
            ([each[row:][:1] for each in given[0]], given[1][row:][:1]),
            lora(COMPANY[row:][:1], 16, inputs),
        )
        for one, two, three in zip(together, mine, alone, strict=True):
            np.testing.assert_array_equal(one[row], two[row])
            np.testing.assert_array_equal(one[row], three[0])


def test_nan_stays_with_the_rows_of_its_adapter() -> None:
    adapters = lora(COMPANY, 16, 128)
    want = run(rows(len(COMPANY), 128), adapters)
    broken = adapters._replace(
        a={name: x.at[:, 2].set(np.nan) for name, x in adapters.a.items()},
        b={name: x.at[:, 2].set(np.nan) for name, x in adapters.b.items()},
    )
    got = run(rows(len(COMPANY), 128), broken)
    for one, other in zip(got, want, strict=True):
        for row, slot in enumerate(COMPANY):
            if slot == 2:
                assert np.isnan(one[row]).all()
            else:
                np.testing.assert_array_equal(one[row], other[row])


@pytest.mark.parametrize(
    "slot", [COMPANY, [0] * 4, [1], [0, 1, 2] * 16, [1] * 48, [2, *([0] * 47)], [2] * 17]
)
def test_every_row_is_in_one_tile_of_its_slot(slot: list[int]) -> None:
    tiles: RowTiles = jax.device_get(_row_tiles(jnp.array(slot, jnp.int32), SLOTS))
    used = [set(row.tolist()) for row, its in zip(tiles.rows, tiles.slot, strict=True) if its >= 0]
    assert sorted(row for rows in used for row in rows) == list(range(len(slot)))
    found = [its for its in tiles.slot.tolist() if its >= 0]
    assert [{slot[row] for row in rows} for rows in used] == [{its} for its in found]


@pytest.mark.parametrize(
    ("rank", "inputs", "outputs", "is_taken"),
    [(8, 4096, 1024, True), (24, 896, 128, True), (8, 128, 96, False), (8, 96, 128, False)],
)
def test_the_kernels_take_whole_tiles_only(
    rank: int, inputs: int, outputs: int, is_taken: bool
) -> None:
    a, b = (jnp.zeros((2, 3, *side), jnp.float32) for side in ((rank, inputs), (outputs, rank)))
    assert fits(a, b) is is_taken
