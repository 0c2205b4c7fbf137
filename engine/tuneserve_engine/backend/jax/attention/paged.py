"""Keys and values of samples in pages, and attention through a table of pages.

A page holds ``S`` positions of one sequence; several sequences may read the same page. On a GPU,
``paged_gpu`` reads pages in bfloat16. Otherwise, attention takes a few pages of every row per
round, with an online softmax (FlashAttention-2, https://arxiv.org/abs/2307.08691, algorithm 1). The
longest of the rows that are computed together sets the number of rounds. Pages that a row does not
have are masked and add exact zeros, so that its bits depend on its own pages alone.

Dimension key: L layers, P pages, S positions of a page, J entries of a row of the table, B rows,
T positions of a row, N query heads, K key/value heads, each read by G = N / K query heads (Q = GT),
H head_dim, W pages of a round.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tuneserve_engine.backend.jax.attention import paged_gpu, rotate_gpu
from tuneserve_engine.backend.jax.attention.base import UNSEEN
from tuneserve_engine.backend.jax.attention.page_table import pages_per_round
from tuneserve_engine.backend.jax.attention.rotate_gpu import Destination, HeadNorms, Within
from tuneserve_engine.backend.jax.target import target_platform

_ROWS_TOGETHER = 8
"""Rows of one position each that a CPU computes together.

Fewer rows are not worth a round. More rows do not fit the cache, and short rows then run rounds
that only the long ones need: 24 to 27 ms for 4 to 16 rows, 40 ms for all 64.
"""


def _is_gpu() -> bool:
    return target_platform() == "gpu"


class Pages(NamedTuple):
    """On a CPU, one array per layer: it would copy a stacked array in every round of a loop.

    Elsewhere, one array of all layers, [L, P, ...].
    """

    k: tuple[Array, ...]  # of [P, K, H, S]
    v: tuple[Array, ...]  # of [P, K, S, H]


def write_page(
    keys: Float[Array, "P K H S"],
    values: Float[Array, "P K S H"],
    page: Int[Array, " B"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
) -> tuple[Array, Array]:
    """Fill each row's page."""
    if _is_gpu():
        # One kernel. Rows that share a page are unused, or write the same values.
        return keys.at[page].set(k.transpose(0, 2, 3, 1)), values.at[page].set(v.swapaxes(1, 2))
    for row in range(k.shape[0]):
        keys = lax.dynamic_update_index_in_dim(keys, k[row].transpose(1, 2, 0), page[row], 0)
        values = lax.dynamic_update_index_in_dim(values, v[row].transpose(1, 0, 2), page[row], 0)
    return keys, values


def write_position(  # noqa: PLR0913
    keys: Float[Array, "P K H S"],
    values: Float[Array, "P K S H"],
    page: Int[Array, " B"],
    offset: Int[Array, " B"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
) -> tuple[Array, Array]:
    """Write one position of each row's page."""
    return keys.at[page, :, :, offset].set(k), values.at[page, :, offset, :].set(v)


def rotates_by_kernel(keys: Float[Array, "P K H S"]) -> bool:
    """Return whether ``rotate_position`` serves these pages."""
    return _is_gpu() and paged_gpu.fits(keys)


def rotate_position(  # noqa: PLR0913
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    rope: tuple[Float[Array, "B 1 1 H2"], Float[Array, "B 1 1 H2"]],
    keys: Float[Array, "P K H S"],
    values: Float[Array, "P K S H"],
    to: Destination,
    within: Within,
    norms: HeadNorms | None,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "P K H S"], Float[Array, "P K S H"]]:
    """Norm and rotate one position of each row, and write it, by one kernel; return the queries."""
    angles = rope[0][:, 0, 0], rope[1][:, 0, 0]
    rotated, keys, values = rotate_gpu.rotate_and_write(
        q, k, v, angles, (keys, values), to, within, norms, interpret=False
    )
    return rotated[:, None], keys, values


