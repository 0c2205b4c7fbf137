"""The shapes that the documentation names: published models, and attention on a GPU."""

from tuneserve_engine.backend.jax.model.config import Llama3Scaling, ModelConfig

HEAD_DIMS = (16, 32, 64, 128)
"""Kernels pad to a power of two, so these stand for every head_dim up to 128."""
GROUPS = tuple(range(1, 9))
"""The numbers of query heads that share a key head."""


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=151_936,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        intermediate=inner,
        context_length=40_960,
        rope_theta=1e6,
        rms_eps=1e-6,
        tied_embeddings=tied,
        qk_norm=True,
    )


def _llama(hidden: int, inner: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=128_256,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        intermediate=inner,
        context_length=131_072,
        rope_theta=5e5,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192),
        rms_eps=1e-5,
    )


MODELS = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64, tied=False),
    "llama-8b": _llama(4096, 14_336, 32, 32),
    "llama-70b": _llama(8192, 28_672, 80, 64),
}
"""The models' shapes, as in their config.json."""
