"""Custom losses as people write them, and such as reach every operation that is offered."""

# mypy: disable-error-code="no-untyped-def"
import math

import torch
import torch.nn.functional as F

# --- losses of the literature ---------------------------------------------------------------------


def dpo(logprobs, ref, chosen, rejected):
    moved = logprobs - ref
    margin = 0.1 * ((moved * chosen).sum() - (moved * rejected).sum())
    return -F.logsigmoid(margin), {
        "custom/margin:mean": margin,
        "custom/right:mean": (margin > 0).float(),
        "custom/dpo_loss:sum": -F.logsigmoid(margin),
    }


def ipo(logprobs, ref, chosen, rejected):
    moved = logprobs - ref
    gap = (moved * chosen).sum() / chosen.abs().sum() - (moved * rejected).sum()
    return (gap - 1 / (2 * 0.1)) ** 2, {}


def simpo(logprobs, chosen, rejected):
    best = (logprobs * chosen).sum() / chosen.sum()
    worst = (logprobs * rejected).sum() / rejected.sum()
    return -torch.nn.functional.logsigmoid(2.0 * (best - worst) - 0.5), {}


def orpo(logprobs, chosen, rejected):
    best = (logprobs * chosen).sum() / chosen.abs().sum()
    worst = (logprobs * rejected).sum() / rejected.abs().sum()
    odds = best - worst - (torch.log1p(-torch.exp(best)) - torch.log1p(-torch.exp(worst)))
    return -best - 0.1 * F.logsigmoid(odds), {"custom/odds:mean": odds}


def kto(logprobs, ref, mask, desirable):
    reward = ((logprobs - ref) * mask).sum()
    sign = 2 * desirable - 1
    return 1 - torch.sigmoid(sign * 0.1 * reward), {"custom/reward:mean": reward.detach()}


def neg_ll(logprobs, mask):
    loss = -(logprobs * mask).sum()
    return loss, {"custom/neg_ll:sum": loss}


def ppo(logprobs, ref, advantages):
    ratio = torch.exp(logprobs - ref)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return loss, {"custom/clip:mean": (ratio != clipped).float().mean()}


def grpo(logprobs, ref, advantages, mask):
    ratio = (logprobs - ref).exp()
    kl = torch.exp(ref - logprobs) - (ref - logprobs) - 1
    each = torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages) - 0.04 * kl
    return -(each * mask).sum() / mask.sum().clamp(min=1), {"custom/kl:mean": kl.mean()}


def gspo(logprobs, ref, advantages, mask):
    n = mask.sum()
    mean = ((logprobs - ref) * mask).sum() / n
    ratio = torch.exp(mean.detach() + logprobs - logprobs.detach())
    return -(ratio * advantages * mask).sum(), {"custom/ratio:mean": mean.exp()}


def cispo(logprobs, ref, advantages):
    ratio = torch.exp(logprobs - ref).clamp(max=4.0).detach()
    return -(ratio * logprobs * advantages).sum(), {}


def reverse_kl(logprobs, ref):
    weights = F.softmax(logprobs, dim=-1)
    kl = (weights * (F.log_softmax(logprobs, dim=-1) - F.log_softmax(ref, dim=-1))).sum(-1)
    return kl.mean(), {"custom/kl:mean": kl.max()}


def distillation(logprobs, ref):
    target = torch.softmax(ref / 2.0, -1)
    return F.kl_div(logprobs, target, reduction="sum"), {}


def focal(logprobs, mask):
    p = logprobs.exp()
    return -(((1 - p) ** 2) * logprobs * mask).sum(), {"custom/p:mean": p.mean()}


def label_smoothing(logprobs, mask):
    smooth = 0.1
    token = -(1 - smooth) * logprobs[:, 0] - smooth * logprobs.mean(dim=1)
    return (token * mask[:, 1]).sum(), {}


def unlikelihood(logprobs, mask):
    return -torch.log((1.0 - logprobs.exp()).clamp_min(1e-6)).mul(mask).sum(), {}


def hinge(logprobs, chosen, rejected):
    gap = (logprobs * chosen).sum() - (logprobs * rejected).sum()
    return torch.relu(1 - gap), {"custom/gap:mean": gap}


def bradley_terry(logprobs, labels):
    score = logprobs.mean()
    return F.binary_cross_entropy_with_logits(score, labels.float().mean()), {}


def entropy_bonus(logprobs):
    return (logprobs.exp() * logprobs).sum() - 0.01 * logprobs.var(), {}


def tree_margin(logprobs, labels):
    best = logprobs.gather(0, labels)
    return F.margin_ranking_loss(best, logprobs[:4], torch.ones_like(best), margin=0.3), {}


def discounted(logprobs, rewards):
    steps = torch.arange(logprobs.shape[0], dtype=torch.float32)
    later = torch.flip(torch.cumsum(torch.flip(rewards * 0.9**steps, [0]), 0), dims=[0])
    return -(logprobs * (later - later.mean()) / (later.std() + 1e-6)).sum(), {}


