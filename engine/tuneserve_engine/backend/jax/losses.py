"""Losses as sums over tokens, each with its gradient with respect to the target logprobs.

A loss sees logprobs only, so its gradient is elementwise and known in closed form: every row
computes all of them, picks one at run time, and rows with different losses share a program.

Dimension key: B rows, T positions, K targets per position. Policy losses read target 0 only.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class LossInputs(NamedTuple):
    """The fields of ``TrainBatch`` that losses read, on the device."""

    valid: Float[Array, "B T"]
    weights: Float[Array, "B T K"]
    old_logprobs: Float[Array, "B T"]
    advantages: Float[Array, "B T"]
    clip_low: Float[Array, "B T"]
    clip_high: Float[Array, "B T"]
    sequence_mask: Float[Array, "B T"]
    beta: Float[Array, " B"]
    loss_id: Int[Array, " B"]


class TokenLoss(NamedTuple):
    """Each target's term of the loss, and the loss's derivative by that target's logprob."""

    term: Float[Array, "B T K"]
    gradient: Float[Array, "B T K"]


def cross_entropy(lp: Float[Array, "B T K"], inputs: LossInputs) -> TokenLoss:
    """``-Σ w·lp`` over all K targets; the weights may be negative, fractional and large."""
    return TokenLoss(-inputs.weights * lp, -inputs.weights)


def importance_sampling(lp: Float[Array, "B T K"], inputs: LossInputs) -> TokenLoss:
    """``-Σ r·A`` with ``r = exp(lp - q)``."""
    surrogate = _times(jnp.exp(_log_ratio(lp, inputs)), inputs.advantages)
    return _first_target(lp, -surrogate, -surrogate)


def ppo(lp: Float[Array, "B T K"], inputs: LossInputs) -> TokenLoss:
    """``-Σ min(r·A, clip(r)·A)`` per token."""
    return _clipped_surrogate(lp, jnp.exp(_log_ratio(lp, inputs)), inputs)


def cispo(lp: Float[Array, "B T K"], inputs: LossInputs) -> TokenLoss:
    """``-Σ sg(clip(r))·lp·A``: the clipped ratio is a constant weight."""
    ratio = _clip(jnp.exp(_log_ratio(lp, inputs)), inputs)
    gradient = -_times(ratio, inputs.advantages)
    return _first_target(lp, gradient * lp[..., 0], gradient)


def dro(lp: Float[Array, "B T K"], inputs: LossInputs) -> TokenLoss:
    """``-Σ (lp·A - ½·beta·(lp - q)²)``."""
    beta, difference = inputs.beta[:, None], _log_ratio(lp, inputs)
    term = 0.5 * beta * difference**2 - lp[..., 0] * inputs.advantages
    return _first_target(lp, term, beta * difference - inputs.advantages)


def gspo(lp: Float[Array, "B T K"], inputs: LossInputs) -> TokenLoss:
    """PPO's form with one ratio per sequence, ``s_t = sg(s)·exp(lp - sg(lp))``, where s is the
    geometric mean of r over the masked positions, and 1 when none is masked (GSPO-token,
    arXiv 2507.18071)."""
    inside = (inputs.sequence_mask != 0) & (inputs.valid != 0)
    total = jnp.where(inside, _log_ratio(lp, inputs), 0.0).sum(axis=1, keepdims=True)
    count = jnp.maximum(inside.sum(axis=1, keepdims=True), 1).astype(lp.dtype)
    sequence_ratio = jnp.broadcast_to(jnp.exp(total / count), inside.shape)
    return _clipped_surrogate(lp, sequence_ratio, inputs)


LOSSES: dict[str, Callable[[Array, LossInputs], TokenLoss]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
"""Every loss by name; ``loss_id`` is the position in this dict, the same as in ``LOSS_NAMES``."""


def loss_and_gradient(
    lp: Float[Array, "B T K"], inputs: LossInputs
) -> tuple[Float[Array, " B"], Float[Array, "B T K"]]:
    """Each row's loss, a sum over its valid positions, and that loss's gradient by ``lp``.

    Untaken losses and padding are dropped by selection: a factor of zero would keep their NaNs.
    """
    valid = (inputs.valid != 0)[:, :, None]
    term = gradient = jnp.zeros_like(lp)
    for index, loss in enumerate(LOSSES.values()):
        here = (inputs.loss_id == index)[:, None, None] & valid
        token = loss(lp, inputs)
        term = jnp.where(here, token.term, term)
        gradient = jnp.where(here, token.gradient, gradient)
    return term.sum(axis=(1, 2)), gradient


def _log_ratio(lp: Float[Array, "B T K"], inputs: LossInputs) -> Float[Array, "B T"]:
    return lp[..., 0] - inputs.old_logprobs


def _clip(ratio: Float[Array, "B T"], inputs: LossInputs) -> Float[Array, "B T"]:
    return jnp.minimum(jnp.maximum(ratio, inputs.clip_low), inputs.clip_high)


def _times(ratio: Float[Array, "B T"], advantages: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """``ratio · advantages``, where no advantage means 0 even if the ratio overflowed to infinity:
    prompts carry advantage 0 and whatever old logprob the client had at hand."""
    return jnp.where((advantages == 0) & ~jnp.isnan(ratio), 0.0, ratio * advantages)


def _clipped_surrogate(
    lp: Float[Array, "B T K"], ratio: Float[Array, "B T"], inputs: LossInputs
) -> TokenLoss:
    """``-min(ratio·A, clip(ratio)·A)``; the clipped branch, where it is smaller, is a constant."""
    free = _times(ratio, inputs.advantages)
    clipped = _times(_clip(ratio, inputs), inputs.advantages)
    gradient = jnp.where(clipped < free, 0.0, -free)
    return _first_target(lp, -jnp.minimum(free, clipped), gradient)


def _first_target(
    lp: Float[Array, "B T K"], term: Float[Array, "B T"], gradient: Float[Array, "B T"]
) -> TokenLoss:
    """The terms at target 0, zeros at the others."""
    first = jnp.arange(lp.shape[-1])[None, None, :] == 0
    return TokenLoss(
        jnp.where(first, term[..., None], 0.0), jnp.where(first, gradient[..., None], 0.0)
    )
