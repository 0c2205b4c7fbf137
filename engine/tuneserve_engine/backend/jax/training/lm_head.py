"""From the last hidden states to logprobs, losses and their gradient, chunk by chunk.

The logits of a micro-batch never exist as a whole. Every loss is elementwise in the logprobs, so a
chunk's loss gradient is known while its logits are in memory. A token costs two products with the
vocabulary; its logits are neither kept nor recomputed. Every chunk has one shape, and only used
chunks run, so that a request's bits depend neither on its place nor on its neighbours.

Dimension key: n blocks of the micro-batch, C blocks of a chunk, S tokens of a block, K targets per
token, D hidden, V vocabulary, J slots, R rank bucket.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tuneserve_engine.backend.jax.attention.divided import Divided
from tuneserve_engine.backend.jax.mesh import DEVICES
from tuneserve_engine.backend.jax.model import block_lora
from tuneserve_engine.backend.jax.model.layers import rms_norm
from tuneserve_engine.backend.jax.model.lora import float32_product
from tuneserve_engine.backend.jax.specs import spec
from tuneserve_engine.backend.jax.training.gradient_kernels import Term, add_products, runs_of
from tuneserve_engine.backend.jax.training.gradient_slots import BlockOwners, add_to_slot
from tuneserve_engine.backend.jax.training.losses import (
    GSPO_ID,
    LossInputs,
    loss_and_gradient,
    sequence_log_ratios,
)
from tuneserve_engine.core.adapter import UNEMBED

State = TypeVar("State")


class LmHead(NamedTuple):
    """The base model's part of the head."""

    unembedding: Float[Array, "V D"]
    norm: Float[Array, " D"]


class HeadAdapters(NamedTuple):
    """The adapters' part of the head. Slots that do not train the unembedding are never read."""

    a: Float[Array, "J D R"]
    b: Float[Array, "J R V"]
    scale: Float[Array, " J"]
    trained: Bool[Array, " J"]


class HeadScored(NamedTuple):
    """The result of ``score_lm_head``; 0 on padding."""

    logprobs: Float[Array, "n S K"]
    loss: Float[Array, "n S"]


class HeadTrained(NamedTuple):
    """The result of ``train_lm_head``; 0 on padding. Scratch: [1, J, D, R] and [1, J, R, V]."""

    logprobs: Float[Array, "n S K"]
    loss: Float[Array, "n S"]
    gradient: Float[Array, "n S D"]  # with respect to the hidden states before the final norm
    gradient_slots: dict[str, Array]


def score_lm_head(  # noqa: PLR0913
    head: LmHead,
    x: Float[Array, "n S D"],
    targets: Int[Array, "n S K"],
    inputs: LossInputs,
    adapters: HeadAdapters,
    blocks: BlockOwners,
    used: Int[Array, ""],
    *,
    eps: float,
    chunk_blocks: int,
    divided: Divided | None = None,
) -> HeadScored:
    """Return each token's loss, and the log probability of each target under the full softmax.

    Logprobs are float32; they are NaN for target ids out of range.
    """
    run = _HeadPass(head, adapters, eps, chunk_blocks, divided)
    rows = run.rows(x, targets, inputs, blocks, used)

    def one(at: Array, out: HeadScored) -> HeadScored:
        part = rows.part(at, chunk_blocks)
        lp = run.logits(part).logprobs(part)
        loss, _ = loss_and_gradient(lp, part.log_ratio, part.inputs)
        return _put(out, HeadScored(lp, loss), at)

    return run.each_chunk(used, one, _blank(rows))