# --- operations -----------------------------------------------------------------------------------


def shapes(logprobs):
    x = logprobs.reshape(2, -1).T.unsqueeze(0).expand(3, -1, 2).permute(2, 0, 1)
    y = x.flatten(1).transpose(0, 1).squeeze().contiguous().view(-1)
    return (y * torch.arange(y.size(0), dtype=y.dtype)).sum() / y.numel(), {}


def joined(logprobs, ref):
    pair = torch.stack([logprobs, ref], dim=1)
    both = torch.cat((pair, pair * 2, torch.zeros(1, logprobs.dim() + 1)), dim=0)
    first, rest = torch.split(both, [2, both.shape[0] - 2])
    halves = rest[:4].chunk(2)
    return first.prod() + (halves[0] @ halves[1].t()).sum() + rest.std(), {}


def indexed(logprobs, labels, mask):
    x = logprobs[labels] * 2 + logprobs[1:5] - logprobs[-1]
    y = torch.index_select(logprobs, 0, labels).masked_fill(labels > 2, 0.0)
    z = logprobs[mask > 0].sum() + torch.masked_select(logprobs, mask.bool()).square().sum()
    return (x * y).sum() + z + logprobs[None, ..., 0].sum() + logprobs[::2].sum(), {}


def ordered(logprobs):
    best = torch.topk(logprobs, 3)
    ranked = logprobs.sort(descending=True).values
    low = logprobs[torch.argsort(logprobs)][:2]
    return 3 * best.values.sum() - ranked[1] * low.sum() + logprobs.max(dim=0).values, {
        "custom/at:sum": best.indices.sum(),
        "custom/most:sum": logprobs.argmax() + logprobs.argmin(),
    }


def functions(logprobs):
    x = logprobs.abs() + 0.5
    y = torch.log2(x) + torch.log10(x) + x.log1p() + x.expm1() + x.sqrt() + x.rsqrt() + x.tanh()
    z = torch.sin(x) + x.cos() + torch.tan(x * 0.1) + x.sinh() + x.cosh() + torch.atan(x)
    w = torch.asin(x * 0.1) + torch.acos(x * 0.1) + x.exp2() + x.reciprocal() + x.frac()
    return (y * z + w).sum(), {}


def activations(logprobs):
    x = F.softplus(logprobs) + F.silu(logprobs) + F.elu(logprobs) + F.leaky_relu(logprobs, 0.1)
    y = F.hardtanh(logprobs) + F.relu6(logprobs) + F.relu(logprobs + 1) + torch.sigmoid(logprobs)
    return (x * y).mean() + F.softplus(logprobs, beta=2, threshold=1).sum(), {}


def powers(logprobs, ref):
    x = logprobs.abs() + 0.1
    return (x**2 + x**-0.5 + 2.0**logprobs + torch.pow(x, ref) + x.pow(3)).sum(), {}


def divisions(logprobs, ref):
    x = logprobs / (ref.abs() + 1) + 1 / (logprobs - 2) + logprobs % 0.7 + logprobs.detach() // 0.5
    y = torch.div(logprobs, 0.3, rounding_mode="trunc") + torch.fmod(logprobs, 0.4)
    return (x + y.remainder(0.9)).sum(), {}


def choices(logprobs, ref):
    x = torch.where(logprobs > ref, logprobs, 2 * ref) + torch.maximum(logprobs, ref)
    y = logprobs.where(ref < -1, 0.5) + torch.max(logprobs, ref * 2) + logprobs.clamp(max=-0.5)
    flags = (logprobs < -1) & ~(ref > -2) | (logprobs == ref) ^ torch.isfinite(ref)
    return (x * y * flags).sum() + torch.lerp(logprobs, ref, 0.3).sum(), {
        "custom/all:sum": flags.all(),
        "custom/some:sum": torch.any(logprobs >= ref) + (logprobs <= ref).sum(),
    }


def extremes(logprobs):
    ties = torch.cat([logprobs, logprobs])
    return ties.max() * 2 + ties.amin() + torch.amax(logprobs * 3, dim=0) - ties.min(), {}


def log_sums(logprobs, ref):
    x = torch.logsumexp(logprobs, dim=0) + torch.logaddexp(logprobs, ref).sum()
    return x + torch.special.xlogy(ref.exp(), logprobs.exp()).sum(), {}


def norms(logprobs, ref):
    x = logprobs.norm() + torch.linalg.vector_norm(ref * logprobs, ord=3) + logprobs.norm(p=1)
    y = F.normalize(logprobs, dim=0) * ref
    return x + y.sum() + F.cosine_similarity(logprobs, ref, dim=0), {}


