"""Blockwise attention against dense references, and its bits against its own in other
micro-batches.

Both implementations run everywhere: the GPU kernels are interpreted here.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from scripts.gpu_compile.shapes import GROUPS
from tests.support.compiled import lowered_for_a_gpu, memory_of
from tuneserve_engine.backend.jax.attention import packed_gpu
from tuneserve_engine.backend.jax.attention.base import (
    Attended,
    AttentionGradient,
    OwnBlocks,
    Visibility,
)
from tuneserve_engine.backend.jax.attention.packed import (
    Implementation,
    attend_blocks,
    attend_blocks_backward,
    key_blocks,
    query_blocks,
    token_rows,
)

IMPLEMENTATIONS = get_args(Implementation)
Bin = Sequence[int]
"""Lengths of datums that follow one another. The bin starts and ends with a block."""


class Shape(NamedTuple):
    block: int
    key_heads: int
    groups: int
    head_dim: int


SMALL = Shape(block=8, key_heads=2, groups=3, head_dim=6)
REAL = Shape(block=64, key_heads=2, groups=2, head_dim=64)
BINS: list[Bin] = [[5, 20, 3, 9], [8], [1, 1, 24], [2]]
"""Datums that start and end inside blocks, and one that fills its block."""


class Inputs(NamedTuple):
    """Inputs by token, with heads as a model has them."""

    q: np.ndarray  # [T, N, H]
    k: np.ndarray  # [T, K, H]
    v: np.ndarray  # [T, K, H]
    gradient: np.ndarray  # [T, N, H]


def numbers(tokens: int, shape: Shape, seed: int = 0) -> Inputs:
    random = np.random.default_rng(seed)
    heads = shape.key_heads * shape.groups

    def draw(count: int) -> np.ndarray:
        return random.standard_normal((tokens, count, shape.head_dim)).astype(np.float32)

    return Inputs(draw(heads), draw(shape.key_heads), draw(shape.key_heads), draw(heads))


def visibility(bins: Sequence[Bin], block: int, capacity: int) -> Visibility:
    """Written token by token."""
    datum, position, start = [], [], []
    number = 0
    for bin_lengths in bins:
        begins = {}
        first = len(datum) // block
        for length in bin_lengths:
            begins[number] = len(datum) // block
            datum += [number] * length
            position += range(length)
            number += 1
        while len(datum) % block:
            datum.append(-1)
            position.append(0)
        start += [begins[datum[at * block]] for at in range(first, len(datum) // block)]
    used = len(start)
    spare = (capacity - used) * block
    return Visibility(
        jnp.array(datum + [-1] * spare, jnp.int32).reshape(capacity, block),
        jnp.array(position + [0] * spare, jnp.int32).reshape(capacity, block),
        jnp.array(start + list(range(used, capacity)), jnp.int32),
        jnp.int32(used),
    )


class PackedInputs(NamedTuple):
    """Inputs in blocks, beside buffers of NaN for the outputs."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gradient: jax.Array
    seen: Visibility
    attended: Attended
    gradients: AttentionGradient


def packed(
    inputs: Inputs, seen: Visibility, shape: Shape, dtype: jnp.dtype = jnp.float32
) -> PackedInputs:
    """Pack the inputs. Unused blocks hold NaN."""
    capacity = seen.start.shape[0]

    def blocks(x: np.ndarray) -> jax.Array:
        whole = np.full((capacity * shape.block, *x.shape[1:]), np.nan, np.float32)
        whole[: len(x)] = x
        return jnp.asarray(whole, dtype).reshape(capacity, shape.block, *x.shape[1:])

    q, gradient = (query_blocks(blocks(x), shape.key_heads) for x in (inputs.q, inputs.gradient))
    k, v = key_blocks(blocks(inputs.k)), key_blocks(blocks(inputs.v))
    nan = [jnp.full(x.shape, jnp.nan, dtype) for x in (q, k, v)]
    sums = jnp.full(q.shape[:3], jnp.nan)
    return PackedInputs(
        q, k, v, gradient, seen, Attended(nan[0], sums), AttentionGradient(nan[0], nan[1], nan[2])
    )