def train_lm_head(  # noqa: PLR0913
    head: LmHead,
    x: Float[Array, "n S D"],
    targets: Int[Array, "n S K"],
    inputs: LossInputs,
    adapters: HeadAdapters,
    blocks: BlockOwners,
    used: Int[Array, ""],
    gradient_slots: dict[str, Array],
    *,
    eps: float,
    chunk_blocks: int,
    divided: Divided | None = None,
) -> HeadTrained:
    """Return what ``score_lm_head`` returns, the gradient of the losses' sum, and the gradient
    slots.

    The gradient is with respect to ``x``. the gradient slots holds each request's gradient of its
    adapter's part of the head: zero if the adapter does not train it.
    """
    run = _HeadPass(head, adapters, eps, chunk_blocks, divided)
    rows = run.rows(x, targets, inputs, blocks, used)

    def one(at: Array, state: tuple[HeadScored, Array, Any]) -> Any:
        out, gradient, gradient_slots = state
        part = rows.part(at, chunk_blocks)
        gradient_slots = _clear(gradient_slots, part.owners)
        logits = run.logits(part)
        lp = logits.logprobs(part)
        loss, by_lp = loss_and_gradient(lp, part.log_ratio, part.inputs)
        moves = jnp.any(by_lp != 0, axis=2)
        nothing = jnp.zeros(part.x.shape, jnp.float32)
        by_x, gradient_slots = _if_any(
            moves,
            lambda state: run.reverse(part, logits, by_lp, state[1]),
            (nothing, gradient_slots),
        )
        by_x = jnp.where(moves[..., None], by_x, 0.0).astype(x.dtype)
        return _put(out, HeadScored(lp, loss), at), _put(gradient, by_x, at), gradient_slots

    state = (_blank(rows), jnp.zeros_like(x), gradient_slots)
    out, gradient, gradient_slots = run.each_chunk(used, one, state)
    return HeadTrained(*out, gradient, gradient_slots)


class _Blocks(NamedTuple):
    """Blocks and everything that is known about them."""

    x: Float[Array, "n S D"]
    targets: Int[Array, "n S K"]
    inputs: LossInputs
    log_ratio: Float[Array, "n S"]  # of the sequence, for gspo
    owners: BlockOwners
    trained: Bool[Array, " n"]  # whether the owner's adapter has a part in the head

    def part(self, at: Array, count: int) -> "_Blocks":
        """Return ``count`` blocks from ``at`` on; padding and unwritten rows are all zeros."""
        cut: _Blocks = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, at, count), self)
        return cut._replace(x=jnp.where(cut.inputs.valid[..., None], cut.x, 0))


class _Logits(NamedTuple):
    """The logits of a chunk, and the values that they were computed from."""

    normed: Float[Array, "C S D"]
    z: Float[Array, "C S V"]
    total: Float[Array, "C S"]  # log of the sum of exponentials
    low: Array | None = None  # [1, C, S, W], if kernels compute the adapters

    def logprobs(self, part: _Blocks) -> Float[Array, "C S K"]:
        chosen = jnp.take_along_axis(self.z, part.targets, axis=2, mode="fill", fill_value=jnp.nan)
        return jnp.where(part.inputs.valid[..., None], chosen - self.total[..., None], 0.0)

    def gradient(
        self, targets: Int[Array, "C S K"], by_lp: Float[Array, "C S K"]
    ) -> Float[Array, "C S V"]:
        """Return the loss's derivative by the logits, ``Σ_k g_k (onehot(y_k) - softmax(z))``."""
        count, size, vocabulary = self.z.shape
        dz = -by_lp.sum(axis=2, keepdims=True) * jnp.exp(self.z - self.total[..., None])
        rows = jnp.arange(count * size)
        ids, shares = targets.reshape(-1, targets.shape[2]), by_lp.reshape(-1, targets.shape[2])

        def add(k: Array, dz: Array) -> Array:
            # Target by target: a token may name an id twice; a device adds both in any order.
            return dz.at[rows, ids[:, k]].add(shares[:, k], mode="drop", unique_indices=True)

        dz = lax.fori_loop(0, targets.shape[2], add, dz.reshape(-1, vocabulary))
        return jnp.reshape(dz, self.z.shape)


