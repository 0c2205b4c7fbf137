"""The programs of a training unit: rows to logprobs, losses and gradients; rows to requests.

Pure functions. Each is compiled once per combination of shapes; nothing else of a request, its
loss and hyper-parameters included, is part of a program.

Dimension key: B rows, T positions, K targets per position, D hidden, C positions of a chunk.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tuneserve_engine.adapters import UNEMBED
from tuneserve_engine.backend.base import TrainBatch
from tuneserve_engine.backend.jax.adapters import LoraWeights
from tuneserve_engine.backend.jax.lora import LoraRows
from tuneserve_engine.backend.jax.losses import LossInputs, loss_and_gradient
from tuneserve_engine.backend.jax.models.decoder import Decoder

_LOGITS_BYTES = 128 * 2**20
"""Room for the float32 logits of one chunk; twice that is live in the backward pass."""


class RowsIn(NamedTuple):
    """One micro-batch, but for its adapters."""

    tokens: Int[Array, "B T"]
    targets: Int[Array, "B T K"]
    loss: LossInputs

    @classmethod
    def of(cls, batch: TrainBatch) -> "RowsIn":
        """The batch's arrays, unchanged: they travel when the program is called."""
        fields = batch._asdict()
        loss = LossInputs(*(fields[name] for name in LossInputs._fields))
        return cls(fields["tokens"], fields["targets"], loss)


class RowsOut(NamedTuple):
    """What a micro-batch gave. ``finite`` covers a row's loss and its valid logprobs."""

    logprobs: Float[Array, "B T K"]
    loss: Float[Array, " B"]
    finite: Bool[Array, " B"]


class Commit(NamedTuple):
    """An accumulator with a request's gradient, or, if ``finite`` is False, as it was."""

    accumulator: LoraWeights
    finite: Bool[Array, ""]


def train_rows(
    model: Decoder,
    adapters: tuple[LoraWeights, ...],
    scale: Float[Array, " B"],
    rows: RowsIn,
) -> tuple[RowsOut, LoraWeights]:
    """The rows' results, and each row's own gradient: ``[L, B, ...]``, unembedding ``[B, ...]``."""

    def logprobs(stacked: LoraWeights) -> Array:
        return target_logprobs(model, rows, LoraRows(*stacked, scale))

    lp, pullback = jax.vjp(logprobs, stack_rows(adapters))
    out, by_logprob = _rows_out(lp, rows.loss)
    (gradient,) = pullback(by_logprob)
    return out, gradient


def score_rows(
    model: Decoder,
    adapters: tuple[LoraWeights, ...],
    scale: Float[Array, " B"],
    rows: RowsIn,
) -> RowsOut:
    """``train_rows`` without gradients."""
    lora = LoraRows(*stack_rows(adapters), scale)
    return _rows_out(target_logprobs(model, rows, lora), rows.loss)[0]


def _rows_out(lp: Float[Array, "B T K"], inputs: LossInputs) -> tuple[RowsOut, Array]:
    loss, by_logprob = loss_and_gradient(lp, inputs)
    padding = (inputs.valid == 0)[:, :, None]
    finite = jnp.isfinite(loss) & jnp.all(jnp.isfinite(lp) | padding, axis=(1, 2))
    return RowsOut(lp, loss, finite), by_logprob


def stack_rows(adapters: tuple[LoraWeights, ...]) -> LoraWeights:
    """Row b gets slot b; a tenant with several rows is repeated, so that gradients come per row."""

    def stack(name: str, *rows: Array) -> Array:
        return jnp.stack(rows, axis=_row_axis(name))

    return LoraWeights(
        a={name: stack(name, *(x.a[name] for x in adapters)) for name in adapters[0].a},
        b={name: stack(name, *(x.b[name] for x in adapters)) for name in adapters[0].b},
    )


def target_logprobs(model: Decoder, rows: RowsIn, lora: LoraRows) -> Float[Array, "B T K"]:
    """Log probability of each target under the full softmax, float32; NaN for ids out of range.

    Works through chunks of positions, each recomputed in the backward pass, so that the logits of
    one chunk are live at a time. Rows stay whole: flattened rows would not shard.
    """
    hidden = model(rows.tokens, lora)
    count, length, targets = rows.targets.shape
    chunk = chunk_length(count, length, model.config.vocab_size)

    def score(hidden: Float[Array, "B C D"], targets: Int[Array, "B C K"]) -> Array:
        logits = model.logits(hidden, lora)
        chosen = jnp.take_along_axis(logits, targets, axis=2, mode="fill", fill_value=jnp.nan)
        return chosen - jax.nn.logsumexp(logits, axis=2, keepdims=True)

    if chunk >= length:
        return score(hidden, rows.targets)
    chunks = (_split(hidden, chunk), _split(rows.targets, chunk))
    lp = jax.lax.map(lambda part: jax.checkpoint(score, prevent_cse=False)(*part), chunks)
    return jnp.moveaxis(lp, 0, 1).reshape(count, -1, targets)[:, :length]


def chunk_length(rows: int, length: int, vocab_size: int) -> int:
    """Positions per chunk: a power of two whose logits fit the room, or the whole length.

    At least 64 tokens per chunk: shorter ones take 1.5 to 3.6 times as long.
    """
    tokens = max(_LOGITS_BYTES // (4 * vocab_size), 64)
    positions = max(tokens // rows, 1)
    return min(1 << (positions.bit_length() - 1), length)


def _split(x: Array, chunk: int) -> Array:
    """[B, T, ...] to [T/C, B, C, ...]; a last part that is short is filled with zeros."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk), (0, 0)])
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, x.shape[2]), 1, 0)


@partial(jax.jit, donate_argnums=0)
def add_rows(
    scratch: LoraWeights | None, gradient: LoraWeights, mine: Bool[Array, " B"]
) -> LoraWeights:
    """The scratch, donated, zero at first, plus one request's rows, one by one from the left.

    Selection drops the other rows: multiplied by 0, a neighbour's NaN would stay.
    """
    return LoraWeights(
        a={n: _add_rows(n, scratch and scratch.a[n], g, mine) for n, g in gradient.a.items()},
        b={n: _add_rows(n, scratch and scratch.b[n], g, mine) for n, g in gradient.b.items()},
    )


def _add_rows(name: str, total: Array | None, rows: Array, mine: Bool[Array, " B"]) -> Array:
    axis = _row_axis(name)
    for row in range(mine.shape[0]):
        part = jax.lax.index_in_dim(rows, row, axis, keepdims=False)
        total = jnp.zeros_like(part) if total is None else total
        total = jnp.where(mine[row], total + part, total)
    assert total is not None
    return total


@partial(jax.jit, donate_argnums=1)
def commit(accumulator: LoraWeights, scratch: LoraWeights) -> Commit:
    """``accumulator + scratch`` if every entry of it is finite.

    The scratch is donated and becomes the new accumulator; the old one, the only copy of what the
    adapter had, is left alone in case anything fails.
    """
    total = jax.tree.map(jnp.add, accumulator, scratch)
    leaves = jax.tree.leaves(total)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]))
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), total, accumulator)
    return Commit(kept, finite)


def _row_axis(name: str) -> int:
    return 0 if name == UNEMBED else 1