def distances(logprobs, ref):
    x = F.mse_loss(logprobs, ref) + F.l1_loss(logprobs, ref, reduction="sum")
    y = F.huber_loss(logprobs, ref, delta=0.5) + F.smooth_l1_loss(logprobs, ref, beta=0.5)
    return x + y + F.kl_div(logprobs, ref, log_target=True, reduction="batchmean"), {}


def running_sums(logprobs):
    x = logprobs.cumsum(0).exp() + torch.cumprod(1 + logprobs.exp(), dim=0)
    return (x * logprobs.diff(dim=0).sum()).mean() + logprobs.roll(1, 0)[0], {}


def matrices(logprobs, ref):
    m = torch.outer(logprobs, ref)
    x = torch.tril(m) @ logprobs + torch.triu(m, 1).mv(ref) + m.mT.mean(dim=[0, 1])
    eye = torch.eye(logprobs.size(0), dtype=logprobs.dtype)
    return (x * torch.dot(logprobs, ref)).sum() + ((m + eye) @ m).mean(), {}


def spread(logprobs):
    x = logprobs.var(unbiased=False) + logprobs.std() + torch.var(logprobs, dim=0)
    return x / (logprobs - logprobs.mean(0, keepdim=True)).square().sum(), {}


def casts(logprobs, labels):
    x = logprobs.to(torch.float64) * labels[0] + logprobs.double().float().type_as(logprobs)
    flags = F.one_hot(labels, 12).sum(0).to(logprobs.dtype)
    return (x * flags[: x.shape[-1]]).sum().float(), {"custom/labels:sum": labels.sum()}


def padded(logprobs):
    x = F.pad(logprobs, (1, 2), value=0.5) * 2
    y = logprobs.repeat(2) + torch.repeat_interleave(logprobs, 2)
    z = logprobs.new_ones(3) + torch.full((3,), 2.0, dtype=logprobs.dtype) * logprobs.new_zeros(1)
    return x.sum() + (y * y).sum() + (z * logprobs[:3]).sum() + torch.narrow(x, 0, 0, 3).prod(), {}


def grouped(logprobs, labels):
    sums = torch.zeros_like(logprobs).index_add(0, labels, logprobs[: labels.shape[0]])
    parts = torch.unbind(sums.select(0, 1) * logprobs)
    return (sums**2).sum() + parts[0] * parts[-1], {}


def numbers(logprobs):
    n = logprobs.shape[0]
    scale = math.sqrt(n) + math.log(n + 1) ** 2 - -n // 2 + n % 3 + abs(n - 20)
    total = logprobs.sum() / scale
    total += 0.5
    total *= n
    return total, {"custom/n:sum": total * 0 + n}


def several_targets(logprobs, ref, scale):
    x = logprobs - ref * scale
    best, at = x.max(dim=1)
    return (x.softmax(dim=1) * x).sum() + best.sum() + x.sum(dim=(0, 1)), {
        "custom/at:mean": at.float().mean()
    }


def gathered(logprobs, ref):
    kept = torch.gather(logprobs, 1, ref.argsort(dim=1)[:, :2])
    return -kept.logsumexp(dim=-1).sum() + torch.prod(logprobs, dim=1).mean(), {}


def rounded(logprobs, ref):
    x = torch.floor(logprobs) + logprobs.ceil() + logprobs.trunc() + torch.round(logprobs)
    y = torch.nan_to_num(logprobs / ref) + torch.clamp_max(+logprobs, -0.3) + torch.sign(ref)
    z = torch.atan2(logprobs, ref) - logprobs.detach().floor_divide(0.4)
    return (x * logprobs * y).sum() - torch.neg(z).sum(), {}


def flags(logprobs, ref, labels):
    over = torch.logical_and(torch.gt(logprobs, ref), torch.le(ref, -0.2))
    other = torch.logical_or(logprobs.ge(-1), ~torch.lt(ref, -2)).logical_xor(over).logical_not()
    odd = torch.bitwise_and(labels, 1) + torch.bitwise_or(labels, 2) + labels.bitwise_xor(3)
    same = torch.eq(labels, 3).long() + labels.ne(1).int() + torch.bitwise_not(labels)
    return (logprobs * over + logprobs**2 * other).sum(), {
        "custom/odd:sum": odd.sum() + same.sum() + torch.count_nonzero(over),
        "custom/bad:mean": (torch.isnan(ref) | torch.isinf(1 / (ref - ref))).float().mean(),
    }


def scaled(logprobs, ref):
    x = torch.add(logprobs, ref, alpha=2) * logprobs.sub(ref, alpha=0.5) + torch.rsub(logprobs, 1)
    y = torch.ones(logprobs.shape, dtype=ref.dtype) + torch.full_like(ref, 0.5)
    z = logprobs.mean().expand_as(ref) * logprobs.new_full((12,), 3.0)
    return (x * y * z).sum() * logprobs.is_floating_point(), {}
