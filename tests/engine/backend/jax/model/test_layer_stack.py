"""Training, scoring and pages agree with a plain loop over the layers under autodiff."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array

from tests.engine.backend.jax.training.packed_case import (
    TINY,
    adapter_of,
    adapter_slots_of,
    buffers,
    gradient,
    model_of,
    train,
)
from tests.engine.conftest import Row
from tests.paged_rows import PagedRows
from tests.support.nightly import at_night
from tuneserve_engine.backend.base import MicroBatch
from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights, TrainingAdapter
from tuneserve_engine.backend.jax.attention.base import Attended, AttentionGradient, Visibility
from tuneserve_engine.backend.jax.attention.packed import attend_blocks, attend_blocks_backward
from tuneserve_engine.backend.jax.model.block import (
    AFTER,
    BEFORE,
    Layer,
    after_attention,
    before_attention,
)
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.model.layer_stack import LayerPass, PackedTokens
from tuneserve_engine.backend.jax.model.lora import LoraRows
from tuneserve_engine.backend.jax.training.adapter_slots import AdapterSlots
from tuneserve_engine.backend.jax.training.programs import DeviceMicroBatch
from tuneserve_engine.core.adapter import PROJECTIONS, UNEMBED

SLOT, LENGTH = 2, 21
"""The tested request, after a neighbour. Its datum ends inside a block."""


@cache
def model(layers: int) -> Decoder:
    """The first ``layers`` layers of one model."""
    whole, cut = (model_of(config, "full") for config in (TINY, replace(TINY, layers=layers)))
    state = nnx.state(whole)
    state["layers"] = jax.tree.map(lambda weight: weight[:layers], state["layers"])
    nnx.update(cut, state)
    return cut


def evaluating(layers: int) -> Decoder:
    decoder = model_of(replace(TINY, layers=layers))
    nnx.update(decoder, nnx.state(model(layers)))
    decoder.eval()
    return decoder


@cache
def adapter(layers: int) -> TrainingAdapter:
    """The part of one adapter that belongs to these layers."""
    found = adapter_of(4)

    def part(side: dict[str, Array]) -> dict[str, Array]:
        return {name: x if name == UNEMBED else x[:layers] for name, x in side.items()}

    found.weights = LoraWeights(part(found.weights.a), part(found.weights.b))
    return found


@pytest.fixture(scope="module")
def row(datum: Callable[..., Row]) -> Row:
    return datum(1, LENGTH)


@pytest.fixture(scope="module")
def micro_batch(
    micro_batch_of: Callable[..., MicroBatch], datum: Callable[..., Row], row: Row
) -> MicroBatch:
    return micro_batch_of((0, datum(2, 9)), (SLOT, row))


class Plain(NamedTuple):
    hidden: list[Array]  # the input of each layer, and the output of the last
    logprobs: Array


def plain(model: Decoder, weights: LoraWeights, x: Array, row: Row) -> Plain:
    """One datum from its embeddings on: no micro-batch, block, chunk, tape or neighbour."""
    scale = jnp.asarray([adapter_of(4).scale], jnp.float32)
    stack = model.stack()
    rope = stack.rope(jnp.arange(x.shape[1])[None])
    hidden = [x]
    for number in range(model.config.layers):
        a, b = ({n: s[n][number][None] for n in s if n != UNEMBED} for s in weights)
        layer = Layer({n: w[number] for n, w in stack.weights.items()}, LoraRows(a, b, scale))
        q, k, v = before_attention(model.config, layer, hidden[-1], rope)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        attended = attended.reshape(*x.shape[:2], -1)
        hidden.append(after_attention(model.config, layer, hidden[-1], attended))
    head = LoraRows(*({UNEMBED: s[UNEMBED][None]} for s in weights), scale)
    logits = model.logits(model.final(hidden[-1]), head)
    logprobs = jax.nn.log_softmax(logits, axis=-1)[0, np.arange(x.shape[1]), list(row.targets)]
    return Plain(hidden, logprobs)


def by_autodiff(layers: int, row: Row) -> tuple[Plain, LoraWeights, Array]:
    """The plain loop, and the gradients of its loss by the adapter and by the embeddings."""
    decoder = model(layers)

    def loss(weights: LoraWeights, x: Array) -> tuple[Array, Plain]:
        found = plain(decoder, weights, x, row)
        return -(found.logprobs * jnp.asarray(row.weights, jnp.float32)).sum(), found

    x = decoder.embedded(jnp.asarray([row.tokens]))
    run = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (by_weights, by_x), found = run(adapter(layers).weights, x)
    return found, by_weights, by_x


@pytest.fixture(scope="module")
def autodiff(row: Row) -> Callable[[int], Any]:
    """``by_autodiff`` of ``layers`` layers, run once for each number."""
    return cache(lambda layers: by_autodiff(layers, row))


def mine(micro_batch: MicroBatch, blocks: Any) -> np.ndarray:
    """The tokens of the tested datum, of [n, S, ...]."""
    flat = np.asarray(blocks).reshape(-1, *blocks.shape[2:])
    return flat[: len(micro_batch.segment_ids)][micro_batch.segment_ids == 1]


def assert_close(found: Any, wanted: Any, what: str, part: float = 1e-5) -> None:
    """Compare up to this fraction of the largest number."""
    wanted = np.asarray(wanted)
    assert found.shape == wanted.shape and np.abs(wanted).max() > 1e-3, what
    np.testing.assert_allclose(
        found, wanted, rtol=0, atol=part * np.abs(wanted).max(), err_msg=what
    )


def rows_of(adapter_slots: AdapterSlots) -> LoraRows:
    return LoraRows(adapter_slots.a, adapter_slots.b, adapter_slots.scale)


@jax.jit
def taped(
    model: Decoder, space: Any, adapter_slots: AdapterSlots, device_micro_batch: DeviceMicroBatch
) -> tuple[Array, Array]:
    """The hidden states after the last layer, and those on the tape."""
    x = model.embedded(device_micro_batch.tokens)
    hidden, left = model.forward_layers(
        x, device_micro_batch.layers, rows_of(adapter_slots), space=space
    )
    return hidden, left.space.tape.x


@jax.jit
def scored(
    model: Decoder, adapter_slots: AdapterSlots, device_micro_batch: DeviceMicroBatch
) -> Array:
    x = model.embedded(device_micro_batch.tokens)
    return model.forward_layers(x, device_micro_batch.layers, rows_of(adapter_slots))[0]


def adapter_slots(layers: int) -> AdapterSlots:
    neighbour = adapter_of(5, replace(TINY, layers=layers))
    return adapter_slots_of({0: neighbour, SLOT: adapter(layers)}, replace(TINY, layers=layers))


@pytest.mark.acceptance("C1")
def test_the_tape_has_every_hidden_state_of_a_plain_loop(
    micro_batch: MicroBatch, autodiff: Any
) -> None:
    decoder, filled = model(2), adapter_slots(2)
    space, _ = buffers(decoder, np.nan)
    device_micro_batch = DeviceMicroBatch.from_host(micro_batch, decoder.block)
    last, tape = taped(decoder, space, filled, device_micro_batch)
    states = [*np.split(np.asarray(tape), 2), last]
    wanted = autodiff(2)[0].hidden
    for number, (found, want) in enumerate(zip(states, wanted, strict=True)):
        assert_close(mine(micro_batch, found), want[0], f"hidden state {number}")


@pytest.mark.acceptance("C1")
@pytest.mark.parametrize("layers", [0, at_night(1), 2])
def test_scoring_and_pages_have_the_hidden_states_of_a_plain_loop(
    layers: int, micro_batch: MicroBatch, row: Row, autodiff: Any
) -> None:
    """Hidden state l is the output of the first l layers."""
    decoder, filled = evaluating(layers), adapter_slots(layers)
    wanted = autodiff(2)[0].hidden[layers]
    device_micro_batch = DeviceMicroBatch.from_host(micro_batch, decoder.block)
    assert_close(
        mine(micro_batch, scored(decoder, filled, device_micro_batch)), wanted[0], "scoring"
    )
    rows = LoraRows(
        *({n: x[0] if n == UNEMBED else x for n, x in s.items()} for s in filled[:2]),
        filled.scale,
        jnp.asarray([SLOT]),
    )
    pages = PagedRows(decoder, 1, 40, rows, filler=np.nan)
    read = pages.read(np.asarray([row.tokens]))
    assert_close(np.asarray(read), decoder.final(wanted), "pages")


@pytest.mark.acceptance("C1")
def test_training_without_a_layer_has_the_logprobs_and_gradients_of_autodiff(
    micro_batch: MicroBatch, autodiff: Any
) -> None:
    decoder, filled = model(0), adapter_slots(0)
    space, gradient_slots = buffers(decoder, np.nan)
    sent = DeviceMicroBatch.from_host(micro_batch, decoder.block)
    trained = train(decoder, space, gradient_slots, filled, sent)
    found, by_weights, by_x = autodiff(0)
    assert_close(mine(micro_batch, trained.out.logprobs)[:, 0], found.logprobs, "logprobs")
    assert_close(mine(micro_batch, trained.space.dx), by_x[0], "by the embeddings")
    got, rank = gradient(trained.gradient_slots, SLOT, adapter(0)), adapter(0).config.rank
    assert_close(got[f"{UNEMBED}.A"], by_weights.a[UNEMBED][..., :rank], "A")
    assert_close(got[f"{UNEMBED}.B"], by_weights.b[UNEMBED][..., :rank, :], "B")


@pytest.mark.parametrize(("blocks", "is_one_chunk"), [(2, True), (2, False), (4, True)])
def test_only_a_micro_batch_of_one_chunk_needs_no_loop(blocks: int, *, is_one_chunk: bool) -> None:
    """A loop's first block is known to the device only."""
    stack = replace(model(1).stack(), is_one_chunk=is_one_chunk)
    rows, per_block = jnp.zeros((blocks, 8), jnp.int32), jnp.zeros(blocks, jnp.int32)
    packed = PackedTokens(rows, rows, per_block, jnp.int32(blocks), per_block)
    is_known = []

    def body(at: Array, state: Any) -> Any:
        is_known.append(not isinstance(at, jax.core.Tracer))
        return state

    LayerPass(stack, packed, None, {}, jnp.int32(0)).each_chunk(body, ())
    assert stack.chunk == 2 and is_known == [is_one_chunk and blocks == 2]


