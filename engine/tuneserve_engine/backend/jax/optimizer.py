"""AdamW on one adapter, as ``torch.optim.AdamW`` computes it.

What depends on the step count or mixes hyper-parameters is computed on the host in float64, as
torch does; the program sees float32 scalars, so no change of them compiles anything.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tuneserve_engine.adapters import AdamParams, check_adam_params
from tuneserve_engine.backend.jax.adapters import LoraWeights, TrainingAdapter, Weights

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_
_LEAST_FACTOR = 2.0**-64
_LARGEST = float(np.finfo(np.float32).max)
_EXPONENTS = (-120, 120)
"""Of scales: 2^127 is no float32 any more, and 2^-127 is one that devices take for 0."""


Tree = Any
"""An adapter's arrays, or their moments or gradient."""
Scalar = Float[Array, ""] | np.float32
"""float32: on the host, or in a program."""


class StepScalars(NamedTuple):
    """One step's numbers."""

    decay: Scalar  # 1 - lr·wd
    mean_weight: Scalar  # 1 - beta1
    beta2: Scalar
    square_weight: Scalar  # 1 - beta2
    step_size: Scalar  # lr / (1 - beta1^step)
    root_correction: Scalar  # sqrt(1 - beta2^step)
    eps: Scalar
    clip_norm: Scalar  # infinity = no clipping


class Stepped(NamedTuple):
    """An adapter after a step; the accumulator is all zeros."""

    weights: Weights
    first_moment: Weights
    second_moment: Weights
    accumulator: LoraWeights
    grad_norm: Float[Array, ""]


def step_scalars(params: AdamParams, step: int) -> StepScalars:
    """The scalars of step number ``step``, counted from 1; raises UserError for hyper-parameters
    that ``check_adam_params`` refuses."""
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
    adapter: TrainingAdapter, params: AdamParams, run: Callable[..., Any] | None = None
) -> Float[Array, ""]:
    """Puts the adapter one step further, by ``adamw_step`` or by ``run``, its compiled form, and
    returns the gradient's norm; waits for neither.

    Raises UserError for hyper-parameters that ``check_adam_params`` refuses, before anything.
    """
    scalars = step_scalars(params, adapter.step + 1)
    stepped: Stepped = (run or adamw_step)(
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
) -> Stepped:
    """One AdamW step on the accumulated gradient.

    All of the adapter is donated and written in place, zeros into the accumulator. It sees one
    adapter, so it costs the same however many there are. The reported norm is that of the gradient
    before clipping.
    """
    new = adamw(weights, first_moment, second_moment, accumulator, scalars)
    return Stepped(*new[:3], jax.tree.map(jnp.zeros_like, accumulator), new[3])


def adamw(
    weights: Tree, first_moment: Tree, second_moment: Tree, gradient: Tree, scalars: StepScalars
) -> tuple[Tree, Tree, Tree, Float[Array, ""]]:
    """Weights and moments after a step by this gradient, and its norm before clipping."""
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
    """Two factors for the gradient: the first is 1 but for a huge norm, whose one factor would be
    so small that devices take it for 0."""
    norm = norm + _CLIP_EPS
    first = jnp.where(most / norm < _LEAST_FACTOR, _LEAST_FACTOR, 1.0)
    return first, jnp.minimum(most / (norm * first), 1.0)


def _lerp(start: Array, end: Array, weight: Scalar) -> Array:
    """torch.lerp's two forms: exact at both ends."""
    return jnp.where(
        weight < 0.5, start + weight * (end - start), end - (end - start) * (1 - weight)
    )


def _direction(mean: Array, square: Array, scalars: StepScalars) -> Array:
    """``m / (sqrt(v)/correction + eps)``; 0 where m is 0, so that what never had a gradient stays
    put even with eps 0."""
    denominator = jnp.sqrt(square) / scalars.root_correction + scalars.eps
    return jnp.where(mean == 0, 0.0, mean / denominator)


def global_norm(tree: Tree) -> Float[Array, ""]:
    """The Euclidean norm over all entries; neither tiny nor huge entries spoil it, because squares
    are taken after an exact scaling by the power of two of the largest entry."""
    leaves = jax.tree.leaves(tree)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in leaves]))
    exponent = jnp.clip(jnp.frexp(largest)[1], *_EXPONENTS)
    scale = jnp.ldexp(jnp.float32(1), -exponent)
    squares = jnp.sum(jnp.stack([jnp.sum((x * scale) ** 2) for x in leaves]))
    norm = jnp.ldexp(jnp.sqrt(squares), exponent)
    return jnp.minimum(norm, _LARGEST)
