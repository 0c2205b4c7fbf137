"""Losses of one datum and their gradients, token by token in Python's complex numbers.

A datum's row holds the fields of ``LossInputs`` that its loss reads, [T] each, weights [T, K], with
``beta`` and ``loss_id`` as scalars.
"""

import math
from typing import Any

import numpy as np

from tuneserve_engine.backend.base import LOSS_NAMES

_STEP = 1e-30  # width of the complex step: f(x + ih) / h has almost no rounding


def loss(row: dict[str, Any], lp: list[list[complex]]) -> complex:
    """The datum's loss, from the formulas of the wire's documentation."""
    total = 0j
    masked = [t for t in range(len(lp)) if row["sequence_mask"][t] != 0]
    mean = sum(_constant(lp[t][0]) - row["old_logprobs"][t] for t in masked) / max(len(masked), 1)
    for t in range(len(lp)):
        first, q, a = lp[t][0], float(row["old_logprobs"][t]), float(row["advantages"][t])
        low, high = float(row["clip_low"][t]), float(row["clip_high"][t])
        ratio = _exp(first - q)
        match LOSS_NAMES[row["loss_id"]]:
            case "cross_entropy":
                total -= sum(float(w) * x for w, x in zip(row["weights"][t], lp[t], strict=True))
            case "importance_sampling":
                total -= ratio * a
            case "ppo":
                total -= _smaller(ratio * a, _clip(ratio, low, high) * a)
            case "cispo":
                total -= _constant(_clip(ratio, low, high)) * first * a
            case "dro":
                total -= first * a - 0.5 * float(row["beta"]) * (first - q) ** 2
            case "gspo":
                ratio = _exp(mean) * _exp(first - _constant(first))
                total -= _smaller(ratio * a, _clip(ratio, low, high) * a)
            case "stable_reinforce" if row["sequence_mask"][t] != 0:
                weight = min(math.exp(first.real - q), high)
                total -= weight * (first * a - 0.5 * float(row["beta"]) * (first - q) ** 2)
    return total


def value_and_gradient(row: dict[str, Any], lp: np.ndarray) -> tuple[float, np.ndarray]:
    """The loss at ``lp`` [T, K] and its gradient by it.

    It uses complex steps: stop-gradient keeps the real part, and comparisons look at it alone.
    """
    exact = [[complex(x) for x in position] for position in lp.tolist()]
    gradient = np.zeros(lp.shape)
    for t, k in np.ndindex(*lp.shape):
        kept = exact[t][k]
        exact[t][k] += _STEP * 1j
        gradient[t, k] = loss(row, exact).imag / _STEP
        exact[t][k] = kept
    return loss(row, exact).real, gradient


def _smaller(a: complex, b: complex) -> complex:
    return a if a.real <= b.real else b


def _clip(x: complex, low: float, high: float) -> complex:
    return complex(high) if x.real > high else complex(low) if x.real < low else x


def _constant(x: complex) -> complex:
    return complex(x.real)


def _exp(x: complex) -> complex:
    return math.exp(x.real) * complex(math.cos(x.imag), math.sin(x.imag))