class _HeadPass(NamedTuple):
    """The head and the way to run it."""

    head: LmHead
    adapters: HeadAdapters
    eps: float
    chunk: int  # C
    divided: Divided | None  # if the blocks are a device's part of a datum

    def rows(
        self, x: Array, targets: Array, inputs: LossInputs, owners: BlockOwners, used: Array
    ) -> _Blocks:
        """Return the blocks, with the log ratios of their sequences."""
        assert x.shape[0] % self.chunk == 0, "a slice over the end would be moved, not cut"
        is_used = owners.is_used & (jnp.arange(x.shape[0]) < used)
        inputs = inputs._replace(valid=inputs.valid & is_used[:, None])
        owners = owners._replace(is_first=owners.is_first & is_used, is_used=is_used)
        trained = self.adapters.trained[owners.slot] & is_used
        log_ratio = jnp.zeros(x.shape[:2], jnp.float32)
        rows = _Blocks(x, targets, inputs, log_ratio, owners, trained)

        is_gspo = inputs.valid & (inputs.loss_id == GSPO_ID)

        def measure(at: Array, lp: Array) -> Array:
            part = rows.part(at, self.chunk)
            return _put(lp, self.logits(part).logprobs(part)[..., 0], at)

        def one(at: Array, lp: Array) -> Array:
            asked = jnp.any(lax.dynamic_slice_in_dim(is_gspo, at, self.chunk))
            with jax.named_scope("gspo"):
                result: Array = lax.cond(asked, lambda lp: measure(at, lp), lambda lp: lp, lp)
            return result

        def measured() -> Array:
            first_lp = self.each_chunk(used, one, log_ratio)
            if self.divided is None:
                return sequence_log_ratios(first_lp, inputs)
            all_lp, everything = jax.tree.map(self.divided.of_all, (first_lp, inputs))
            ratios: Array = self.divided.own(sequence_log_ratios(all_lp, everything), x.shape[0])
            return ratios

        is_any = jnp.any(is_gspo)
        if self.divided is not None:  # all devices have to take the same branch
            is_any = jnp.any(lax.all_gather(is_any, DEVICES))
        with jax.named_scope("gspo"):
            return rows._replace(log_ratio=lax.cond(is_any, measured, lambda: log_ratio))

    def each_chunk(self, used: Array, body: Callable[[Array, State], State], state: State) -> State:
        """Run ``body(first block, state)`` for every chunk with a used block."""
        count = (used + self.chunk - 1) // self.chunk
        with jax.named_scope("head_chunks"):
            result: State = lax.fori_loop(0, count, lambda i, s: body(i * self.chunk, s), state)
        return result

    def logits(self, part: _Blocks) -> _Logits:
        normed = rms_norm(part.x, self.head.norm, eps=self.eps)
        # Contracted as the table is stored: with a transposed copy and bfloat16 weights, XLA CPU
        # keeps two float32 copies of the head.
        z = lax.dot_general(
            normed,
            self.head.unembedding,
            (((2,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        if self.has_kernels(part):
            group = self.group(part, part.trained)
            low = block_lora.low_of(normed, group, normed.dtype)
            (z,) = block_lora.add_outputs([z], low, group, z.dtype, normed.dtype)
            return _Logits(normed, z, jax.nn.logsumexp(z, axis=2), low)
        normed = normed.astype(jnp.float32)

        def add(block: Array, z: Array) -> Array:
            _, b, low = self.low(part, normed, block)
            return z.at[block].add(float32_product("SR,RV->SV", low, b))

        z = _each("trained_head", part.trained, add, z)
        return _Logits(normed, z, jax.nn.logsumexp(z, axis=2))

    def has_kernels(self, part: _Blocks) -> bool:
        """Return whether kernels for GPUs compute the adapters, of all blocks at once."""
        a, b = {UNEMBED: self.adapters.a}, {UNEMBED: self.adapters.b}
        return block_lora.is_used(a, b, part.x.shape[1])

    def group(self, part: _Blocks, chosen: Bool[Array, " C"]) -> block_lora.GroupLora:
        """Return the adapters as the kernels take them, for the chosen blocks."""
        a, b, scale, _ = self.adapters
        slot = jnp.where(chosen, part.owners.slot, -1)
        place = block_lora.ChunkSlots(slot, jnp.int32(0), jnp.int32(0))
        return block_lora.GroupLora([a[None]], [b[None]], scale, place)

    def low(self, part: _Blocks, normed: Array, block: Array) -> tuple[Array, Array, Array]:
        """Return the block's A and B, and ``scale · (x A)``."""
        a, b, scale = (x[part.owners.slot[block]] for x in self.adapters[:3])
        return a, b, float32_product("SD,DR->SR", normed[block], a) * scale

    def reverse(
        self, part: _Blocks, logits: _Logits, by_lp: Array, gradient_slots: dict[str, Array]
    ) -> tuple[Array, dict[str, Array]]:
        """Return the gradient by the chunk's hidden states, float32, and the gradient slots.

        The adapters' gradients of the chunk are added to the gradient slots.
        """
        dz = logits.gradient(part.targets, by_lp)
        by_normed = lax.dot_general(
            dz.astype(self.head.unembedding.dtype),
            self.head.unembedding,
            (((2,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        moves = jnp.any(by_lp != 0, axis=(1, 2))
        if logits.low is not None:
            by_normed, gradient_slots = self.reverse_by_kernels(
                part, logits, logits.low, dz, part.trained & moves, (by_normed, gradient_slots)
            )
            return self._through_norm(part.x, by_normed), gradient_slots

        def add(block: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
            by_normed, gradient_slots = state
            a, b, low = self.low(part, logits.normed, block)
            scale = self.adapters.scale[part.owners.slot[block]]
            by_low = float32_product("SV,RV->SR", dz[block], b) * scale
            gradients = {
                "a": float32_product("SD,SR->DR", logits.normed[block], by_low),
                "b": float32_product("SR,SV->RV", low, dz[block]),
            }
            by_normed = by_normed.at[block].add(float32_product("SR,DR->SD", by_low, a))
            return by_normed, add_to_slot(gradient_slots, gradients, part.owners.slot[block])

        by_normed, gradient_slots = _each(
            "trained_head", part.trained & moves, add, (by_normed, gradient_slots)
        )
        return self._through_norm(part.x, by_normed), gradient_slots

    def reverse_by_kernels(  # noqa: PLR0913
        self,
        part: _Blocks,
        logits: _Logits,
        low: Array,
        dz: Array,
        chosen: Bool[Array, " C"],
        state: tuple[Array, dict[str, Array]],
    ) -> tuple[Array, dict[str, Array]]:
        """Return the state of ``reverse`` with the adapters' part of the chosen blocks added."""
        by_normed, gradient_slots = state
        dtype = part.x.dtype
        group = self.group(part, chosen)
        by_low = block_lora.by_low_of([dz], group, dtype)
        out = spec(by_normed.shape, by_normed.dtype)
        by_normed = block_lora.add_input(by_normed, by_low, group, out, dtype)
        runs = runs_of(part.owners._replace(is_used=part.trained), self.chunk)
        place = runs._replace(adds=chosen), jnp.int32(0), jnp.int32(0)
        terms = Term(0, 0, 0, ranks_last=True), Term(1, 1, 0, ranks_last=False)
        into = [gradient_slots["a"], gradient_slots["b"]]
        wides, lows = [logits.normed, dz], [by_low, low]
        of_a, of_b = add_products(wides, lows, terms, into, place, dtype)
        return by_normed, {"a": of_a, "b": of_b}

    def _through_norm(self, x: Array, by_normed: Array) -> Array:
        wide, norm = x.astype(jnp.float32), self.head.norm.astype(jnp.float32)
        _, pullback = jax.vjp(lambda x: rms_norm(x, norm, eps=self.eps), wide)
        by_x: Array = pullback(by_normed)[0]
        return by_x


def _clear(gradient_slots: dict[str, Array], owners: BlockOwners) -> dict[str, Array]:
    """Write zeros to the slot of every request whose first block is in this chunk."""

    def clear(block: Array, gradient_slots: dict[str, Array]) -> dict[str, Array]:
        return {name: x.at[0, owners.slot[block]].set(0) for name, x in gradient_slots.items()}

    return _each("first_blocks", owners.is_first, clear, gradient_slots)


def _each(
    name: str, chosen: Bool[Array, " C"], body: Callable[[Array, State], State], state: State
) -> State:
    """Run ``body(block, state)`` for the chosen blocks, in order; free if none is chosen.

    ``name`` is the scope of the operations in profiles. A loop of as many rounds as there are
    chosen blocks: XLA would copy the state, which may be large, for the other branch of a
    conditional.
    """
    (blocks,) = jnp.nonzero(chosen, size=chosen.shape[0])
    with jax.named_scope(name):
        done: State = lax.fori_loop(0, jnp.sum(chosen), lambda i, s: body(blocks[i], s), state)
    return done


def _if_any(chosen: Array, body: Callable[[State], State], state: State) -> State:
    """Return ``body(state)`` if anything is chosen: a loop of one round or none; see ``_each``."""
    rounds = jnp.any(chosen).astype(jnp.int32)
    with jax.named_scope("head_gradient"):
        done: State = lax.fori_loop(0, rounds, lambda _, state: body(state), state)
    return done


def _blank(rows: _Blocks) -> HeadScored:
    return HeadScored(
        jnp.zeros(rows.targets.shape, jnp.float32), jnp.zeros(rows.x.shape[:2], jnp.float32)
    )


def _put(into: State, part: State, at: Array) -> State:
    """Return ``into`` with each array overwritten by the part's array from block ``at`` on."""
    put: State = jax.tree.map(
        lambda whole, x: lax.dynamic_update_slice_in_dim(whole, x, at, 0), into, part
    )
    return put
