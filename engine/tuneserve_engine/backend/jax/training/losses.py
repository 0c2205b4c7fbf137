"""Losses token by token, each with its gradient with respect to the target logprobs.

A loss depends on logprobs only, so its gradient is elementwise and known in closed form. Every
token computes all losses and picks one at run time; requests with different losses share a program.

Dimension key: n blocks, S tokens of a block, K targets per token. Policy losses read target 0 only.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class LossInputs(NamedTuple):
    """The part of a micro-batch that losses read.

    ``valid`` is False on padding, where no other field counts. ``datum`` tells the datums of a
    micro-batch apart; the tokens of a datum are contiguous.
    """

    valid: Bool[Array, "n S"]
    weights: Float[Array, "n S K"]
    old_logprobs: Float[Array, "n S"]
    advantages: Float[Array, "n S"]
    clip_low: Float[Array, "n S"]
    clip_high: Float[Array, "n S"]
    sequence_mask: Float[Array, "n S"]
    beta: Float[Array, "n S"]
    loss_id: Int[Array, "n S"]
    segment_ids: Int[Array, "n S"]


class TokenLoss(NamedTuple):
    """Each target's term of the loss, and the loss's derivative by that target's logprob."""

    term: Float[Array, "n S K"]
    gradient: Float[Array, "n S K"]


Loss = Callable[[Array, Array, LossInputs], TokenLoss]
"""A function of logprobs [n, S, K] and log ratios [n, S].

A log ratio is that of new over old policy, of the token or, in gspo, of the token's sequence.
"""


def cross_entropy(
    lp: Float[Array, "n S K"], log_ratio: Float[Array, "n S"], inputs: LossInputs
) -> TokenLoss:
    """Compute ``-Σ w·lp`` over all K targets; weights may be negative, fractional and large."""
    return TokenLoss(-inputs.weights * lp, -inputs.weights)


def importance_sampling(
    lp: Float[Array, "n S K"], log_ratio: Float[Array, "n S"], inputs: LossInputs
) -> TokenLoss:
    """Compute ``-Σ r·A`` with ``r = exp(lp - q)``."""
    surrogate = _times(jnp.exp(log_ratio), inputs.advantages)
    return _first_target(lp, -surrogate, -surrogate)


def ppo(lp: Float[Array, "n S K"], log_ratio: Float[Array, "n S"], inputs: LossInputs) -> TokenLoss:
    """Compute ``-Σ min(r·A, clip(r)·A)`` per token; a smaller clipped branch is a constant."""
    ratio = jnp.exp(log_ratio)
    free = _times(ratio, inputs.advantages)
    clipped = _times(_clip(ratio, inputs), inputs.advantages)
    gradient = jnp.where(clipped < free, 0.0, -free)
    return _first_target(lp, -jnp.minimum(free, clipped), gradient)


def cispo(
    lp: Float[Array, "n S K"], log_ratio: Float[Array, "n S"], inputs: LossInputs
) -> TokenLoss:
    """Compute ``-Σ sg(clip(r))·lp·A``: the clipped ratio is a constant weight."""
    gradient = -_times(_clip(jnp.exp(log_ratio), inputs), inputs.advantages)
    return _first_target(lp, gradient * lp[..., 0], gradient)


def dro(lp: Float[Array, "n S K"], log_ratio: Float[Array, "n S"], inputs: LossInputs) -> TokenLoss:
    """Compute ``-Σ (lp·A - ½·beta·(lp - q)²)``."""
    term = 0.5 * inputs.beta * log_ratio**2 - lp[..., 0] * inputs.advantages
    return _first_target(lp, term, inputs.beta * log_ratio - inputs.advantages)


def gspo(
    lp: Float[Array, "n S K"], log_ratio: Float[Array, "n S"], inputs: LossInputs
) -> TokenLoss:
    """Compute PPO's form with one ratio per sequence, ``s_t = sg(s)·exp(lp - sg(lp))``.

    Here s is the geometric mean of r over the masked positions, and 1 if none is masked
    (GSPO-token, arXiv 2507.18071).
    """
    return ppo(lp, log_ratio, inputs)