# --- the explicit backward pass alone -------------------------------------------------------------


def forwards(q: Array, k: Array, v: Array, seen: Visibility) -> Attended:
    blank = Attended(jnp.zeros_like(q), jnp.zeros(q.shape[:-1], jnp.float32))
    return attend_blocks(q, k, v, seen, blank)


@jax.custom_vjp
def attend(q: Array, k: Array, v: Array, seen: Visibility) -> Array:
    """The engine's attention with its own backward pass, as one operation for autodiff."""
    return forwards(q, k, v, seen).out


def attend_and_keep(q: Array, k: Array, v: Array, seen: Visibility) -> Any:
    attended = forwards(q, k, v, seen)
    return attended.out, (q, k, v, attended, seen)


def attend_back(kept: Any, by_out: Array) -> Any:
    q, k, v, attended, seen = kept
    blank = AttentionGradient(*map(jnp.zeros_like, (q, k, v)))
    return *attend_blocks_backward(q, k, v, attended, by_out, seen, blank), None


attend.defvjp(attend_and_keep, attend_back)


@jax.jit
def ordinary(
    model: Decoder, adapter_slots: LoraRows, device_micro_batch: PackedTokens, x: Array, by_y: Array
) -> tuple[Array, LoraRows]:
    """``jax.grad`` over a scan of checkpointed layers, in the engine's chunks.

    Returns gradients by the first layer's input and by the adapter slots.
    """
    stack = model.stack()

    def layer(x: Array, sliced: Any, adapter_slots: LoraRows) -> Array:
        run = LayerPass(stack, device_micro_batch, adapter_slots, *sliced)
        chunks = jnp.arange(0, x.shape[0], stack.chunk)

        def each(function: Callable[[Array], Any]) -> Any:
            parts = jax.lax.map(function, chunks)
            return jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), parts)

        def before(at: Array) -> Any:
            return run.before(run.part(x, at), run.layer(at, BEFORE), run.rope(at))

        out = attend(*each(before), run.packed.seen())
        return each(lambda at: run.after(run.part(x, at), run.part(out, at), run.layer(at, AFTER)))

    def loss(x: Array, adapter_slots: LoraRows) -> Array:
        checkpointed = jax.checkpoint(partial(layer, adapter_slots=adapter_slots))
        y = stack.scan(checkpointed, x)
        return (y * by_y).sum()

    return jax.grad(loss, argnums=(0, 1))(x, adapter_slots)