class Results(NamedTuple):
    """Results by token."""

    out: np.ndarray
    of_q: np.ndarray
    of_k: np.ndarray
    of_v: np.ndarray


def run(
    implementation: Implementation,
) -> Callable[[PackedInputs], tuple[Attended, AttentionGradient]]:
    """Forward and backward, jitted."""

    def both(at: PackedInputs) -> tuple[Attended, AttentionGradient]:
        inputs = at.q, at.k, at.v
        attended = attend_blocks(*inputs, at.seen, at.attended, implementation=implementation)
        gradients = attend_blocks_backward(
            *inputs, attended, at.gradient, at.seen, at.gradients, implementation=implementation
        )
        return attended, gradients

    return jax.jit(both)


RUN = {implementation: run(implementation) for implementation in IMPLEMENTATIONS}


def results(run: tuple[Attended, AttentionGradient], shape: Shape) -> Results:
    attended, gradients = run

    def rows(x: jax.Array) -> np.ndarray:
        return np.asarray(token_rows(x, shape.block).astype(jnp.float32)).reshape(
            x.shape[0] * shape.block, -1, shape.head_dim
        )

    return Results(*map(rows, (attended.out, *gradients)))


def dense(inputs: Inputs, datum: np.ndarray, position: np.ndarray, block: int) -> Results:
    """The reference in float64, with the whole matrix of scores, head by head."""
    q, k, v, gradient = (x.astype(np.float64) for x in inputs)
    tokens, heads, head_dim = q.shape
    groups = heads // k.shape[1]
    where = np.arange(tokens) // block
    sees = (datum[:, None] == datum) & (position[:, None] >= position)
    sees &= (datum[:, None] >= 0) | (where[:, None] == where)
    out, of_q, of_k, of_v = (np.zeros_like(x) for x in (q, q, k, v))
    for head in range(heads):
        key_head = head // groups
        scores = q[:, head] @ k[:, key_head].T / np.sqrt(head_dim)
        exponentials = np.where(sees, np.exp(scores), 0)
        weights = exponentials / exponentials.sum(1, keepdims=True)
        out[:, head] = weights @ v[:, key_head]
        of_weights = gradient[:, head] @ v[:, key_head].T
        of_scores = weights * (of_weights - (weights * of_weights).sum(1, keepdims=True))
        of_q[:, head] = of_scores @ k[:, key_head] / np.sqrt(head_dim)
        of_k[:, key_head] += of_scores.T @ q[:, head] / np.sqrt(head_dim)
        of_v[:, key_head] += weights.T @ gradient[:, head]
    return Results(out, of_q, of_k, of_v)


def assert_close(got: Results, want: Results, *, relative: float) -> None:
    """Compare relative to the largest entry, as errors of a sum scale."""
    for name, value, expected in zip(Results._fields, got, want, strict=True):
        limit = relative * np.abs(expected).max()
        np.testing.assert_allclose(value, expected, rtol=0, atol=limit, err_msg=name)


