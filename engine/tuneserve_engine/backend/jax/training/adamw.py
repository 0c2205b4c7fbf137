"""AdamW on one adapter, as ``torch.optim.AdamW`` computes it.

Values that depend on the step count or mix hyper-parameters are computed on the host in float64, as
in torch. The program takes them as float32 scalars, so changing them compiles nothing.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights, TrainingAdapter, Weights
from tuneserve_engine.core.adapter import AdamwParams, check_adam_params

_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_LEAST_FACTOR = 2.0**-64
_LARGEST = float(np.finfo(np.float32).max)
_EXPONENTS = (-120, 120)
"""The range of scaling exponents: a scale beyond it nears float32's overflow or is flushed to 0."""


Tree = Any
"""An adapter's arrays, or their moments or gradient."""
Scalar = Float[Array, ""] | np.float32
"""A float32 on the host or in a program."""


class StepScalars(NamedTuple):
    """The scalars of one step."""

    decay: Scalar  # 1 - lr·wd
    mean_weight: Scalar  # 1 - beta1
    beta2: Scalar
    square_weight: Scalar  # 1 - beta2
    step_size: Scalar  # lr / (1 - beta1^step)
    root_correction: Scalar  # sqrt(1 - beta2^step)
    eps: Scalar
    clip_norm: Scalar  # infinity = no clipping


class SteppedAdapter(NamedTuple):
    """An adapter after a step; the accumulator is all zeros."""

    weights: Weights
    first_moment: Weights
    second_moment: Weights
    accumulator: LoraWeights
    grad_norm: Float[Array, ""]


def step_scalars(params: AdamwParams, step: int) -> StepScalars:
    """Return the scalars of step number ``step``, counted from 1.

    Raises ``UserError`` for hyper-parameters that ``check_adam_params`` refuses.
    """
    check_adam_params(params)
    correction1 = 1 - params.beta1**step
    correction2 = 1 - params.beta2**step
    return StepScalars(
        decay=np.float32(1 - params.learning_rate * params.weight_decay),
        mean_weight=np.float32(1 - params.beta1),
        beta2=np.float32(params.beta2),
        square_weight=np.float32(1 - params.beta2),
        step_size=np.float32(params.learning_rate / correction1),
        root_correction=np.float32(math.sqrt(correction2)),
        eps=np.float32(params.eps),
        clip_norm=np.float32(params.grad_clip_norm if params.grad_clip_norm > 0 else math.inf),
    )


def start_step(
    adapter: TrainingAdapter, params: AdamwParams, run: Callable[..., Any] | None = None
) -> Float[Array, ""]:
    """Take one step with the adapter and return the gradient's norm; wait for neither.

    ``run`` is the compiled form of ``adamw_step``, which runs if it is None. Raises ``UserError``
    for hyper-parameters that ``check_adam_params`` refuses, before anything changes.
    """
    scalars = step_scalars(params, adapter.step + 1)
    stepped: SteppedAdapter = (run or adamw_step)(
        adapter.weights,
        adapter.first_moment,
        adapter.second_moment,
        adapter.accumulator,
        scalars,
    )
    adapter.weights = stepped.weights
    adapter.first_moment = stepped.first_moment
    adapter.second_moment = stepped.second_moment
    adapter.accumulator = stepped.accumulator
    adapter.accumulated = False
    adapter.step += 1
    return stepped.grad_norm


@partial(jax.jit, donate_argnums=(0, 1, 2, 3))
def adamw_step(
    weights: LoraWeights,
    first_moment: LoraWeights,
    second_moment: LoraWeights,
    accumulator: LoraWeights,
    scalars: StepScalars,
) -> SteppedAdapter:
    """Take one AdamW step on the accumulated gradient.

    All of the adapter is donated and written in place, zeros into the accumulator. The program
    takes one adapter, so its cost does not depend on how many there are. The reported norm is that
    of the gradient before clipping.
    """
    new = adamw(weights, first_moment, second_moment, accumulator, scalars)
    return SteppedAdapter(*new[:3], jax.tree.map(jnp.zeros_like, accumulator), new[3])


def adamw(
    weights: Tree, first_moment: Tree, second_moment: Tree, gradient: Tree, scalars: StepScalars
) -> tuple[Tree, Tree, Tree, Float[Array, ""]]:
    """Return weights and moments after a step by this gradient, and its norm before clipping."""
    norm = global_norm(gradient)
    first, second = _clipping(norm, scalars.clip_norm)
    gradient = jax.tree.map(lambda g: g * first * second, gradient)
    mean = jax.tree.map(lambda m, g: _lerp(m, g, scalars.mean_weight), first_moment, gradient)
    square = jax.tree.map(
        lambda v, g: v * scalars.beta2 + g * g * scalars.square_weight, second_moment, gradient
    )
    new = jax.tree.map(
        lambda p, m, v: p * scalars.decay - scalars.step_size * _direction(m, v, scalars),
        weights,
        mean,
        square,
    )
    return new, mean, square, norm


def _clipping(norm: Float[Array, ""], most: Scalar) -> tuple[Array, Array]:
    """Return two factors for the gradient.

    The first is 1 except for a huge norm: a single factor would then be so small that devices flush
    it to 0.
    """
    norm = norm + _CLIP_EPS
    first = jnp.where(most / norm < _LEAST_FACTOR, _LEAST_FACTOR, 1.0)
    return first, jnp.minimum(most / (norm * first), 1.0)


def _lerp(start: Array, end: Array, weight: Scalar) -> Array:
    """Interpolate by torch.lerp's two forms, which are exact at both ends."""
    return jnp.where(
        weight < 0.5, start + weight * (end - start), end - (end - start) * (1 - weight)
    )


def _direction(mean: Array, square: Array, scalars: StepScalars) -> Array:
    """Return ``m / (sqrt(v)/correction + eps)``, and 0 where m is 0.

    So an entry that never had a gradient stays put even with an eps of 0.
    """
    denominator = jnp.sqrt(square) / scalars.root_correction + scalars.eps
    return jnp.where(mean == 0, 0.0, mean / denominator)


def global_norm(tree: Tree) -> Float[Array, ""]:
    """Return the Euclidean norm over all entries.

    Tiny and huge entries do not spoil it: entries are scaled exactly, by the power of two of the
    largest entry, before they are squared.
    """
    leaves = jax.tree.leaves(tree)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in leaves]))
    exponent = jnp.clip(jnp.frexp(largest)[1], *_EXPONENTS)
    scale = jnp.ldexp(jnp.float32(1), -exponent)
    squares = jnp.sum(jnp.stack([jnp.sum((x * scale) ** 2) for x in leaves]))
    norm = jnp.ldexp(jnp.sqrt(squares), exponent)
    return jnp.minimum(norm, _LARGEST)
