"""The kernel of attention over pages, interpreted, against the XLA loop and a loop in NumPy."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.compiled import UNOPTIMISED, lowered_for_a_gpu
from tuneserve_engine.backend.jax.attention import paged, paged_gpu
from tuneserve_engine.backend.jax.attention.rotate_gpu import Within


class Shape(NamedTuple):
    length: int  # positions of a row: 1, or a page
    groups: int
    kv_heads: int
    head_dim: int
    page: int


class Case(NamedTuple):
    q: jax.Array
    keys: jax.Array
    values: jax.Array
    table: jax.Array
    positions: jax.Array


WIDTH, PAGES = 24, 60
SHAPES = [
    Shape(1, 4, 2, 32, 16),
    Shape(1, 1, 3, 16, 16),
    Shape(1, 5, 2, 64, 32),
    Shape(1, 16, 1, 16, 64),
    Shape(16, 2, 2, 32, 16),
    Shape(32, 1, 3, 16, 32),
]


def case(shape: Shape, dtype: jnp.dtype = jnp.float32, rows: tuple[int, ...] | None = None) -> Case:
    """Return random rows: the shortest, the longest, an idle one, and ends amid parts and pages.

    ``rows`` are the last positions.
    """
    rng = np.random.default_rng(7)
    size, length = shape.page, shape.length
    if rows is None:
        rows = (0, size * WIDTH - 1, -1, size * 3 + 2, size * 9)
        if length > 1:
            rows = (size - 1, size * WIDTH - 1, -1, size * 3 - 1, size * 9 - 1)
    last = np.array(rows)
    positions = last[:, None] - np.arange(length)[::-1]
    positions = np.where(last[:, None] < 0, -1, positions).astype(np.int32)
    table = np.stack([rng.permutation(PAGES - 1)[:WIDTH] + 1 for _ in rows]).astype(np.int32)

    def numbers(*axes: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=axes), dtype)

    return Case(
        numbers(len(rows), length, shape.kv_heads * shape.groups, shape.head_dim),
        numbers(PAGES, shape.kv_heads, shape.head_dim, size),
        numbers(PAGES, shape.kv_heads, size, shape.head_dim),
        jnp.asarray(table),
        jnp.asarray(positions),
    )


def by_hand(at: Case) -> np.ndarray:
    """Return attention in float64, one position and head at a time."""
    q, keys, values = (np.asarray(x, np.float64) for x in at[:3])
    table, positions = np.asarray(at.table), np.asarray(at.positions)
    size, groups = values.shape[2], q.shape[2] // keys.shape[1]
    want = np.zeros(q.shape)
    for row, place, head in np.ndindex(q.shape[:3]):
        seen = range(positions[row, place] + 1)
        if not seen:
            continue
        page = table[row, [i // size for i in seen]]
        offset = [i % size for i in seen]
        scores = keys[page, head // groups, :, offset] @ q[row, place, head] / q.shape[3] ** 0.5
        weights = np.exp(scores - scores.max())
        want[row, place, head] = weights / weights.sum() @ values[page, head // groups, offset]
    return want.reshape(*q.shape[:2], -1)


def run(at: Case, within: Within | None = None) -> np.ndarray:
    attend = partial(paged_gpu.attend, within=within, interpret=True)
    return np.asarray(jax.jit(attend, compiler_options=UNOPTIMISED)(*at), np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_equals_a_loop_and_its_twin(shape: Shape) -> None:
    at = case(shape)
    got = run(at)
    np.testing.assert_allclose(got, by_hand(at), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got, paged.attend_pages(*at), rtol=1e-6, atol=1e-6)
    assert not got[2].any()  # the idle row


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]])
def test_pages_of_all_layers_are_read_by_the_layer(shape: Shape) -> None:
    at = case(shape)
    others = (jnp.full_like(pages, jnp.nan) for pages in (at.keys, at.values))
    keys, values = (
        jnp.concatenate((other, mine, other))
        for other, mine in zip(others, (at.keys, at.values), strict=True)
    )
    within = Within(jnp.int32(1), 3, jnp.zeros((3, 1)))
    stacked = at._replace(keys=keys, values=values)
    np.testing.assert_array_equal(run(stacked, within), run(at))
    np.testing.assert_array_equal(paged.attend_pages(*stacked, within), paged.attend_pages(*at))


def test_tokens_behind_the_end_of_the_table_see_the_whole_table() -> None:
    """A dispatch decodes a few tokens past the context's end, which are dropped.

    Without a bound, a GPU would read the next row's table, and behind the last one anything.
    """
    behind, last = (case(SHAPES[0], rows=(16 * WIDTH - 1 + more,) * 2) for more in (2, 0))
    np.testing.assert_array_equal(run(behind), run(last))


def test_in_bfloat16_weights_and_result_are_rounded() -> None:
    at = case(SHAPES[0], jnp.bfloat16)
    got = paged_gpu.attend(*at, interpret=True)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), by_hand(at), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_neighbours_change_no_bit(shape: Shape, dtype: jnp.dtype) -> None:
    size = shape.page
    one, other = (
        case(shape, dtype, (5 * size - 1, size * length - 1, 7 * size - 1)) for length in (1, WIDTH)
    )
    np.testing.assert_array_equal(run(one)[[0, 2]], run(other)[[0, 2]])


def test_nan_behind_a_row_s_end_and_in_other_pages_does_not_reach_it() -> None:
    at = case(SHAPES[0], rows=(18,))
    want = run(at)
    own = np.asarray(at.table)[0, :2]
    others = np.setdiff1d(np.arange(PAGES), own)
    keys = at.keys.at[others].set(np.nan).at[own[1], :, :, 3:].set(np.nan)
    values = at.values.at[others].set(np.nan).at[own[1], :, 3:].set(np.nan)
    np.testing.assert_array_equal(run(at._replace(keys=keys, values=values)), want)


def test_a_row_has_fewer_parts_the_more_rows_there_are() -> None:
    """By hand: 512 programs over 2 heads."""
    few, many = (
        jax.make_jaxpr(lambda at: paged_gpu.attend(*at, interpret=True))(case(SHAPES[0], rows=rows))
        for rows in ((3,) * 4, (3,) * 128)
    )
    assert "f32[4,2,8,4,32]" in str(few)
    assert "f32[128,2,2,4,32]" in str(many)


@pytest.mark.parametrize(
    ("head_dim", "page", "dtype", "is_taken"),
    [
        (128, 64, jnp.bfloat16, True),
        (64, 16, jnp.bfloat16, True),
        (80, 64, jnp.bfloat16, False),
        (8, 64, jnp.bfloat16, False),
        (128, 8, jnp.bfloat16, False),
        (128, 64, jnp.float32, False),
    ],
)
def test_the_kernel_takes_powers_of_two_in_bfloat16(
    head_dim: int, page: int, dtype: jnp.dtype, is_taken: bool
) -> None:
    assert paged_gpu.fits(jnp.zeros((1, 1, head_dim, page), dtype)) == is_taken


@pytest.mark.parametrize("shape", [Shape(1, 4, 8, 128, 64), Shape(64, 4, 8, 128, 64)])
def test_the_kernel_is_lowered_for_a_gpu(shape: Shape) -> None:
    at = case(shape, jnp.bfloat16, rows=(63, 127))

    def attend(at: Case) -> jax.Array:
        return paged_gpu.attend(*at, interpret=False)

    text = lowered_for_a_gpu(attend, at)
    assert text.count("@__gpu$xla.gpu.triton(") == 2  # attention, and the merging of its parts
