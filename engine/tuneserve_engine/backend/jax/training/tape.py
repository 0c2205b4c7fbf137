"""The layers in training: a forward pass that leaves a tape, and the explicit backward pass.

``jax.grad`` over the layers would hold every layer's adapter gradients at once, and JAX cannot
reverse a loop whose length is known only at run time. So the backward pass is explicit. Layer by
layer, from the last, it recomputes what the tape does not hold and adds each block's adapter
gradients to the gradient slots of the block's request. Inside a chunk, autodiff does the work.

Dimension key: L layers, n blocks, S tokens of a block, c blocks of a chunk, D hidden, N query
heads, K key/value heads, G = N / K, H head_dim, J slots.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights
from tuneserve_engine.backend.jax.attention.base import AttentionGradient
from tuneserve_engine.backend.jax.model import block_lora
from tuneserve_engine.backend.jax.model.block import AFTER, BEFORE, DOTS, Layer
from tuneserve_engine.backend.jax.model.block_lora import BlockLora
from tuneserve_engine.backend.jax.model.layer_stack import (
    Attention,
    LayerPass,
    LayerStack,
    PackedTokens,
    attention_shapes,
    write_blocks,
    write_qkv,
)
from tuneserve_engine.backend.jax.model.lora import LoraRows
from tuneserve_engine.backend.jax.specs import spec
from tuneserve_engine.backend.jax.training.gradient_kernels import Runs, add_factors, runs_of
from tuneserve_engine.backend.jax.training.gradient_slots import BlockOwners, add_blocks


class Tape(NamedTuple):
    """The values that the forward pass leaves. ``x`` holds every layer's input, layer 0 first."""

    x: Float[Array, "_ S D"]
    attention: Attention
    before: tuple[Array, ...]  # residuals, chunk after chunk, with room for the highest rank
    after: tuple[Array, ...]


class Workspace(NamedTuple):
    """The tape and the gradients of one layer.

    Donated from batch to batch and never cleared: a batch reads only what it has written.
    """

    tape: Tape
    dx: Float[Array, "n S D"]
    dattended: Float[Array, "n K GS H"]
    dqkv: AttentionGradient

    def forward(
        self, stack: LayerStack, packed: PackedTokens, lora: LoraRows, x: Float[Array, "n S D"]
    ) -> tuple[Float[Array, "n S D"], "Taped"]:
        """Return the hidden states after the last layer, and the tape for the backward pass."""
        run = TrainingPass(stack, packed, lora)
        hidden, tape = run.forward(self.tape, x)
        return hidden, Taped(run, self._replace(tape=tape))


