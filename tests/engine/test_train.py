"""Logprobs in chunks equal logprobs at once, in less memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tuneserve_engine.adapters import AdapterConfig
from tuneserve_engine.backend.jax import train
from tuneserve_engine.backend.jax.adapters import LoraWeights, new_adapter, target_shapes
from tuneserve_engine.backend.jax.models.config import ModelConfig
from tuneserve_engine.backend.jax.models.decoder import Decoder
from tuneserve_engine.backend.jax.train import RowsIn, chunk_length, train_rows


def model_of(**options: int) -> Decoder:
    shape = dict(vocab_size=29, hidden=8, layers=1, heads=2, kv_heads=1, head_dim=4, intermediate=8)
    config = ModelConfig(architecture="llama", context_length=512, **shape | options)
    return Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32)


def adapters_of(model: Decoder, count: int) -> tuple[LoraWeights, ...]:
    """Adapters whose B is random too."""
    adapters = []
    for seed in range(count):
        config = AdapterConfig(rank=2, alpha=4, seed=seed)
        weights = new_adapter(config, target_shapes(model.config), 2).weights
        random = np.random.default_rng(seed)
        b = {
            n: jnp.array(random.normal(0, 0.3, x.shape), jnp.float32) for n, x in weights.b.items()
        }
        adapters.append(LoraWeights(weights.a, b))
    return tuple(adapters)


@pytest.fixture
def rows(batch_of: Callable[..., Any], datum: Callable[..., Any]) -> RowsIn:
    """Two rows of 20, one of them padded."""
    batch = batch_of({0: (0, datum(1, 20)), 1: (0, datum(2, 13))}, rows=2, bucket=20)
    return RowsIn.of(batch._replace(tokens=batch.tokens % 29, targets=batch.targets % 29))


def run(model: Decoder, rows: RowsIn) -> Any:
    adapters, scale = adapters_of(model, 2), np.array([2.0, 1.5], np.float32)
    return jax.device_get(jax.jit(lambda *args: train_rows(model, *args))(adapters, scale, rows))


def test_chunks_that_do_not_divide_the_length_give_the_same_rows_and_gradients(
    monkeypatch: pytest.MonkeyPatch, rows: RowsIn
):
    model = model_of()
    whole, gradient = run(model, rows)
    monkeypatch.setattr(train, "chunk_length", lambda *shape: 8)
    chunked, chunked_gradient = run(model, rows)
    for ours, theirs in zip(chunked, whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    leaves = jax.tree.leaves(chunked_gradient), jax.tree.leaves(gradient)
    for ours, theirs in zip(*leaves, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_each_target_gets_its_own_log_softmax_entry(rows: RowsIn):
    model = model_of()
    targets = np.random.default_rng(3).integers(0, 29, (2, 20, 4)).astype(np.int32)
    weights = np.ones((2, 20, 4), np.float32)
    several = rows._replace(targets=targets, loss=rows.loss._replace(weights=weights))
    out, _ = run(model, several)
    adapters, scale = adapters_of(model, 2), jnp.array([2.0, 1.5], jnp.float32)
    lora = train.LoraRows(*train.stack_rows(adapters), scale)
    logits = np.asarray(model.logits(model(jnp.asarray(rows.tokens), lora), lora), np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(
        out.logprobs, np.take_along_axis(expected, targets, -1), rtol=1e-5, atol=1e-5
    )


def test_a_long_row_never_has_all_its_logits_at_once(
    monkeypatch: pytest.MonkeyPatch, batch_of: Callable[..., Any], datum: Callable[..., Any]
):
    model = model_of(vocab_size=16_384)
    rows = RowsIn.of(batch_of({0: (0, datum(1, 512))}, rows=1, bucket=512))
    monkeypatch.setattr(train, "_LOGITS_BYTES", 64 * 16_384 * 4)

    program = jax.jit(lambda *args: train_rows(model, *args))
    compiled = program.lower(adapters_of(model, 1), np.ones(1, np.float32), rows).compile()
    all_logits = 512 * 16_384 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < all_logits


@pytest.mark.parametrize(
    ("rows", "length", "vocab", "chunk"),
    [
        (1, 512, 512, 512),  # all of it fits
        (1, 4096, 151_936, 128),  # 220 tokens fit
        (4, 4096, 151_936, 32),
        (1, 4096, 2_000_000, 64),  # 16 would fit: 64 are worth it
        (256, 4096, 151_936, 1),
    ],
)
def test_chunks_fit_their_room(rows: int, length: int, vocab: int, chunk: int):
    assert chunk_length(rows, length, vocab) == chunk