@pytest.mark.parametrize(
    ("implementation", "groups"),
    [("blocks", 1), ("blocks", 3), *(("kernels", groups) for groups in GROUPS)],
)
def test_values_and_gradients_equal_a_dense_reference(
    implementation: Implementation, groups: int
) -> None:
    shape = SMALL._replace(groups=groups)
    seen = visibility(BINS, shape.block, capacity=13)
    tokens = int(seen.blocks) * shape.block
    inputs = numbers(tokens, shape)
    got = results(RUN[implementation](packed(inputs, seen, shape)), shape)
    datum, position = (np.asarray(x).reshape(-1)[:tokens] for x in seen[:2])
    want = dense(inputs, datum, position, shape.block)
    assert_close(Results(*(x[:tokens] for x in got)), want, relative=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_and_gradients_equal_torch(implementation: Implementation) -> None:
    lengths = [37, 100, 5, 50]
    seen = visibility([lengths], REAL.block, capacity=3)
    inputs = numbers(sum(lengths), REAL)
    got = results(RUN[implementation](packed(inputs, seen, REAL)), REAL)
    begins = 0
    for length in lengths:
        part = slice(begins, begins + length)
        q, k, v = (torch.tensor(x[part]).requires_grad_() for x in inputs[:3])
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        out.backward(torch.tensor(inputs.gradient[part]))
        want = Results(*(x.detach().numpy() for x in (out, q.grad, k.grad, v.grad)))
        assert_close(Results(*(x[part] for x in got)), want, relative=1e-5)
        begins += length


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_differs_by_its_rounding_only(implementation: Implementation) -> None:
    """Inputs are exact in bfloat16, so the differences are roundings of results, of the output that
    the reverse pass reads, and, in the kernels, of weights.

    Each is half an epsilon, relative to the largest entry.
    """
    seen = visibility(BINS, SMALL.block, capacity=13)
    tokens = int(seen.blocks) * SMALL.block
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in numbers(tokens, SMALL)]
    inputs = Inputs(*(np.asarray(x.astype(jnp.float32)) for x in rounded))
    at = packed(inputs, seen, SMALL, jnp.dtype(jnp.bfloat16))
    attended, gradients = RUN[implementation](at)
    assert attended.logsumexp.dtype == jnp.float32
    assert {x.dtype for x in (attended.out, *gradients)} == {jnp.dtype(jnp.bfloat16)}
    got = results((attended, gradients), SMALL)
    datum, position = (np.asarray(x).reshape(-1)[:tokens] for x in seen[:2])
    want = dense(inputs, datum, position, SMALL.block)
    epsilon = float(jnp.finfo(jnp.bfloat16).eps)
    assert_close(Results(*(x[:tokens] for x in got)), want, relative=1.5 * epsilon)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bits_depend_only_on_the_requests_own_bin(implementation: Implementation) -> None:
    own: Bin = [37, 100, 5, 70]
    mine, neighbour = numbers(sum(own), REAL), numbers(130, REAL, seed=1)
    nan = Inputs(*(np.full_like(x, np.nan) for x in neighbour))

    def bits(before: Sequence[Inputs], after: Sequence[Inputs], capacity: int) -> Results:
        padding = Inputs(*(np.zeros((-len(x) % REAL.block, *x.shape[1:]), x.dtype) for x in mine))
        rest = Inputs(*(np.full((62, *x.shape[1:]), np.nan, x.dtype) for x in mine))
        parts = [part for x in before for part in (x, rest)]
        begins = sum(len(part.q) for part in parts)
        parts += [mine, padding, *(part for x in after for part in (x, rest))]
        bins = [[130]] * len(before) + [own] + [[130]] * len(after)
        whole = Inputs(*(np.concatenate(field) for field in zip(*parts, strict=True)))
        at = packed(whole, visibility(bins, REAL.block, capacity), REAL)
        got = results(RUN[implementation](at), REAL)
        return Results(*(x[begins : begins + sum(own)] for x in got))

    alone = bits([], [], 4)
    assert np.isfinite(alone.out).all()
    others = {
        "another capacity": bits([], [], 13),
        "behind others": bits([neighbour], [], 13),
        "among others": bits([neighbour, neighbour], [neighbour], 13),
        "among NaN": bits([nan], [nan], 13),
    }
    for name, other in others.items():
        for field, want, got in zip(Results._fields, alone, other, strict=True):
            np.testing.assert_array_equal(got, want, err_msg=f"{field} {name}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_unused_blocks_are_neither_read_nor_written(implementation: Implementation) -> None:
    seen = visibility(BINS, SMALL.block, capacity=13)
    used = int(seen.blocks)
    at = packed(numbers(used * SMALL.block, SMALL), seen, SMALL)
    seven = jax.tree.map(lambda x: jnp.full_like(x, 7), (at.attended, at.gradients))
    for result in jax.tree.leaves(
        RUN[implementation](at._replace(attended=seven[0], gradients=seven[1]))
    ):
        assert np.isfinite(result[:used]).all()
        assert (np.asarray(result[used:]) == 7).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_buffers_of_several_layers_are_used_in_place(implementation: Implementation) -> None:
    seen = visibility(BINS, SMALL.block, capacity=13)
    used = int(seen.blocks)
    at = packed(numbers(used * SMALL.block, SMALL), seen, SMALL)
    want = RUN[implementation](at)

    def among(x: jax.Array, index: int, count: int) -> jax.Array:
        return jnp.concatenate([x if i == index else jnp.full_like(x, 7) for i in range(count)])

    @jax.jit
    def layered(base: jax.Array, attended_base: jax.Array) -> tuple[Attended, AttentionGradient]:
        inputs = [among(x, 1, 3) for x in at[:3]]
        into = jax.tree.map(lambda x: among(x, 2, 4), at.attended)
        bases = {"base": base, "attended_base": attended_base, "implementation": implementation}
        attended = attend_blocks(*inputs, seen, into, **bases)
        return attended, attend_blocks_backward(
            *inputs, attended, at.gradient, seen, at.gradients, **bases
        )

    attended, gradients = layered(jnp.int32(13), jnp.int32(26))
    for whole, alone in zip(attended, want[0], strict=True):
        np.testing.assert_array_equal(whole[26:39], alone)
        assert (np.delete(np.asarray(whole), range(26, 39), 0) == 7).all()
    for got, alone in zip(gradients, want[1], strict=True):
        np.testing.assert_array_equal(got, alone)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_devices_that_share_a_datum_have_the_bits_of_one(
    implementation: Implementation, dtype: jnp.dtype
) -> None:
    """But for the gradients of keys and values: each is a sum over devices."""
    length, capacity = 11 * SMALL.block - 3, 12
    seen = visibility([[length]], SMALL.block, capacity)
    at = packed(numbers(11 * SMALL.block, SMALL), seen, SMALL, jnp.dtype(dtype))
    attended, gradients = RUN[implementation](at)
    size = 5

    @jax.jit
    def run_share(first: jax.Array, blocks: jax.Array) -> tuple[Attended, AttentionGradient]:
        own_blocks = OwnBlocks(first, blocks, size)

        def mine(x: jax.Array) -> jax.Array:
            room = jnp.pad(x, ((0, size), *[(0, 0)] * (x.ndim - 1)), constant_values=7)
            part = jax.lax.dynamic_slice_in_dim(room, first, size)
            used = jnp.arange(size).reshape(-1, *[1] * (x.ndim - 1)) < blocks
            return jnp.concatenate([jnp.full_like(part, 7), jnp.where(used, part, 7)])

        options = {"base": size, "own": own_blocks, "implementation": implementation}
        options["attended_base"] = size
        keys = at.k, at.v
        into = jax.tree.map(lambda x: jnp.full_like(mine(x), 7), at.attended)
        own = attend_blocks(mine(at.q), *keys, seen, into, **options)
        zeros = [jnp.zeros(x.shape, jnp.float32) for x in keys]
        into = AttentionGradient(jnp.full_like(mine(at.q)[size:], 7), *zeros)
        of_own = attend_blocks_backward(
            mine(at.q), *keys, own, mine(at.gradient)[size:], seen, into, **options
        )
        return own, of_own

    total = [0.0, 0.0]
    for first in (0, 4, 8):
        used = min(4, int(seen.blocks) - first)
        own, of_own = run_share(jnp.int32(first), jnp.int32(used))
        for got, want in zip((*own, of_own.q), (*attended, gradients.q), strict=True):
            got = got[-size:]
            np.testing.assert_array_equal(got[:used], want[first : first + used])
            assert (np.asarray(got[used:]) == 7).all()
        total = [x + np.asarray(part) for x, part in zip(total, of_own[1:], strict=True)]
    for got, want in zip(total, gradients[1:], strict=True):
        want = np.asarray(want[: int(seen.blocks)].astype(jnp.float32))
        got = np.asarray(got[: int(seen.blocks)])
        limit = np.abs(want).max() * (1e-6 if dtype == jnp.float32 else 2.0**-8)
        np.testing.assert_allclose(got, want, rtol=0, atol=limit)


def test_heads_are_grouped_by_the_key_head_that_they_read() -> None:
    x = np.arange(2 * 3 * 6 * 5, dtype=np.float32).reshape(2, 3, 6, 5)
    blocks = np.asarray(query_blocks(jnp.asarray(x), 2))
    for head in range(6):
        rows = slice(head % 3 * 3, head % 3 * 3 + 3)
        np.testing.assert_array_equal(blocks[:, head // 3, rows], x[:, :, head])
    np.testing.assert_array_equal(token_rows(jnp.asarray(blocks), 3), x.reshape(2, 3, 30))
    np.testing.assert_array_equal(key_blocks(jnp.asarray(x)), x.swapaxes(1, 2))


def test_layouts_are_differentiated_through() -> None:
    x = jnp.asarray(numbers(6, SMALL).q).reshape(2, 3, 6, 6)
    rows, pull = jax.vjp(lambda x: token_rows(query_blocks(x, 2), 3), x)
    np.testing.assert_array_equal(pull(rows)[0], x)


def test_no_score_outlives_its_block() -> None:
    capacity, block = 32, 64
    seen = visibility([[capacity * block]], block, capacity)
    at = packed(numbers(capacity * block, REAL), seen, REAL)
    memory = memory_of(RUN["blocks"].lower(at))
    scores = (capacity * block) ** 2 * 4
    assert memory.temp_size_in_bytes < scores / 4


@pytest.mark.parametrize("shape", [REAL, Shape(64, 2, 3, 80)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kernels_are_lowered_for_a_gpu(shape: Shape, dtype: jnp.dtype) -> None:
    seen = visibility([[150, 100]], shape.block, capacity=5)
    at = packed(numbers(250, shape), seen, shape, jnp.dtype(dtype))
    options = {"base": 0, "attended_base": 0, "interpret": False}

    def both(at: PackedInputs) -> AttentionGradient:
        attended = packed_gpu.attend(*at[:3], at.seen, at.attended, **options)
        return packed_gpu.attend_backward(
            *at[:3], attended, at.gradient, at.seen, at.gradients, **options
        )

    text = lowered_for_a_gpu(both, at)
    assert text.count("@__gpu$xla.gpu.triton(") == 3


def test_kernels_do_not_grow_with_the_group() -> None:
    """Shared memory does grow: a kernel that repeats its products for each head of a group of eight
    asks for more than twice what a GPU has.

    ``make gpu-compile`` runs the compiler itself.
    """

    def products(groups: int) -> int:
        shape = SMALL._replace(groups=groups)
        seen = visibility([[15, 10]], shape.block, capacity=5)
        at = packed(numbers(25, shape), seen, shape)
        return str(jax.make_jaxpr(run("kernels"))(at)).count("dot_general")

    assert products(1) == products(GROUPS[-1]) > 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_datum_has_the_same_bits_wherever_it_starts(
    implementation: Implementation, dtype: jnp.dtype
) -> None:
    lengths = [150, 1, 37, 64, 100, 5, 70, 20]
    inputs = numbers(sum(lengths), REAL)

    def out(datums: Sequence[int], part: slice) -> list[np.ndarray]:
        padding = [(0, -sum(datums) % REAL.block), (0, 0), (0, 0)]
        mine = Inputs(*(np.pad(x[part], padding) for x in inputs))
        at = packed(mine, visibility([datums], REAL.block, 8), REAL, jnp.dtype(dtype))
        attended, _ = RUN[implementation](at)
        values = np.asarray(token_rows(attended.out, REAL.block).astype(jnp.float32))
        return np.split(values.reshape(8 * REAL.block, -1)[: sum(datums)], np.cumsum(datums)[:-1])

    together = out(lengths, slice(None))
    begins = 0
    for length, among in zip(lengths, together, strict=True):
        (alone,) = out([length], slice(begins, begins + length))
        np.testing.assert_array_equal(among, alone, err_msg=f"{length} from {begins} on")
        begins += length
