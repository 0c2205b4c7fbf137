"""The programs of training: a micro-batch of tokens to logprobs, losses and every request's
gradient.

All functions are pure. Each program is compiled once per rank bucket and number of targets. Nothing
else of a request is part of a program: not its length, its loss or its hyper-parameters.

Dimension key: n blocks of the micro-batch, S tokens of a block, K targets per token, D hidden.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tuneserve_engine.backend.base import MicroBatch
from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights
from tuneserve_engine.backend.jax.attention.divided import divided_among_devices
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.model.layer_stack import PackedTokens, write_blocks
from tuneserve_engine.backend.jax.model.lora import LoraRows
from tuneserve_engine.backend.jax.target import target_platform
from tuneserve_engine.backend.jax.training.adapter_slots import AdapterSlots
from tuneserve_engine.backend.jax.training.gradient_slots import BlockOwners
from tuneserve_engine.backend.jax.training.head_chunks import head_chunk_blocks
from tuneserve_engine.backend.jax.training.lm_head import (
    HeadAdapters,
    LmHead,
    score_lm_head,
    train_lm_head,
)
from tuneserve_engine.backend.jax.training.losses import LossInputs
from tuneserve_engine.backend.jax.training.tape import workspace_shapes
from tuneserve_engine.core.adapter import UNEMBED


class DeviceMicroBatch(NamedTuple):
    """One micro-batch in the form that programs take: [n, S, ...] and [n]."""

    tokens: Any
    targets: Any  # [n, S, K]
    inputs: LossInputs
    layers: PackedTokens
    owners: BlockOwners

    def of_device(self, *, is_divided: bool) -> "DeviceMicroBatch":
        """Return the micro-batch of a device, in a program that may run on several.

        With ``is_divided``, it is a device's part of one that all of them have.
        """
        layers = self.layers._replace(blocks=jnp.reshape(self.layers.blocks, ()))
        if is_divided:
            layers = layers._replace(divided=divided_among_devices(layers.seen()))
        return self._replace(layers=layers)

    @classmethod
    def from_host(
        cls,
        micro_batch: MicroBatch,
        block: int,
        first_slot: int = 0,
    ) -> "DeviceMicroBatch":
        """Return the batch's arrays, not copied: they are sent when the program is called.

        Request i is in the i-th slot from ``first_slot`` on. The blocks of a request are side by
        side: the gradients of one run of blocks are summed before they are written.
        """
        request = micro_batch.block_request
        used = request >= 0
        begins = np.diff(request, prepend=-1) != 0
        runs = request[begins]
        assert np.unique(runs).size == runs.size, "the blocks of a request are not side by side"
        slot = np.where(used, request + np.int32(first_slot), np.int32(0))
        of_tokens = {name: getattr(micro_batch, name) for name in _OF_TOKENS}
        rows: dict[str, Any] = {
            name: x.reshape(-1, block, *x.shape[1:]) for name, x in of_tokens.items()
        }
        losses = {name: rows[name] for name in _OF_LOSSES}
        return cls(
            tokens=rows["tokens"],
            targets=rows["targets"],
            inputs=LossInputs(valid=rows["segment_ids"] >= 0, **losses),
            layers=PackedTokens(
                rows["positions"],
                rows["segment_ids"],
                micro_batch.first_visible_block,  # type: ignore[arg-type]
                np.int32(micro_batch.blocks),  # type: ignore[arg-type]
                slot,  # type: ignore[arg-type]
            ),
            owners=BlockOwners(slot, used & begins, used),  # type: ignore[arg-type]
        )


_OF_LOSSES = tuple(name for name in LossInputs._fields if name != "valid")
_OF_TOKENS = ("tokens", "targets", "positions", *_OF_LOSSES)


class ScoredMicroBatch(NamedTuple):
    """The result of scoring a micro-batch."""

    logprobs: Float[Array, "n S K"]
    loss: Float[Array, "n S"]


class TrainedMicroBatch(NamedTuple):
    """The result of training on a micro-batch, and the donated buffers."""

    out: ScoredMicroBatch
    space: Any  # Workspace: its K are key/value heads
    gradient_slots: LoraWeights


def train_micro_batch(  # noqa: PLR0913
    model: Decoder,
    space: Any,
    gradient_slots: LoraWeights,
    adapter_slots: AdapterSlots,
    micro_batch: DeviceMicroBatch,
    *,
    is_divided: bool = False,
) -> TrainedMicroBatch:
    """Return losses of the micro-batch, and the gradient slots with each request's gradient.

    A request's gradient overwrites what its gradient slot held. ``space`` is a ``Workspace``; the
    model is in training mode. With ``is_divided``, devices have parts of one micro-batch, and each
    slot holds a part of the gradient.
    """
    micro_batch = micro_batch.of_device(is_divided=is_divided)
    hidden, taped = model.forward_layers(
        model.embedded(micro_batch.tokens), micro_batch.layers, _rows(adapter_slots), space=space
    )
    head = train_lm_head(
        *_head_inputs(model, hidden, micro_batch, adapter_slots),
        micro_batch.layers.blocks,
        {"a": gradient_slots.a[UNEMBED], "b": gradient_slots.b[UNEMBED]},
        eps=model.config.rms_eps,
        chunk_blocks=_head_blocks(model),
        divided=micro_batch.layers.divided,
    )
    gradient_slots = LoraWeights(
        {**gradient_slots.a, UNEMBED: head.gradient_slots["a"]},
        {**gradient_slots.b, UNEMBED: head.gradient_slots["b"]},
    )
    # Into the given buffer: one that nothing reads would not be reused, donated or not.
    space = taped.space._replace(dx=write_blocks(taped.space.dx, 0, head.gradient))
    space, gradient_slots = taped.run.reverse(space, gradient_slots, micro_batch.owners)
    return TrainedMicroBatch(ScoredMicroBatch(head.logprobs, head.loss), space, gradient_slots)


def score_micro_batch(
    model: Decoder,
    adapter_slots: AdapterSlots,
    micro_batch: DeviceMicroBatch,
    *,
    is_divided: bool = False,
) -> ScoredMicroBatch:
    """Score a micro-batch as ``train_micro_batch``, without gradients, in evaluation mode."""
    micro_batch = micro_batch.of_device(is_divided=is_divided)
    hidden, _ = model.forward_layers(
        model.embedded(micro_batch.tokens), micro_batch.layers, _rows(adapter_slots)
    )
    head = score_lm_head(
        *_head_inputs(model, hidden, micro_batch, adapter_slots),
        micro_batch.layers.blocks,
        eps=model.config.rms_eps,
        chunk_blocks=_head_blocks(model),
        divided=micro_batch.layers.divided,
    )
    return ScoredMicroBatch(head.logprobs, head.loss)


def space_shapes(model: Decoder, adapter_slots: Any, blocks: int) -> Any:
    """Return shapes of the ``Workspace`` for ``blocks`` blocks; only the shapes of the adapter
    slots matter.
    """
    dtype = model.embed[...].dtype
    rows = LoraRows(adapter_slots.a, adapter_slots.b, adapter_slots.scale)
    return workspace_shapes(model.stack(), rows, blocks=blocks, size=model.block, dtype=dtype)


def _rows(adapter_slots: AdapterSlots) -> LoraRows:
    return LoraRows(adapter_slots.a, adapter_slots.b, adapter_slots.scale)


def _head_inputs(
    model: Decoder, hidden: Array, micro_batch: DeviceMicroBatch, adapter_slots: AdapterSlots
) -> tuple[LmHead, Array, Array, LossInputs, HeadAdapters, BlockOwners]:
    adapters = HeadAdapters(
        adapter_slots.a[UNEMBED][0],
        adapter_slots.b[UNEMBED][0],
        adapter_slots.scale,
        adapter_slots.trained,
    )
    head = LmHead(model.unembedding(), model.final_norm[...])
    return (
        head,
        hidden,
        jnp.asarray(micro_batch.targets),
        micro_batch.inputs,
        adapters,
        micro_batch.owners,
    )


def _head_blocks(model: Decoder) -> int:
    chunk, vocab_size = model.block * model.chunk_blocks, model.config.vocab_size
    return head_chunk_blocks(model.block, chunk, vocab_size, target_platform())
