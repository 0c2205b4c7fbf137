"""The programs of training: a stream of tokens to logprobs, losses and every request's gradient.

Pure functions. Each is compiled once per rank class and number of targets; nothing else of a
request, its length, its loss and its hyper-parameters included, is part of a program.

Dimension key: n blocks of the stream, S tokens of a block, K targets per token, D hidden.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tuneserve_engine.adapters import UNEMBED
from tuneserve_engine.backend.base import TrainBatch
from tuneserve_engine.backend.jax.adapters import LoraWeights
from tuneserve_engine.backend.jax.bank import Bank
from tuneserve_engine.backend.jax.head import (
    Head,
    HeadAdapters,
    head_chunk_blocks,
    score_head,
    train_head,
)
from tuneserve_engine.backend.jax.lora import LoraRows
from tuneserve_engine.backend.jax.losses import LossInputs
from tuneserve_engine.backend.jax.models.decoder import Decoder
from tuneserve_engine.backend.jax.scratch import BlockSlots
from tuneserve_engine.backend.jax.stack import Stream, put
from tuneserve_engine.backend.jax.tape import workspace_shapes


class StreamIn(NamedTuple):
    """One micro-batch as programs take it: [n, S, ...] and [n]."""

    tokens: Any
    targets: Any  # [n, S, K]
    inputs: LossInputs
    layers: Stream
    owners: BlockSlots

    @classmethod
    def of(cls, batch: TrainBatch, block: int, begun: Collection[int] = ()) -> "StreamIn":
        """The batch's arrays, not copied: they travel when the program is called. ``begun`` are the
        requests with a block in an earlier micro-batch of the unit."""

        def rows(x: Any) -> Any:
            return x.reshape(-1, block, *x.shape[1:])

        request = batch.block_request
        used = request >= 0
        first = np.zeros_like(used)
        starts = np.unique(request, return_index=True)
        for index, at in zip(*(part.tolist() for part in starts), strict=True):
            first[at] = index >= 0 and index not in begun
        slot = np.maximum(request, 0)
        fields = {name: rows(getattr(batch, name)) for name in _OF_TOKENS}
        inputs = LossInputs(valid=rows(batch.datum >= 0), **fields)
        return cls(
            tokens=rows(batch.tokens),
            targets=rows(batch.targets),
            inputs=inputs,
            layers=Stream(
                rows(batch.positions),
                fields["datum"],
                batch.block_start,  # type: ignore[arg-type]
                np.int32(batch.blocks),  # type: ignore[arg-type]
                slot,  # type: ignore[arg-type]
            ),
            owners=BlockSlots(slot, first, used),  # type: ignore[arg-type]
        )


_OF_TOKENS = tuple(name for name in LossInputs._fields if name != "valid")


class Scored(NamedTuple):
    """What a micro-batch gave."""

    logprobs: Float[Array, "n S K"]
    loss: Float[Array, "n S"]


class Trained(NamedTuple):
    """What a micro-batch gave, and the donated buffers."""

    out: Scored
    space: Any  # Workspace: its K are key/value heads
    scratch: LoraWeights


def train_stream(
    model: Decoder, space: Any, scratch: LoraWeights, bank: Bank, stream: StreamIn
) -> Trained:
    """Losses of the stream, and each request's gradient of them, added to the scratch of its slot;
    a request's first block of the unit replaces what is there. ``space`` is a ``Workspace``; the
    model is in training mode."""
    hidden, taped = model.forward_layers(
        model.embedded(stream.tokens), stream.layers, _rows(bank), space=space
    )
    head = train_head(
        *_head_inputs(model, hidden, stream, bank),
        stream.layers.blocks,
        {"a": scratch.a[UNEMBED], "b": scratch.b[UNEMBED]},
        eps=model.config.rms_eps,
        chunk_blocks=_head_blocks(model),
    )
    scratch = LoraWeights(
        {**scratch.a, UNEMBED: head.scratch["a"]}, {**scratch.b, UNEMBED: head.scratch["b"]}
    )
    # Into the buffer that was given: one that nothing reads would not be reused, donated or not.
    space = taped.space._replace(dx=put(taped.space.dx, 0, head.gradient))
    space, scratch = taped.run.reverse(space, scratch, stream.owners)
    return Trained(Scored(head.logprobs, head.loss), space, scratch)


def score_stream(model: Decoder, bank: Bank, stream: StreamIn) -> Scored:
    """``train_stream`` without gradients. The model is in evaluation mode."""
    hidden, _ = model.forward_layers(model.embedded(stream.tokens), stream.layers, _rows(bank))
    head = score_head(
        *_head_inputs(model, hidden, stream, bank),
        stream.layers.blocks,
        eps=model.config.rms_eps,
        chunk_blocks=_head_blocks(model),
    )
    return Scored(head.logprobs, head.loss)


def space_shapes(model: Decoder, bank: Any, blocks: int) -> Any:
    """Shapes of the ``Workspace`` for streams of so many blocks; only the bank's shapes count."""
    dtype = model.embed[...].dtype
    rows = LoraRows(bank.a, bank.b, bank.scale)
    return workspace_shapes(model.stack(), rows, blocks=blocks, size=model.block, dtype=dtype)


def _rows(bank: Bank) -> LoraRows:
    return LoraRows(bank.a, bank.b, bank.scale)


def _head_inputs(
    model: Decoder, hidden: Array, stream: StreamIn, bank: Bank
) -> tuple[Head, Array, Array, LossInputs, HeadAdapters, BlockSlots]:
    adapters = HeadAdapters(bank.a[UNEMBED][0], bank.b[UNEMBED][0], bank.scale, bank.trained)
    head = Head(model.unembedding(), model.final_norm[...])
    return (
        head,
        hidden,
        jnp.asarray(stream.targets),
        stream.inputs,
        adapters,
        stream.owners,
    )


def _head_blocks(model: Decoder) -> int:
    return head_chunk_blocks(model.block, model.block * model.chunk_blocks, model.config.vocab_size)
