"""Check the default device: the speed of a product, and on a GPU the kernels of training.

    python -m tuneserve_engine.backend.jax.device_check

Prints a JSON object. Attention and an adapter are computed by the kernels, in bfloat16, and
compared with NumPy in float64.

Dimension key: n blocks, S tokens of a block, K key/value heads, G query heads for each, H head_dim,
D inputs, R ranks, F outputs.
"""

import json
import os
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tuneserve_engine.backend.jax.attention.base import Attended, Visibility
from tuneserve_engine.backend.jax.attention.packed import attend_blocks
from tuneserve_engine.backend.jax.model.block_lora import BlockLora, add_deltas, blank_factors
from tuneserve_engine.backend.jax.model.tile import TILE
from tuneserve_engine.backend.jax.programs.registry import compiler_options

MOST_ERROR = 0.01
"""Norm of the error relative to the norm. Rounding to bfloat16 alone causes some 0.002."""
_GPU_SIZE, _CPU_SIZE = 4096, 1024
_PRODUCTS, _ROUNDS = 10, 3
_BLOCKS, _TOKENS = 3, 64


def main() -> None:
    """Print the speed and the errors of the default device."""
    # A worker may be using the device, and little of its memory is needed.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = jax.local_devices()[0]
    is_gpu = device.platform == "gpu"
    size, dtype = (_GPU_SIZE, "bfloat16") if is_gpu else (_CPU_SIZE, "float32")
    errors = {"attention": attention_error(), "adapters": adapter_error()} if is_gpu else {}
    found = {
        "size": size,
        "dtype": dtype,
        "flops": product_flops(size, dtype),
        "errors": errors,
        "most_error": MOST_ERROR,
    }
    print(json.dumps(found))


def product_flops(size: int, dtype: str) -> float:
    """Return the FLOP/s of products of two matrices [size, size]: the best of some rounds."""
    x = jnp.full((size, size), 1 / size, dtype)
    multiply = jax.jit(jnp.matmul, compiler_options=compiler_options())
    jax.block_until_ready(multiply(x, x))  # type: ignore[no-untyped-call]
    best = float("inf")
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        jax.block_until_ready([multiply(x, x) for _ in range(_PRODUCTS)])  # type: ignore[no-untyped-call]
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 * _PRODUCTS / best


def attention_error() -> float:
    """Return the relative error of attention over one datum of several blocks."""
    heads, group, width = 2, 2, TILE
    q, k, v = (
        _numbers(seed, _BLOCKS, heads, rows, width)
        for seed, rows in enumerate((group * _TOKENS, _TOKENS, _TOKENS))
    )
    tokens = np.arange(_BLOCKS * _TOKENS, dtype=np.int32).reshape(_BLOCKS, _TOKENS)
    first = np.zeros(_BLOCKS, np.int32)
    seen = Visibility(np.zeros_like(tokens), tokens, first, np.int32(_BLOCKS))  # type: ignore[arg-type]
    into = Attended(jnp.zeros_like(q), jnp.zeros(q.shape[:-1], jnp.float32))
    attend = partial(attend_blocks, implementation="kernels")
    got = jax.jit(attend, compiler_options=compiler_options())(q, k, v, seen, into).out

    wide_q, wide_k, wide_v = (np.asarray(each, np.float64) for each in (q, k, v))
    wide_q = wide_q.reshape(_BLOCKS, heads, group, _TOKENS, width)
    scores = np.einsum("nkgsh,mkth->kgnsmt", wide_q, wide_k) / np.sqrt(width)
    is_seen = tokens[:, :, None, None] >= tokens[None, None]
    weights = np.exp(np.where(is_seen, scores, -np.inf))
    weights /= weights.sum((-2, -1), keepdims=True)
    want = np.einsum("kgnsmt,mkth->nkgsh", weights, wide_v)
    return _error(got, want.reshape(q.shape))


def adapter_error() -> float:
    """Return the relative error of what adapters add to a projection, one per block."""
    inputs, rank, outputs = 2 * TILE, 24, 2 * TILE
    name, slot = "q_proj", np.array([1, 0, 1], np.int32)
    x = _numbers(3, _BLOCKS, _TOKENS, inputs)
    a, b = (
        _numbers(seed, 1, 2, *shape).astype(jnp.float32)
        for seed, shape in ((4, (inputs, rank)), (5, (rank, outputs)))
    )
    scale = np.array([0.5, 2], np.float32)
    blank = blank_factors({name: a}, {name: b}, [(name,)], (_BLOCKS, _TOKENS), x.dtype)
    place = jnp.asarray(slot), jnp.int32(0), jnp.int32(0)
    lora = BlockLora({name: a}, {name: b}, jnp.asarray(scale), *place, blank)

    @partial(jax.jit, compiler_options=compiler_options())
    def add(base: jax.Array, x: jax.Array, lora: BlockLora) -> list[jax.Array]:
        return add_deltas([base], x, (name,), lora)

    (got,) = add(jnp.zeros((_BLOCKS, _TOKENS, outputs), jnp.float32), x, lora)
    wide_a, wide_b = (np.asarray(each, np.float64)[0, slot] for each in (a, b))
    want = np.asarray(x, np.float64) @ wide_a @ wide_b * scale[slot, None, None]
    return _error(got, want)


def _numbers(seed: int, *shape: int) -> jax.Array:
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(numbers, jnp.bfloat16)


def _error(got: jax.Array, want: np.ndarray) -> float:
    wide = np.asarray(got, np.float64)
    return float(np.linalg.norm(wide - want) / np.linalg.norm(want))


if __name__ == "__main__":
    main()
