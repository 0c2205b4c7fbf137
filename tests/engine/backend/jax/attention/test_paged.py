"""Attention to pages equals a plain loop, and neighbours change no bit of it."""

import jax
import numpy as np

from tuneserve_engine.backend.jax.attention.paged import attend_pages


def test_attention_to_pages_equals_a_loop_over_heads_and_positions() -> None:
    rng = np.random.default_rng(2)
    heads, kv_heads, size, head = 4, 2, 3, 6
    positions = np.array([[16, 17, 18], [4, 5, 6], [-3, -2, -1]], np.int32)
    table = np.array([[3, 1, 4, 2, 9, 6, 5, 0], [8, 7, 3, 0, 0, 0, 0, 0], [0] * 8], np.int32)
    q = rng.normal(size=(3, 3, heads, head)).astype(np.float32)
    keys = rng.normal(size=(10, kv_heads, head, size)).astype(np.float32)
    values = rng.normal(size=(10, kv_heads, size, head)).astype(np.float32)
    want = np.zeros((3, 3, heads, head), np.float32)
    for b, t, n in np.ndindex(3, 3, heads):
        seen = range(positions[b, t] + 1)
        if seen:
            k = np.array([keys[table[b, i // size], n // 2, :, i % size] for i in seen])
            v = np.array([values[table[b, i // size], n // 2, i % size] for i in seen])
            scores = k @ q[b, t, n] / np.sqrt(head)
            want[b, t, n] = np.exp(scores) / np.exp(scores).sum() @ v
    got = jax.jit(attend_pages)(q, keys, values, table, positions)
    np.testing.assert_allclose(got, want.reshape(3, 3, -1), rtol=1e-5, atol=1e-6)


def test_longer_neighbours_change_no_bit_of_attention_to_pages() -> None:
    """Additional rounds add exact zeros to a row that does not need them."""
    rng = np.random.default_rng(3)
    q = rng.normal(size=(2, 1, 4, 64)).astype(np.float32)
    keys = rng.normal(size=(40, 2, 64, 16)).astype(np.float32)
    values = rng.normal(size=(40, 2, 16, 64)).astype(np.float32)
    table = rng.integers(1, 40, (2, 16)).astype(np.int32)
    attend = jax.jit(attend_pages)
    short = attend(q, keys, values, table, np.array([[20], [30]], np.int32))
    long = attend(q, keys, values, table, np.array([[20], [250]], np.int32))
    np.testing.assert_array_equal(short[0], long[0])