class TrainingPass:
    """One micro-batch through the layers and back, within the tracing of one program."""

    def __init__(self, stack: LayerStack, packed: PackedTokens, adapter_slots: LoraRows) -> None:
        self._stack = stack
        self._stream = packed
        self._bank = adapter_slots
        self._n = packed.slot.shape[0]
        self._before, self._after = _Residuals(), _Residuals()
        remat = stack.remat
        self._keeps_attended = remat != "full"
        self._keeps_qkv = self._keeps_residuals = remat in ("none", "dots")

    def forward(self, tape: Tape, x: Float[Array, "n S D"]) -> tuple[Float[Array, "n S D"], Tape]:
        """Return the hidden states after the last layer, and the tape."""
        if not self._stack.config.layers:
            return x, tape  # a scan traces its body even for 0 layers; the tape then has no size
        x, tape = self._stack.scan(self._layer_forward, (x, tape))
        return x, tape

    def reverse(
        self, space: Workspace, gradient_slots: LoraWeights, blocks: BlockOwners
    ) -> tuple[Workspace, LoraWeights]:
        """Take ``space.dx`` from the gradient by the output to that by the input.

        The gradients by the adapters are added to the gradient slots.
        """
        if not self._stack.config.layers:
            return space, gradient_slots
        size = self._stream.positions.shape[1]
        are_kernels_used = block_lora.is_used(*self._bank.layers(), size)
        owners = runs_of(blocks, self._stack.chunk) if are_kernels_used else blocks
        step = partial(self._layer_reverse, owners)
        space, gradient_slots = self._stack.scan(step, (space, gradient_slots), reverse=True)
        return space, gradient_slots

    # --- one layer ------------------------------------------------------------------------------

    def _layer_forward(self, carry: Any, sliced: Any) -> Any:
        # If a loop reads and writes one buffer, XLA copies all of it, chunk by chunk. So one
        # loop reads x and writes it to the tape, and the other reads the tape and writes x.
        x, tape = carry
        run = LayerPass(self._stack, self._stream, self._bank, *sliced)
        x_base, base, attended_base = self._bases(run)

        def before(at: Array, tape: Tape) -> Tape:
            part = run.part(x, at)
            qkv, kept = self._before_of(run, at, part)
            return tape._replace(
                x=write_blocks(tape.x, x_base + at, part),
                attention=write_qkv(tape.attention, base + at, qkv),
                before=self._put_residuals(tape.before, run, at, kept),
            )

        def after(at: Array, state: tuple[Array, tuple[Array, ...]]) -> Any:
            y, residuals = state
            attended = run.part(tape.attention.attended.out, attended_base + at)
            part, kept = self._after_of(run, at, run.part(tape.x, x_base + at), attended)
            return write_blocks(y, at, part), self._put_residuals(residuals, run, at, kept)

        tape = run.each_chunk(before, tape)
        tape = tape._replace(attention=run.attend(tape.attention, base, attended_base))
        y, residuals = run.each_chunk(after, (x, tape.after))
        return y, tape._replace(after=residuals)

    def _layer_reverse(self, blocks: BlockOwners | Runs, carry: Any, sliced: Any) -> Any:
        space, gradient_slots = carry
        run = LayerPass(self._stack, self._stream, self._bank, *sliced)
        x_base, base, attended_base = self._bases(run)
        tape = space.tape
        if not self._keeps_qkv:
            attention = run.project_all(tape.x, x_base, tape.attention, base)
            if not self._keeps_attended:
                attention = run.attend(attention, base, attended_base)
            tape = tape._replace(attention=attention)

        def after(at: Array, state: Any) -> Any:
            dx, dattended, gradient_slots = state
            attended = run.part(tape.attention.attended.out, attended_base + at)
            pull = self._after_pullback(tape, run, at, run.part(tape.x, x_base + at), attended)
            by_x, by_attended, by_lora = pull(run.part(dx, at))
            gradient_slots = _add(gradient_slots, by_lora, AFTER, run, blocks, at)
            return (
                write_blocks(dx, at, by_x),
                write_blocks(dattended, at, by_attended),
                gradient_slots,
            )

        def before(at: Array, state: Any) -> Any:
            dx, gradient_slots = state
            pull = self._before_pullback(tape, run, at, run.part(tape.x, x_base + at))
            by_x, by_lora = pull(tuple(run.part(d, at) for d in dqkv))
            return write_blocks(dx, at, run.part(dx, at) + by_x), _add(
                gradient_slots, by_lora, BEFORE, run, blocks, at
            )

        dx, dattended, gradient_slots = run.each_chunk(
            after, (space.dx, space.dattended, gradient_slots)
        )
        bases = {"base": base, "attended_base": attended_base}
        dqkv = run.attend_backward(tape.attention, dattended, space.dqkv, bases)
        dx, gradient_slots = run.each_chunk(before, (dx, gradient_slots))
        return Workspace(tape, dx, dattended, dqkv), gradient_slots

    def _bases(self, run: LayerPass) -> tuple[Array, Array | int, Array | int]:
        """Return the layer's first blocks in the buffers of inputs, of q, k and v, and of outputs.

        The last is the buffer of attention's outputs. A buffer that keeps one layer starts at 0.
        """
        x_base = run.number * self._n
        return (
            x_base,
            x_base if self._keeps_qkv else 0,
            x_base if self._keeps_attended else 0,
        )

    # --- one chunk ------------------------------------------------------------------------------

    def _before_of(self, run: LayerPass, at: Array, x: Array) -> tuple[Any, tuple[Array, ...]]:
        function, trained, inputs = self._before_function(run, at)
        if not self._keeps_residuals:
            return function(x, trained), ()
        qkv, pull = jax.vjp(self._saving(function), x, trained)
        return qkv, self._before.apart(pull, (x, trained, inputs))

    def _before_pullback(self, tape: Tape, run: LayerPass, at: Array, x: Array) -> Any:
        function, trained, inputs = self._before_function(run, at)
        if not self._keeps_residuals:
            return jax.vjp(function, x, trained)[1]
        kept = self._part_residuals(tape.before, self._before.shapes, run, at)
        return self._before.together(kept, (x, trained, inputs))

    def _before_function(self, run: LayerPass, at: Array) -> tuple[Callable[..., Any], Any, Any]:
        weights, lora = run.layer(at, BEFORE)
        rope = run.rope(at)
        assert isinstance(lora, LoraRows | BlockLora)

        def function(x: Array, trained: Any) -> Any:
            return run.before(x, Layer(weights, lora.with_trained(trained)), rope)

        return function, lora.trained, (weights, rope, lora.constants)

    def _after_of(
        self, run: LayerPass, at: Array, x: Array, attended: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        function, trained, inputs = self._after_function(run, at)
        if not self._keeps_residuals:
            return function(x, attended, trained), ()
        y, pull = jax.vjp(self._saving(function), x, attended, trained)
        return y, self._after.apart(pull, (x, attended, trained, inputs))

    def _after_pullback(
        self, tape: Tape, run: LayerPass, at: Array, x: Array, attended: Array
    ) -> Any:
        function, trained, inputs = self._after_function(run, at)
        if not self._keeps_residuals:
            return jax.vjp(function, x, attended, trained)[1]
        kept = self._part_residuals(tape.after, self._after.shapes, run, at)
        return self._after.together(kept, (x, attended, trained, inputs))

    def _after_function(self, run: LayerPass, at: Array) -> tuple[Callable[..., Any], Any, Any]:
        weights, lora = run.layer(at, AFTER)
        assert isinstance(lora, LoraRows | BlockLora)

        def function(x: Array, attended: Array, trained: Any) -> Array:
            return run.after(x, attended, Layer(weights, lora.with_trained(trained)))

        return function, lora.trained, (weights, lora.constants)

    def _saving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._stack.remat == "none":
            return function
        policy = jax.checkpoint_policies.save_only_these_names(*DOTS)
        return jax.checkpoint(function, policy=policy, prevent_cse=False)

    def _place(self, run: LayerPass, at: Array) -> Array:
        """Return the chunk's number among all layers' chunks."""
        size = self._stack.chunk
        return run.number * (self._n // size) + at // size

    def _put_residuals(
        self, into: tuple[Array, ...], run: LayerPass, at: Array, kept: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        place = self._place(run, at)
        return tuple(write_blocks(b, place, x[None]) for b, x in zip(into, kept, strict=True))

    def _part_residuals(
        self,
        buffers: tuple[Array, ...],
        shapes: Sequence[tuple[int, ...]],
        run: LayerPass,
        at: Array,
    ) -> tuple[Array, ...]:
        place = self._place(run, at)
        return tuple(
            jax.lax.dynamic_slice(buffer, (place, *(0,) * len(shape)), (1, *shape))[0]
            for buffer, shape in zip(buffers, shapes, strict=True)
        )


class Taped(NamedTuple):
    """A forward pass in training mode, ready for ``run.reverse``."""

    run: TrainingPass
    space: Workspace


class _Residuals:
    """Splits a pullback into its inputs and the rest, and joins the two again.

    The inputs are available again in the backward pass; the tape has to keep the rest, whose
    ``shapes`` may be smaller than the tape's.
    """

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._structure: Any = None
        self._sources: list[tuple[bool, int]] = []  # whether it is an input, and its number

    def apart(self, pull: Any, inputs: Any) -> tuple[Array, ...]:
        leaves, self._structure = jax.tree.flatten(pull)
        known = {id(x): number for number, x in enumerate(jax.tree.leaves(inputs))}
        kept: list[Array] = []
        self._sources = []
        for leaf in leaves:
            if id(leaf) in known:
                self._sources.append((True, known[id(leaf)]))
            else:
                self._sources.append((False, len(kept)))
                kept.append(leaf)
        self.shapes = [leaf.shape for leaf in kept]
        return tuple(kept)

    def together(self, kept: Sequence[Array], inputs: Any) -> Any:
        given = jax.tree.leaves(inputs)
        leaves = [given[number] if known else kept[number] for known, number in self._sources]
        return jax.tree.unflatten(self._structure, leaves)


def _add(  # noqa: PLR0913
    gradient_slots: LoraWeights,
    by_lora: Any,
    groups: Sequence[Sequence[str]],
    run: LayerPass,
    blocks: BlockOwners | Runs,
    at: Array,
) -> LoraWeights:
    """Return the gradient slots with the chunk's gradients added."""
    if isinstance(blocks, Runs):
        factors = [(names, by_lora[names[0]]) for names in groups]
        return LoraWeights(*add_factors(gradient_slots, factors, run.number, blocks, at))
    mine = blocks.part(at, run.stack.chunk)
    a, b = (
        {**whole, **add_blocks({n: whole[n] for n in by}, by, run.number, mine)}
        for whole, by in zip(gradient_slots, by_lora, strict=True)
    )
    return LoraWeights(a, b)


def workspace_shapes(
    stack: LayerStack, adapter_slots: Any, *, blocks: int, size: int, dtype: DTypeLike
) -> Any:
    """Return the shapes of a ``Workspace`` for ``blocks`` blocks of ``size`` tokens.

    It serves adapters of the given slots' rank bucket and of lower ones.
    """
    config = stack.config
    layers = config.layers
    one = attention_shapes(config, blocks, size, dtype)
    x = spec((blocks, size, config.hidden), dtype)

    def times(count: int, tree: Any) -> Any:
        return jax.tree.map(lambda s: spec((count * s.shape[0], *s.shape[1:]), s.dtype), tree)

    remat = stack.remat
    qkv = times(layers if remat in ("none", "dots") else 1, one)
    attended = times(1 if remat == "full" else layers, one.attended)
    before, after = _residual_shapes(stack, adapter_slots, size, dtype)
    chunks = layers * (blocks // stack.chunk)
    stacked = partial(jax.tree.map, lambda s: spec((chunks, *s.shape), s.dtype))
    tape = Tape(
        x=times(layers, x),
        attention=qkv._replace(attended=attended),
        before=stacked(before),
        after=stacked(after),
    )
    return Workspace(tape, x, one.q, AttentionGradient(one.q, one.k, one.v))


def _residual_shapes(
    stack: LayerStack, adapter_slots: Any, size: int, dtype: DTypeLike
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return shapes of the residuals of a chunk before and after attention.

    They come on top of what the tape always holds.
    """
    chunk, config = stack.chunk, stack.config
    if not config.layers:
        return (), ()

    def trace(weights: dict[str, Array], adapter_slots: LoraRows, x: Array, attended: Array) -> Any:
        tokens, blocks = jnp.zeros((chunk, size), jnp.int32), jnp.zeros(chunk, jnp.int32)
        packed = PackedTokens(tokens, tokens, blocks, jnp.int32(0), blocks)
        layer = {name: stacked[0] for name, stacked in weights.items()}
        run = LayerPass(stack, packed, adapter_slots, layer, jnp.int32(0))
        training = TrainingPass(stack, packed, adapter_slots)
        first = jnp.int32(0)
        return (
            training._before_of(run, first, x)[1],
            training._after_of(run, first, x, attended)[1],
        )

    x = spec((chunk, size, config.hidden), dtype)
    attended = attention_shapes(config, chunk, size, dtype).attended.out
    shapes: tuple[tuple[Any, ...], tuple[Any, ...]] = jax.eval_shape(
        trace, stack.weights, adapter_slots, x, attended
    )
    return shapes
