"""Checks of losses, of their data, and of the optimizer."""

import math
from collections.abc import Sequence

from tuneserve_server.conformance.checks import LOSSES, OPTIMIZERS, SDK, TRAINING, Checks
from tuneserve_server.conformance.futures import example
from tuneserve_server.conformance.target import GradientOutput, ServerUnderTest, expect, is_near
from tuneserve_server.conformance.tensors import datum, floats, integers, sparse

CHECKS = Checks()

_IDS = (11, 8, 23, 9, 30, 17, 12)
_TOKENS, _TARGETS = _IDS[:-1], _IDS[1:]
_SIZE = len(_TOKENS)


def _is_loss(output: GradientOutput, expected: float, what: str) -> None:
    got = output.loss
    expect(is_near(got, expected), f"loss:sum is {got:.6g}; {what} is {expected:.6g}")


@CHECKS.rule(LOSSES)
def cross_entropy_is_a_sum(target: ServerUnderTest) -> None:
    """cross_entropy is -sum(weight * logprob); weights may be negative or fractional."""
    weights = [0.0, 1.0, -0.5, 2.25, 0.0, 0.125]
    one = datum(_TOKENS, target_tokens=integers(_TARGETS), weights=floats(weights))
    output = target.new_model().gradient([one, example(4)])
    expect(len(output.logprobs) == 2, f"two datums give {len(output.logprobs)} outputs")
    lp = output.logprobs[0]
    expect(len(lp) == _SIZE, f"{_SIZE} targets give {len(lp)} logprobs")
    total = -sum(w * each for w, each in zip(weights, lp, strict=True)) - sum(output.logprobs[1])
    _is_loss(output, total, "-sum(weight * logprob)")


@CHECKS.rule(LOSSES)
def targets_are_shifted(target: ServerUnderTest) -> None:
    """Target i is predicted from tokens 0 to i, whatever follows; the client has shifted them."""
    model = target.new_model()
    long, short = (
        model.gradient(
            [datum(_TOKENS[:count], target_tokens=integers(_TARGETS[:count]))], forward_only=True
        ).logprobs[0]
        for count in (_SIZE, 3)
    )
    expect(all(-100 < each < 0 for each in long), f"the logprobs are {long}")
    same = all(is_near(*pair, absolute=0.02) for pair in zip(long, short, strict=False))
    expect(same, f"three of the logprobs are {long[:3]} or {short}")


@CHECKS.rule(SDK)
def chunks_of_text(target: ServerUnderTest) -> None:
    """A prompt may come in many chunks, one per token even, without a change."""
    model = target.new_model()
    targets = integers(_TARGETS)
    whole, parts = (
        model.gradient(
            [datum(_TOKENS, chunk=size, target_tokens=targets)], forward_only=True
        ).logprobs[0]
        for size in (None, 1)
    )
    expect(whole == parts, f"in one chunk the logprobs are {whole}, in many {parts}")


@CHECKS.rule(SDK)
def empty_shapes(target: ServerUnderTest) -> None:
    """A tensor without a shape is one-dimensional."""
    model = target.new_model()
    targets, weights = integers(_TARGETS), floats([1.0] * _SIZE)
    shaped = model.gradient([datum(_TOKENS, target_tokens=targets, weights=weights)])
    targets.ClearField("shape")
    weights.ClearField("shape")
    bare = model.gradient([datum(_TOKENS, target_tokens=targets, weights=weights)])
    _is_loss(bare, shaped.loss, "that with shapes")


