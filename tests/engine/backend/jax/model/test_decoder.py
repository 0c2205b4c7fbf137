"""The decoder's paths through its layers agree. parity/ compares them with transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from tests.paged_rows import PagedRows
from tests.support.decoders import random_decoder
from tests.support.nightly import at_night
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.model.lora import LoraRows
from tuneserve_engine.backend.jax.model.weight_shapes import layer_shapes
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
    return random_decoder(CONFIG)


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


@pytest.mark.parametrize("block", [2, at_night(4)])
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


def test_an_abstract_decoder_has_the_shapes_and_types_of_a_real_one() -> None:
    def make() -> Decoder:
        return Decoder(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32)

    abstract, real = nnx.eval_shape(make), make()
    want = jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(real))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(abstract)) == want
