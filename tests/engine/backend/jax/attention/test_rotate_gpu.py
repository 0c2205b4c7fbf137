"""The kernel that norms, rotates and writes a position, interpreted, against plain functions."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.compiled import lowered_for_a_gpu
from tuneserve_engine.backend.jax.attention.paged import write_position
from tuneserve_engine.backend.jax.attention.rotate_gpu import (
    Destination,
    HeadNorms,
    Within,
    rotate_and_write,
)
from tuneserve_engine.backend.jax.model.layers import apply_rope, rms_norm

ROWS, HEADS, KV_HEADS, SIZE, PAGE = 5, 5, 2, 32, 16  # the last two rows are idle
LAYERS, LAYER, LAYER_PAGES, STARTS = 3, 1, 4, (7, 50)
EPS = 1e-6


class Case(NamedTuple):
    heads: tuple[jax.Array, jax.Array, jax.Array]
    rope: tuple[jax.Array, jax.Array]
    pages: tuple[jax.Array, jax.Array]
    vectors: jax.Array
    to: Destination


def case(dtype: Any) -> Case:
    rng = np.random.default_rng(5)

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    angles = rng.uniform(-3, 3, (ROWS, SIZE // 2))
    return Case(
        (numbers(ROWS, HEADS, SIZE), numbers(ROWS, KV_HEADS, SIZE), numbers(ROWS, KV_HEADS, SIZE)),
        (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)),
        (
            numbers(LAYERS * LAYER_PAGES, KV_HEADS, SIZE, PAGE),
            numbers(LAYERS * LAYER_PAGES, KV_HEADS, PAGE, SIZE),
        ),
        numbers(LAYERS, 100),
        Destination(
            jnp.array([2, 1, 3, 0, 0], jnp.int32), jnp.array([0, 15, 7, 15, 15], jnp.int32)
        ),
    )


compiled = partial(
    jax.jit, static_argnums=1, compiler_options={"xla_allow_excess_precision": False}
)
"""Compiles as the product does: otherwise XLA would leave out roundings, each program others."""


@compiled
def run(at: Case, norms: HeadNorms | None) -> tuple[jax.Array, ...]:
    within = Within(jnp.int32(LAYER), LAYERS, at.vectors)
    return rotate_and_write(*at.heads, at.rope, at.pages, at.to, within, norms, interpret=True)


@compiled
def plain(at: Case, norms: HeadNorms | None) -> tuple[jax.Array, ...]:
    q, k, v = (x[:, None] for x in at.heads)
    if norms is not None:
        weights = [at.vectors[LAYER, start : start + SIZE] for start in STARTS]
        q, k = (rms_norm(x, w, eps=EPS) for x, w in zip((q, k), weights, strict=True))
    cos, sin = (x[:, None, None] for x in at.rope)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    page = at.to.page + LAYER * LAYER_PAGES
    return q[:, 0], *write_position(*at.pages, page, at.to.offset, k[:, 0], v[:, 0])


@pytest.mark.bits
@pytest.mark.parametrize("norms", [HeadNorms(*STARTS, EPS), None])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_kernel_does_what_norms_rotation_and_writing_do(
    dtype: Any, norms: HeadNorms | None
) -> None:
    """To the last bit in bfloat16; in float32, to 1e-6, because the norm's sum is rounded.

    All pages but three keep their bits. Idle rows write to the unused page, which nothing reads.
    """
    at = case(dtype)
    got = run(at, norms)
    used = np.delete(np.arange(LAYERS * LAYER_PAGES), LAYER * LAYER_PAGES)
    assert [x.dtype for x in got] == [dtype] * 3
    for index, (one, want) in enumerate(zip(got, plain(at, norms), strict=True)):
        found, expected = (np.asarray(x if not index else x[used]) for x in (one, want))
        if dtype == jnp.bfloat16:
            np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(
            found.astype(np.float32), expected.astype(np.float32), rtol=1e-6, atol=1e-6
        )
    untouched = np.setdiff1d(used, at.to.page + LAYER * LAYER_PAGES)
    np.testing.assert_array_equal(got[1][untouched], at.pages[0][untouched])
    np.testing.assert_array_equal(got[2][untouched], at.pages[1][untouched])


def test_a_row_has_the_same_bits_alone() -> None:
    at, norms = case(jnp.bfloat16), HeadNorms(*STARTS, EPS)
    q, keys, _ = run(at, norms)
    one = jax.tree.map(lambda x: x[1:2], (at.heads, at.rope, at.to))
    alone = run(at._replace(heads=one[0], rope=one[1], to=one[2]), norms)
    np.testing.assert_array_equal(q[1:2], alone[0])
    mine = LAYER * LAYER_PAGES + int(at.to.page[1]), slice(None), slice(None), 15
    np.testing.assert_array_equal(keys[mine], alone[1][mine])


def test_the_kernel_is_lowered_for_a_gpu() -> None:
    def place(at: Case) -> tuple[jax.Array, ...]:
        within = Within(jnp.int32(LAYER), LAYERS, at.vectors)
        norms = HeadNorms(*STARTS, EPS)
        return rotate_and_write(*at.heads, at.rope, at.pages, at.to, within, norms, interpret=False)

    text = lowered_for_a_gpu(place, case(jnp.bfloat16))
    assert text.count("@__gpu$xla.gpu.triton(") == 1