def attend_pages(  # noqa: PLR0913
    q: Float[Array, "B T N H"],
    keys: Float[Array, "P K H S"],
    values: Float[Array, "P K S H"],
    table: Int[Array, "B J"],
    positions: Int[Array, "B T"],
    within: Within | None = None,
) -> Float[Array, "B T NH"]:
    """Return each position's attention to its row up to itself; zeros for positions below 0.

    ``within`` says which pages are the layer's if they are those of all layers.
    Scores, softmax and sums are float32. On a CPU, rows of about the same length are computed a few
    at a time. On a GPU, pages in bfloat16 are read by a kernel.
    """
    if _is_gpu() and paged_gpu.fits(keys):
        return paged_gpu.attend(q, keys, values, table, positions, within, interpret=False)
    if within is not None:
        table = table + within.number * (keys.shape[0] // within.layers)
    count, length = positions.shape
    together = 1 if length > 1 else math.gcd(count, _ROWS_TOGETHER)
    if together == count or target_platform() != "cpu":
        return _attend(q, keys, values, table, positions)
    order = jnp.argsort(jnp.max(positions, axis=1))
    rows = [
        x[order].reshape(count // together, together, *x.shape[1:]) for x in (q, table, positions)
    ]
    attended = lax.map(lambda of: _attend(of[0], keys, values, of[1], of[2]), rows)
    in_order: Array = attended.reshape(count, *attended.shape[2:])[jnp.argsort(order)]
    return in_order


def _attend(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "P K H S"],
    values: Float[Array, "P K S H"],
    table: Int[Array, "B J"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T NH"]:
    """Compute all rows together."""
    count, length, heads, size = q.shape
    kv_heads, page = keys.shape[1], values.shape[2]
    together = pages_per_round(target_platform())
    groups, width = heads // kv_heads, together * page
    rows = q.reshape(count, length, kv_heads, groups, size).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(count, kv_heads, groups * length, size).astype(jnp.float32) * size**-0.5
    places = jnp.arange(width, dtype=jnp.int32)
    last = jnp.max(positions, axis=1)

    def add(number: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = sums
        pages = lax.dynamic_slice_in_dim(table, number * together, together, axis=1)
        at = number * width + places
        seen = at[None, None, :] <= positions[:, :, None]
        held = (at[None, :] <= last[:, None]).reshape(count, together, 1, page, 1)
        scores = _scores(rows, keys[pages], seen)
        new_top = jnp.maximum(top, scores.max(-1))
        kept, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[..., None])
        # Positions after this sequence's end may hold an earlier one's NaN, and 0 x NaN is NaN.
        read = jnp.where(held, values[pages], 0).astype(jnp.float32)
        parts = weights.reshape(*weights.shape[:3], together, page)
        more = jnp.einsum("BKQWS,BWKSH->BKQH", parts, read)
        return new_top, total * kept + weights.sum(-1), out * kept[..., None] + more

    nothing = jnp.full(rows.shape[:-1], UNSEEN), jnp.zeros(rows.shape[:-1]), jnp.zeros_like(rows)
    rounds = (jnp.max(last) + width) // width
    with jax.named_scope("pages"):
        _, total, out = lax.fori_loop(0, rounds, add, nothing)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    out = out.reshape(count, kv_heads, groups, length, size).transpose(0, 3, 1, 2, 4)
    attended: Array = out.reshape(count, length, heads * size).astype(q.dtype)
    return attended


def _scores(
    rows: Float[Array, "B K Q H"], keys: Float[Array, "B W K H S"], seen: Bool[Array, "B T WS"]
) -> Float[Array, "B K Q WS"]:
    products = jnp.einsum("BKQH,BWKHS->BKQWS", rows, keys.astype(jnp.float32))
    products = products.reshape(*products.shape[:3], -1)
    groups = rows.shape[2] // seen.shape[1]
    return jnp.where(jnp.tile(seen, (1, groups, 1))[:, None], products, UNSEEN)
