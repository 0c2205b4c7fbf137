"""The decoder's ways through its layers agree; parity/ compares them with transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from tuneserve_engine.adapters import PROJECTIONS, UNEMBED
from tuneserve_engine.backend.jax.lora import LoraRows
from tuneserve_engine.backend.jax.models.config import ModelConfig
from tuneserve_engine.backend.jax.models.decoder import Decoder, KVCache, layer_shapes
from tuneserve_engine.backend.jax.models.layers import attend, rms_norm

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


@jax.jit
def decode(
    model: Decoder, tokens: Array, positions: Array, cache: KVCache, lora: LoraRows | None
) -> tuple[Array, KVCache]:
    return model.decode(tokens, positions, cache, model.unstacked(lora))


def test_prefill_and_decode_equal_the_full_forward_with_adapters(
    model: Decoder, lora: LoraRows
) -> None:
    want = forward(model, TOKENS, lora)
    prefill = jax.jit(lambda model, tokens, lora: model.prefill(tokens, lora, capacity=12))
    hidden, cache = prefill(model, TOKENS[:, :4], lora)
    np.testing.assert_allclose(hidden, want[:, :4], atol=1e-5)
    for at in range(4, 9):
        hidden, cache = decode(model, TOKENS[:, at], jnp.full(2, at, jnp.int32), cache, lora)
        np.testing.assert_allclose(hidden, want[:, at], atol=1e-5)
    assert cache.capacity == 12
    assert [k.shape for k in cache.k] == [(2, 2, 8, 12)] * 3
    assert [v.shape for v in cache.v] == [(2, 2, 12, 8)] * 3


def test_decode_does_not_see_what_padding_or_an_older_text_left_in_the_cache(
    model: Decoder,
) -> None:
    shape_k, shape_v = (2, 2, 8, 9), (2, 2, 9, 8)
    stale = KVCache((jnp.full(shape_k, 7.0),) * 3, (jnp.full(shape_v, 7.0),) * 3)
    want = forward(model, TOKENS, None)
    cache = stale
    for at in range(9):
        hidden, cache = decode(model, TOKENS[:, at], jnp.full(2, at, jnp.int32), cache, None)
        np.testing.assert_allclose(hidden, want[:, at], atol=1e-5)


def test_a_row_past_the_capacity_writes_nothing(model: Decoder) -> None:
    zeros = KVCache((jnp.zeros((2, 2, 8, 5)),) * 3, (jnp.zeros((2, 2, 5, 8)),) * 3)
    _, cache = decode(model, TOKENS[:, 0], jnp.asarray([5, 1], jnp.int32), zeros, None)
    for k, v in zip(cache.k, cache.v, strict=True):
        assert not np.any(k[0]) and not np.any(v[0])
        assert np.any(k[1, :, :, 1]) and np.any(v[1, :, 1])


def test_a_prompt_longer_than_the_cache_is_refused(model: Decoder) -> None:
    with pytest.raises(ValueError, match="9 positions do not fit a cache of 8"):
        model.prefill(jnp.asarray(TOKENS), None, capacity=8)


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


def test_attention_equals_a_loop_over_heads_and_positions() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (
        rng.normal(size=s).astype(np.float32) for s in ((2, 3, 4, 6), (2, 2, 6, 5), (2, 2, 5, 6))
    )
    visible = rng.random((2, 3, 5)) < 0.6
    visible[:, :, 0] = True
    want = np.zeros_like(q)
    for b, t, n in np.ndindex(2, 3, 4):
        seen = visible[b, t]
        scores = q[b, t, n] @ k[b, n // 2][:, seen] / np.sqrt(6)
        weights = np.exp(scores) / np.exp(scores).sum()
        want[b, t, n] = weights @ v[b, n // 2][seen]
    got = jax.jit(attend)(q, k, v, visible)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_bfloat16_is_computed_in_float32() -> None:
    x = np.random.default_rng(3).normal(size=(4, 64)).astype(jnp.bfloat16)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    got = rms_norm(jnp.asarray(x), jnp.ones(64, jnp.bfloat16), eps=1e-6)
    np.testing.assert_array_equal(np.asarray(got), want.astype(np.float32).astype(jnp.bfloat16))


def test_annotated_shapes_are_checked_in_tests() -> None:
    with pytest.raises(TypeError, match="weight"):
        rms_norm(jnp.ones((2, 4)), jnp.ones(1), eps=1e-6)
