"""Norms, RoPE and the writing of KV pages in decoding by one Pallas kernel for GPUs (Triton).

XLA launches five small kernels for this in every layer of a decoding step, each of which takes
longer to start than to run. The arithmetic is that of ``layers.rms_norm`` and ``apply_rope``, with
the same roundings; only the terms of a norm's sum are added in another order.

Tests run the kernel in interpret mode, and ``make gpu-compile`` compiles it.

Dimension key: as in ``paged``; L layers, N query heads.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from tuneserve_engine.backend.jax.specs import spec


class HeadNorms(NamedTuple):
    """Where the weights of the norms of queries and keys start in a row of vectors; the norms' eps.

    All are static.
    """

    queries: int
    keys: int
    eps: float


class Within(NamedTuple):
    """A layer among all layers, whose pages follow one another in one array.

    ``layers`` is their number, and static. ``vectors`` are the norms and biases of each.
    ``kv_heads`` is the static number of the model's key/value heads, of which the pages may have a
    device's; None: all of them.
    """

    number: Int[Array, ""]
    layers: Any
    vectors: Float[Array, "L _"]
    kv_heads: Any = None


class Destination(NamedTuple):
    """The page of each row's first position among the first layer's, and its place in the page."""

    page: Int[Array, " B"]
    offset: Int[Array, " B"]


def rotate_and_write(  # noqa: PLR0913
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    rope: tuple[Float[Array, "B H2"], Float[Array, "B H2"]],
    pages: tuple[Float[Array, "P K H S"], Float[Array, "P K S H"]],
    to: Destination,
    within: Within,
    norms: HeadNorms | None,
    *,
    interpret: bool,
) -> tuple[Float[Array, "B N H"], Float[Array, "P K H S"], Float[Array, "P K S H"]]:
    """Norm and rotate queries and keys of one position per row; write keys and values.

    Returns the queries and the pages, which are donated. Heads are normed only with ``norms``.
    """
    given = q, k, v, rope, to, within.number, within.vectors
    first = len(jax.tree.leaves(given))
    call = pl.pallas_call(
        partial(_kernel, layer_pages=pages[0].shape[0] // within.layers, norms=norms),
        grid=(q.shape[0], q.shape[1] + 2 * k.shape[1]),
        out_shape=[spec(x.shape, x.dtype) for x in (q, *pages)],
        input_output_aliases={first: 1, first + 1: 2},
        compiler_params=triton.CompilerParams(num_warps=1),
        interpret=interpret,
    )
    with jax.named_scope("rotate_and_write"):
        rotated, keys, values = call(*given, *pages)
    return rotated, keys, values


def _kernel(  # noqa: PLR0913
    q: Any,
    k: Any,
    v: Any,
    rope: tuple[Any, Any],
    to: Any,
    layer: Any,
    vectors: Any,
    _keys: Any,
    _values: Any,
    rotated: Any,
    keys: Any,
    values: Any,
    *,
    layer_pages: int,
    norms: HeadNorms | None,
) -> None:
    row, number = pl.program_id(0), pl.program_id(1)
    heads, kv_heads, size = q.shape[1], k.shape[1], q.shape[2]
    lanes = jnp.arange(size // 2, dtype=jnp.int32)
    halves = lanes, lanes + size // 2
    page, offset = to.page[row] + layer[...] * layer_pages, to.offset[row]

    def turned(x: Any, head: Array, start: int) -> tuple[Array, Array]:
        first, second = (x[row, head, half].astype(jnp.float32) for half in halves)
        if norms is not None:
            mean = (jnp.sum(first * first) + jnp.sum(second * second)) / size
            root = lax.rsqrt(mean + norms.eps)
            first, second = (
                (part * root).astype(x.dtype) * vectors[layer[...], start + half]
                for part, half in ((first, halves[0]), (second, halves[1]))
            )
            first, second = first.astype(jnp.float32), second.astype(jnp.float32)
        cos, sin = (each[row, lanes] for each in rope)
        both = first * cos - second * sin, second * cos + first * sin
        return both[0].astype(x.dtype), both[1].astype(x.dtype)

    @pl.when(number < heads)
    def run_query() -> None:
        parts = turned(q, number, norms.queries if norms else 0)
        for half, part in zip(halves, parts, strict=True):
            rotated[row, number, half] = part

    @pl.when((number >= heads) & (number < heads + kv_heads))
    def run_key() -> None:
        head = number - heads
        parts = turned(k, head, norms.keys if norms else 0)
        for half, part in zip(halves, parts, strict=True):
            keys[page, head, half, offset] = part

    @pl.when(number >= heads + kv_heads)
    def run_value() -> None:
        head = number - heads - kv_heads
        for half in halves:
            values[page, head, offset, half] = v[row, head, half]