def stable_reinforce(
    lp: Float[Array, "n S K"], log_ratio: Float[Array, "n S"], inputs: LossInputs
) -> TokenLoss:
    """Compute ``-Σ sg(min(r, C))·(lp·A - ½·kl·(lp - q)²)`` over the sampled positions.

    The mask marks the sampled positions. This is REINFORCE with truncated importance weights, a
    loss of our own; docs/numerics.md derives it.
    """
    ratio = jnp.exp(log_ratio)
    weight = jnp.where(ratio > inputs.clip_high, inputs.clip_high, ratio)
    first = lp[..., 0]
    objective = first * inputs.advantages - 0.5 * inputs.beta * log_ratio**2
    slope = inputs.advantages - inputs.beta * log_ratio
    sampled = inputs.sequence_mask != 0
    term, gradient = (jnp.where(sampled, -weight * each, 0.0) for each in (objective, slope))
    return _first_target(lp, term, gradient)


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
}
"""Every loss by name; ``loss_id`` is the position in this dict, the same as in ``LOSS_NAMES``."""

GSPO_ID = list(LOSSES).index("gspo")

_Sums = tuple[Array, Array]
"""The datum of each token in a block and the summands, or a datum and the sum of it so far."""


def loss_and_gradient(
    lp: Float[Array, "n S K"], sequence_log_ratio: Float[Array, "n S"], inputs: LossInputs
) -> tuple[Float[Array, "n S"], Float[Array, "n S K"]]:
    """Return each token's loss term, summed over targets, and the loss's gradient by ``lp``.

    The other losses and padding are dropped by selection: a factor of zero would keep their NaNs.
    """
    log_ratio = jnp.where(
        inputs.loss_id == GSPO_ID, sequence_log_ratio, lp[..., 0] - inputs.old_logprobs
    )
    term = gradient = jnp.zeros_like(lp)
    for index, loss in enumerate(LOSSES.values()):
        here = ((inputs.loss_id == index) & inputs.valid)[:, :, None]
        token = loss(lp, log_ratio, inputs)
        term = jnp.where(here, token.term, term)
        gradient = jnp.where(here, token.gradient, gradient)
    return term.sum(axis=2), gradient


def sequence_log_ratios(first_lp: Float[Array, "n S"], inputs: LossInputs) -> Float[Array, "n S"]:
    """Return, at each token, the mean of ``lp - q`` over the masked positions of its datum.

    The mean is 0 if no position is masked. ``first_lp`` holds the logprobs of target 0.

    Sums are taken within a block, then over a datum's blocks from the first to the last; a reverse
    pass hands the total back. So the order of additions depends neither on the place of the blocks
    nor on what else they hold.
    """
    counted = inputs.valid & (inputs.sequence_mask != 0)
    datum = jnp.where(inputs.valid, inputs.segment_ids, -1)
    summands = jnp.stack(
        [jnp.where(counted, first_lp - inputs.old_logprobs, 0.0), counted.astype(first_lp.dtype)],
        axis=1,
    )

    def so_far(before: _Sums, block: _Sums) -> tuple[_Sums, Array]:
        datum, summands = block
        same = datum[:, None] == datum[None, :]
        sums = jnp.where(same[None], summands[:, None, :], 0.0).sum(axis=2)
        sums = sums + jnp.where(datum == before[0], before[1][:, None], 0.0)
        return (datum[-1], sums[:, -1]), sums

    def in_all(behind: _Sums, block: _Sums) -> tuple[_Sums, Array]:
        datum, sums = block
        sums = jnp.where(datum == behind[0], behind[1][:, None], sums)
        return (datum[0], sums[:, 0]), sums

    nobody = (jnp.full((), -2, datum.dtype), jnp.zeros(2, first_lp.dtype))
    _, sums = jax.lax.scan(so_far, nobody, (datum, summands))
    _, sums = jax.lax.scan(in_all, nobody, (datum, sums), reverse=True)
    return sums[:, 0] / jnp.maximum(sums[:, 1], 1.0)


def _clip(ratio: Float[Array, "n S"], inputs: LossInputs) -> Float[Array, "n S"]:
    return jnp.minimum(jnp.maximum(ratio, inputs.clip_low), inputs.clip_high)


def _times(ratio: Float[Array, "n S"], advantages: Float[Array, "n S"]) -> Float[Array, "n S"]:
    """Return ``ratio · advantages``, and 0 for no advantage even if the ratio is infinite.

    Prompts carry advantage 0 and whatever old logprob the client had at hand, so their ratio may
    overflow.
    """
    return jnp.where((advantages == 0) & ~jnp.isnan(ratio), 0.0, ratio * advantages)


def _first_target(
    lp: Float[Array, "n S K"], term: Float[Array, "n S"], gradient: Float[Array, "n S"]
) -> TokenLoss:
    """Put the terms at target 0, and zeros at the other targets."""
    first = jnp.arange(lp.shape[-1])[None, None, :] == 0
    return TokenLoss(
        jnp.where(first, term[..., None], 0.0), jnp.where(first, gradient[..., None], 0.0)
    )
