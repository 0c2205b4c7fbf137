"""The variances and norms of custom losses, and torch's losses that are made of reductions."""

import math

import numpy as np

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.custom_loss import elementwise as each
from tuneserve_engine.custom_loss.elementwise import Operand
from tuneserve_engine.custom_loss.reductions import (
    Dim,
    Dtype,
    amax,
    axes_of,
    mean,
    reserve,
    sum_,
    wide,
)
from tuneserve_engine.custom_loss.tape import (
    Array,
    Number,
    Tensor,
    cast,
    floating,
    record,
    tensor_of,
)


def var(
    input: Operand,
    /,
    dim: Dim = None,
    *,
    correction: Number = 1,
    keepdim: bool = False,
    unbiased: bool | None = None,
) -> Tensor:
    x = floating(input)
    if unbiased is not None:
        correction = int(unbiased)
    centred = each.subtract(x, mean(x, dim, True))
    count = math.prod(x.shape[i] for i in axes_of(dim, x.shape)) if x.shape else 1
    freedom = max(count - correction, 0)
    total = sum_(each.square(centred), dim, keepdim)
    return each.divide(total, freedom) if freedom else each.multiply(total, math.nan)


def std(
    input: Operand,
    /,
    dim: Dim = None,
    *,
    correction: Number = 1,
    keepdim: bool = False,
    unbiased: bool | None = None,
) -> Tensor:
    spread = var(input, dim, correction=correction, keepdim=keepdim, unbiased=unbiased)
    return each.sqrt(spread)


def norm(
    input: Operand,
    /,
    p: float | str | None = 2,
    dim: Dim = None,
    keepdim: bool = False,
    *,
    dtype: Dtype | None = None,
) -> Tensor:
    x = floating(tensor_of(input) if dtype is None else cast(tensor_of(input), dtype))
    p = 2 if p is None or p == "fro" else p
    if isinstance(p, str):
        raise UserError("norm takes a number as p, or 'fro'")
    size = each.absolute(x)
    if p == math.inf:
        found: Tensor = amax(size, dim, keepdim)
        return found
    if p == 1:
        return sum_(size, dim, keepdim)
    if p != 2:
        return each.power(sum_(each.power(size, p), dim, keepdim), 1 / p)
    axes = axes_of(dim, x.shape) if x.shape else ()
    reserve(x, x.array.size)
    length = np.sqrt(np.square(wide(x.array)).sum(axes, keepdims=True))

    def pull(g: Array) -> Array:  # 0 at 0, as in torch
        by_x = np.divide(x.array, length, out=np.zeros(x.shape), where=length != 0)
        scaled: Array = (g.reshape(length.shape) * by_x).astype(x.dtype)
        return scaled

    return record((length if keepdim else length.squeeze(axes)).astype(x.dtype), (x, pull))


def vector_norm(
    input: Operand, /, ord: float = 2, dim: Dim = None, keepdim: bool = False
) -> Tensor:
    return norm(input, ord, dim, keepdim)


def normalize(input: Operand, /, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    return each.divide(input, each.clamp_min(norm(input, p, dim, True), eps))


def cosine_similarity(x1: Operand, x2: Operand, dim: int = 1, eps: float = 1e-8) -> Tensor:
    dots = sum_(each.multiply(x1, x2), dim)
    sizes = [each.clamp_min(norm(x, 2, dim), eps) for x in (x1, x2)]
    return each.divide(dots, each.multiply(*sizes))


# --- torch.nn.functional ---


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        raise UserError("reduction is 'none', 'mean' or 'sum'")
    return mean(losses) if reduction == "mean" else sum_(losses)


def mse_loss(input: Operand, target: Operand, reduction: str = "mean") -> Tensor:
    return _reduced(each.square(each.subtract(input, target)), reduction)


def l1_loss(input: Operand, target: Operand, reduction: str = "mean") -> Tensor:
    return _reduced(each.absolute(each.subtract(input, target)), reduction)


def huber_loss(
    input: Operand, target: Operand, reduction: str = "mean", delta: float = 1.0
) -> Tensor:
    gap = each.subtract(input, target)
    size = each.absolute(gap)
    far = each.multiply(each.subtract(size, 0.5 * delta), delta)
    near = each.multiply(each.square(gap), 0.5)
    return _reduced(each.where(each.lt(size, delta), near, far), reduction)


def smooth_l1_loss(
    input: Operand, target: Operand, reduction: str = "mean", beta: float = 1.0
) -> Tensor:
    if beta == 0:
        return l1_loss(input, target, reduction)
    return each.divide(huber_loss(input, target, reduction, beta), beta)


def kl_div(
    input: Operand, target: Operand, reduction: str = "mean", log_target: bool = False
) -> Tensor:
    if log_target:
        gap = each.subtract(target, input)
        losses = each.multiply(each.exp(target), gap)
    else:
        losses = each.subtract(each.xlogy(target, target), each.multiply(target, input))
    if reduction == "batchmean":
        return each.divide(sum_(losses), losses.shape[0] if losses.shape else 1)
    return _reduced(losses, reduction)


def binary_cross_entropy_with_logits(
    input: Operand,
    target: Operand,
    weight: Operand | None = None,
    reduction: str = "mean",
    pos_weight: Operand | None = None,
) -> Tensor:
    right = each.multiply(target, each.log_sigmoid(input))
    if pos_weight is not None:
        right = each.multiply(pos_weight, right)
    wrong = each.multiply(each.rsub(target, 1), each.log_sigmoid(each.negative(input)))
    losses = each.negative(each.plus(right, wrong))
    return _reduced(losses if weight is None else each.multiply(losses, weight), reduction)


def margin_ranking_loss(
    input1: Operand,
    input2: Operand,
    target: Operand,
    margin: float = 0,
    reduction: str = "mean",
) -> Tensor:
    gap = each.multiply(each.negative(tensor_of(target)), each.subtract(input1, input2))
    return _reduced(each.clamp_min(each.plus(gap, margin), 0), reduction)