@jax.jit
def explicit(
    model: Decoder,
    buffers: Any,
    adapter_slots: LoraRows,
    device_micro_batch: DeviceMicroBatch,
    x: Array,
    by_y: Array,
) -> tuple[Array, LoraWeights]:
    """The engine's gradients."""
    space, gradient_slots = buffers
    _, taped = model.forward_layers(x, device_micro_batch.layers, adapter_slots, space=space)
    space, gradient_slots = taped.run.reverse(
        taped.space._replace(dx=by_y), gradient_slots, device_micro_batch.owners
    )
    return space.dx, gradient_slots


@pytest.mark.acceptance("W3")
def test_the_explicit_backward_pass_equals_autodiff_over_the_layers(
    micro_batch: MicroBatch,
) -> None:
    decoder, filled = model(2), adapter_slots(2)
    device_micro_batch = jax.device_put(DeviceMicroBatch.from_host(micro_batch, decoder.block))
    x = decoder.embedded(device_micro_batch.tokens)
    valid = np.arange(x.shape[0])[:, None, None] < micro_batch.blocks
    by_y = jnp.asarray(np.random.default_rng(3).standard_normal(x.shape) * valid, jnp.float32)
    by_x, gradient_slots = explicit(
        decoder, buffers(decoder, np.nan), rows_of(filled), device_micro_batch, x, by_y
    )
    wanted_x, wanted = ordinary(decoder, rows_of(filled), device_micro_batch.layers, x, by_y)
    used = int(micro_batch.blocks)
    assert_close(np.asarray(by_x)[:used], wanted_x[:used], "by the input", 1e-6)
    for found, want in ((gradient_slots.a, wanted.a), (gradient_slots.b, wanted.b)):
        for name in PROJECTIONS:
            for slot in (0, SLOT):
                assert_close(found[name][:, slot], want[name][:, slot], f"{name} {slot}", 1e-6)
