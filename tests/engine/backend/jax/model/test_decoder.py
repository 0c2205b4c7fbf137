"""The decoder's paths through its layers agree. parity/ compares them with transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from tests.paged_rows import PagedRows
from tuneserve_engine.backend.jax.attention.paged import attend_pages
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.decoder import Decoder, layer_shapes
from tuneserve_engine.backend.jax.model.layers import rms_norm
from tuneserve_engine.backend.jax.model.lora import LoraRows
from tuneserve_engine.core.adapter import PROJECTIONS, UNEMBED

CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=31,
    hidden=24,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=40,
    context_length=64,
    qk_norm=True,
)
SLOTS, RANK = 3, 4
TOKENS = np.random.default_rng(0).integers(0, 31, (2, 9)).astype(np.int32)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32)


@pytest.fixture(scope="module")
def lora() -> LoraRows:
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.normal(scale=0.2, size=shape), jnp.float32)

    shapes = layer_shapes(CONFIG)
    a = {name: normal(3, SLOTS, shapes[name][0], RANK) for name in PROJECTIONS}
    b = {name: normal(3, SLOTS, RANK, shapes[name][1]) for name in PROJECTIONS}
    a[UNEMBED], b[UNEMBED] = normal(SLOTS, 24, RANK), normal(SLOTS, RANK, 31)
    return LoraRows(a, b, jnp.asarray([2.0, 0.5, 1.0]), jnp.asarray([2, 0], jnp.int32))


@jax.jit
def forward(model: Decoder, tokens: Array, lora: LoraRows | None) -> Array:
    return model(tokens, lora)


@pytest.mark.parametrize("block", [2, 4])
def test_prefill_and_decode_through_pages_equal_the_full_forward_with_adapters(
    model: Decoder, lora: LoraRows, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    want = forward(model, TOKENS, lora)
    monkeypatch.setattr(model, "block", block)
    # An earlier sequence's values in a page must not be seen, whatever they are.
    rows = PagedRows(model, 2, 12, lora, filler=np.nan)
    np.testing.assert_allclose(rows.read(TOKENS[:, :4]), want[:, :4], atol=1e-5)
    for at in range(4, 9):
        hidden = rows.write(TOKENS[:, at], np.full(2, at))
        np.testing.assert_allclose(hidden, want[:, at], atol=1e-5)


def test_a_row_writes_at_its_own_position_and_an_idle_row_writes_nothing(model: Decoder) -> None:
    rows = PagedRows(model, 3, 64, None)
    # Idle, at the first position, beyond the last one.
    rows.write(TOKENS[[0, 1, 1], 0], np.array([-1, 1, 64 * 16]))
    of_row = np.asarray(rows.table[1])
    for k, v in zip(rows.pages.k, rows.pages.v, strict=True):
        written = [page for page in range(1, len(k)) if np.any(k[page]) or np.any(v[page])]
        assert written == [of_row[0]]
        assert np.any(k[of_row[0], :, :, 1]) and not np.any(k[of_row[0], :, :, 2:])
        assert np.any(v[of_row[0], :, 1]) and not np.any(v[of_row[0], :, 2:])


def test_later_tokens_change_no_bit_of_earlier_positions(model: Decoder, lora: LoraRows) -> None:
    changed = TOKENS.copy()
    changed[:, 6:] = (changed[:, 6:] + 1) % 31
    before, after = forward(model, TOKENS, lora), forward(model, changed, lora)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.all(np.any(before[:, 6:] != after[:, 6:], axis=-1))


def test_another_row_changes_no_bit_of_a_row(model: Decoder, lora: LoraRows) -> None:
    other = TOKENS.copy()
    other[1] = 0
    poisoned = lora._replace(
        b={name: b.at[..., 0, :, :].set(jnp.nan) for name, b in lora.b.items()}
    )
    want = forward(model, TOKENS, lora)
    np.testing.assert_array_equal(forward(model, other, lora)[0], want[0])
    got = forward(model, TOKENS, poisoned)
    np.testing.assert_array_equal(got[0], want[0])
    assert np.all(np.isnan(got[1]))


def test_an_abstract_decoder_has_the_shapes_and_types_of_a_real_one(model: Decoder) -> None:
    abstract = nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32))
    want = jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(model))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(abstract)) == want


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


def test_rms_norm_of_bfloat16_is_computed_in_float32() -> None:
    x = np.random.default_rng(3).normal(size=(4, 64)).astype(jnp.bfloat16)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    got = rms_norm(jnp.asarray(x), jnp.ones(64, jnp.bfloat16), eps=1e-6)
    np.testing.assert_array_equal(np.asarray(got), want.astype(np.float32).astype(jnp.bfloat16))


def test_annotated_shapes_are_checked_in_tests() -> None:
    with pytest.raises(TypeError, match="weight"):
        rms_norm(jnp.ones((2, 4)), jnp.ones(1), eps=1e-6)
