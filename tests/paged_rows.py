"""Rows that read and write their own KV pages, as sampling does, but without decode slots."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tuneserve_engine.backend.jax.attention.page_table import table_width
from tuneserve_engine.backend.jax.attention.paged import Pages
from tuneserve_engine.backend.jax.model.decoder import Decoder, Paged
from tuneserve_engine.backend.jax.model.lora import LoraRows


@partial(jax.jit, donate_argnums=3)
def _continued(
    model: Decoder, tokens: Array, positions: Array, pages: Pages, table: Array, lora: LoraRows
) -> tuple[Array, Pages]:
    return model.continued(tokens, Paged(positions, table, pages, model.unstacked(lora)))


class PagedRows:
    """``filler`` is the initial content of the pages."""

    def __init__(
        self, model: Decoder, rows: int, capacity: int, lora: LoraRows | None, filler: float = 0.0
    ) -> None:
        c, size = model.config, model.block
        width = table_width(capacity, size)
        own = np.arange(1, 1 + rows * width, dtype=np.int32)
        self.table = jnp.asarray(np.random.default_rng(0).permutation(own).reshape(rows, width))
        k = jnp.full((1 + rows * width, c.kv_heads, c.head_dim, size), filler)
        v = jnp.full((1 + rows * width, c.kv_heads, size, c.head_dim), filler)
        layers = range(c.layers)
        self.pages = Pages(tuple(k + 0 for _ in layers), tuple(v + 0 for _ in layers))
        self._model, self._lora = model, lora

    def read(self, tokens: np.ndarray) -> Array:
        """Hidden states of prompts of equal length, computed one page per row at a time."""
        size, (rows, length) = self._model.block, tokens.shape
        parts = []
        for start in range(0, length, size):
            part = np.zeros((rows, size), np.int32)
            part[:, : length - start] = tokens[:, start : start + size]
            at = np.broadcast_to(np.arange(start, start + size, dtype=np.int32), (rows, size))
            parts.append(self._run(part, at))
        return jnp.concatenate(parts, axis=1)[:, :length]

    def write(self, tokens: np.ndarray, positions: np.ndarray) -> Array:
        """Hidden states [B, D] of one token per row."""
        return self._run(tokens[:, None], positions[:, None])[:, 0]

    def _run(self, tokens: np.ndarray, positions: np.ndarray) -> Array:
        hidden, self.pages = _continued(
            self._model,
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(positions, jnp.int32),
            self.pages,
            self.table,
            self._lora,
        )
        return hidden