@CHECKS.rule(LOSSES)
def many_targets_per_position(target: ServerUnderTest) -> None:
    """Targets may be [N, K]; the loss is the sum over all, and logprobs have their shape."""
    model, width = target.new_model(), 3
    ids = [5 + (7 * n) % 30 for n in range(_SIZE * width)]
    weights = [(n % 5) / 4 for n in range(_SIZE * width)]
    wide = datum(
        _TOKENS,
        target_tokens=integers(ids, _SIZE, width),
        weights=floats(weights, _SIZE, width),
    )
    output = model.gradient([wide])
    lp = output.logprobs[0]
    expect(len(lp) == _SIZE * width, f"{_SIZE * width} targets give {len(lp)} logprobs")
    _is_loss(output, -sum(w * each for w, each in zip(weights, lp, strict=True)), "their sum")
    singles = [
        model.gradient(
            [datum(_TOKENS, target_tokens=integers(ids[column::width]))], forward_only=True
        ).logprobs[0]
        for column in range(width)
    ]
    alone = [singles[n % width][n // width] for n in range(_SIZE * width)]
    same = all(is_near(*pair, absolute=0.02) for pair in zip(lp, alone, strict=True))
    expect(same, "the logprobs of [N, K] targets differ from those of single targets")


@CHECKS.rule(SDK)
def sparse_weights(target: ServerUnderTest) -> None:
    """Weights in CSR form mean the same as dense ones; cells that are left out are 0."""
    model, width = target.new_model(), 4
    ids = [5 + (3 * n) % 30 for n in range(_SIZE * width)]
    values, columns = [0.5 + n / 8 for n in range(_SIZE)], [n % width for n in range(_SIZE)]
    dense = [0.0] * (_SIZE * width)
    for row, (value, column) in enumerate(zip(values, columns, strict=True)):
        dense[row * width + column] = value
    targets = integers(ids, _SIZE, width)
    first = model.gradient(
        [datum(_TOKENS, target_tokens=targets, weights=floats(dense, _SIZE, width))]
    )
    second = model.gradient(
        [datum(_TOKENS, target_tokens=targets, weights=sparse(values, columns, width))]
    )
    _is_loss(second, first.loss, "with dense weights it")


def _policy_terms(
    target: ServerUnderTest, loss: str, config: dict[str, float]
) -> tuple[GradientOutput, list[tuple[float, float, float]]]:
    """Return an output of a policy loss, and (logprob, ratio, advantage) per position.

    The first two positions are a prompt: their logprobs and advantages are 0.
    """
    model = target.new_model()
    targets = integers((0, 0, *_TARGETS[2:]))
    before = model.gradient([datum(_TOKENS, target_tokens=targets)], forward_only=True).logprobs[0]
    gaps = (0.0, 0.0, 0.4, -0.6, 0.05, 1.5)
    advantages = [0.0, 0.0, 1.0, -0.5, 2.0, 0.75]
    drawn = [0.0, 0.0, *(lp - gap for lp, gap in zip(before[2:], gaps[2:], strict=True))]
    one = datum(
        _TOKENS,
        target_tokens=targets,
        logprobs=floats(drawn),
        advantages=floats(advantages),
    )
    output = model.gradient([one], loss, config)
    lp = output.logprobs[0]
    terms = [(x, math.exp(x - q), a) for x, q, a in zip(lp, drawn, advantages, strict=True)]
    return output, terms


@CHECKS.rule(LOSSES)
def importance_sampling(target: ServerUnderTest) -> None:
    """importance_sampling is -sum(ratio * advantage)."""
    output, terms = _policy_terms(target, "importance_sampling", {})
    _is_loss(output, -sum(r * a for _, r, a in terms), "-sum(ratio * advantage)")


@CHECKS.rule(LOSSES)
def ppo(target: ServerUnderTest) -> None:
    """ppo takes the lesser of ratio and clipped ratio times advantage; thresholds are ratios."""
    for config, low, high in (
        ({}, 0.8, 1.2),
        ({"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}, 0.5, 1.1),
    ):
        output, terms = _policy_terms(target, "ppo", config)
        total = -sum(min(r * a, min(max(r, low), high) * a) for _, r, a in terms)
        _is_loss(output, total, f"the formula with thresholds {low} and {high}")


@CHECKS.rule(LOSSES)
def cispo(target: ServerUnderTest) -> None:
    """cispo is -sum(clipped ratio * logprob * advantage), with thresholds 0 and 4."""
    output, terms = _policy_terms(target, "cispo", {})
    _is_loss(output, -sum(min(max(r, 0.0), 4.0) * x * a for x, r, a in terms), "the formula")


@CHECKS.rule(LOSSES)
def dro(target: ServerUnderTest) -> None:
    """dro is -sum(logprob * advantage - beta / 2 * (logprob - drawn logprob)**2)."""
    output, terms = _policy_terms(target, "dro", {"beta": 0.05})
    total = -sum(x * a - 0.025 * math.log(r) ** 2 for x, r, a in terms)
    _is_loss(output, total, "the formula")


@CHECKS.rule(TRAINING)
def gradients_add_up(target: ServerUnderTest) -> None:
    """Gradients of several calls add up until optim_step, which clears them."""
    apart, together = target.new_model(), target.new_model()
    for count in (5, 9):
        apart.gradient([example(count)])
    together.gradient([example(5), example(9)])
    for _ in range(2):  # the second step has a gradient of its own
        losses = []
        for model in (apart, together):
            model.step(learning_rate=1e-2)
            losses.append(model.gradient([example()]).loss)
        expect(
            is_near(*losses),
            f"after two calls the loss is {losses[0]:.6g}, after one {losses[1]:.6g}",
        )


@CHECKS.rule(TRAINING)
def forward_leaves_no_gradient(target: ServerUnderTest) -> None:
    """A forward pass leaves no gradient, and a step changes the model only by gradients."""
    model, plain = target.new_model(), target.new_model()
    model.gradient([example(9, weight=-3.0)], forward_only=True)
    losses = []
    for each in (model, plain):
        each.gradient([example()])
        each.step(learning_rate=1e-2)
        losses.append(each.gradient([example()], forward_only=True).loss)
    expect(
        is_near(*losses), f"with a forward pass the loss is {losses[0]:.6g}, not {losses[1]:.6g}"
    )


@CHECKS.rule(OPTIMIZERS)
def adamw(target: ServerUnderTest) -> None:
    """Training lowers the loss; a gradient times 8 takes the same first step."""

    def trained(weights: Sequence[float]) -> tuple[float, float]:
        model = target.new_model()
        losses = []
        for weight in weights:
            model.gradient([example(weight=weight)])
            model.step(learning_rate=1e-2)
            losses.append(model.gradient([example()], forward_only=True).loss)
        return losses[0], losses[-1]

    first, last = trained([1.0] * 4)
    expect(last < first, f"the loss after one step is {first:.6g}, after four {last:.6g}")
    scaled, _ = trained([8.0])
    expect(is_near(first, scaled, 0.01), f"the first step leads to {first:.6g} or {scaled:.6g}")


@CHECKS.rule(TRAINING)
def load_restores(target: ServerUnderTest) -> None:
    """A checkpoint restores weights and optimizer; the next step then has the same result."""
    model = target.new_model()
    for _ in range(3):
        model.gradient([example()])
        model.step(learning_rate=1e-2)
    path = model.saved("save_weights")
    whole, fresh = target.loaded_model(path), target.loaded_model(path, optimizer=False)
    starts = [each.gradient([example()]).loss for each in (model, whole, fresh)]
    expect(
        is_near(starts[0], starts[1]) and is_near(starts[0], starts[2]),
        f"the loss is {starts[0]:.6g}, after loading {starts[1]:.6g} and {starts[2]:.6g}",
    )
    for each in (model, whole):
        each.step(learning_rate=1e-2)
    ends = [each.gradient([example()], forward_only=True).loss for each in (model, whole)]
    expect(is_near(*ends), f"a step later the loss is {ends[0]:.6g}, after loading {ends[1]:.6g}")
