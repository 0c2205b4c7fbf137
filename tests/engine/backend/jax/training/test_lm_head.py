"""The chunked head against full logits, and the inputs that its bits depend on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from tests.engine.backend.jax.training import loss_oracle
from tests.engine.backend.jax.training.lm_head_case import (
    EPS,
    MIXED,
    REAL,
    SMALL,
    Micro,
    Request,
    Sizes,
    adapters_of,
    head_of,
    micro_of,
    numbers_of,
    score,
    stale_gradient_slots,
    train,
)
from tests.support.nightly import at_night
from tuneserve_engine.backend.base import LOSS_NAMES
from tuneserve_engine.backend.jax.training.lm_head import LmHead


class Expected(NamedTuple):
    logprobs: np.ndarray  # of the request's tokens
    loss: float  # of all of them
    gradient: np.ndarray
    a: np.ndarray
    b: np.ndarray


def full_logits(request: Request, sizes: Sizes) -> Expected:
    """Full logits and autodiff, with the loss and its gradient from the float64 oracle."""
    numbers = numbers_of(request, sizes)
    head, adapters = head_of(sizes), adapters_of(sizes)
    scale, trained = adapters.scale[request.slot], bool(adapters.trained[request.slot])

    def logprobs(x: Array, a: Array, b: Array) -> Array:
        normed = x / jnp.sqrt((x**2).mean(axis=1, keepdims=True) + EPS) * head.norm[None]
        z = normed @ head.unembedding.T
        z = z + scale * (normed @ a) @ b if trained else z
        return jnp.take_along_axis(jax.nn.log_softmax(z, axis=1), numbers["targets"], axis=1)

    inputs = (numbers["x"], adapters.a[request.slot], adapters.b[request.slot])
    lp, pullback = jax.vjp(logprobs, *(jnp.asarray(x) for x in inputs))
    total, by_lp = 0.0, []
    for tokens in np.split(np.arange(len(lp)), np.cumsum(request.lengths)[:-1]):
        row = {name: np.float32(x[tokens]) for name, x in numbers.items()}
        row |= {"beta": 0.1, "loss_id": LOSS_NAMES.index(request.loss)}
        value, gradient = loss_oracle.value_and_gradient(row, np.asarray(lp)[tokens])
        total += value
        by_lp.append(gradient)
    by_x, by_a, by_b = pullback(jnp.asarray(np.concatenate(by_lp), jnp.float32))
    return Expected(np.asarray(lp), total, by_x, by_a, by_b)


def close(found: Any, expected: Any) -> None:
    largest = float(np.abs(expected).max(initial=1e-3))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * largest)


def tokens_of(array: Any, micro: Micro, number: int) -> np.ndarray:
    """The valid tokens of the request of that number."""
    mine = (micro.inputs.segment_ids // 10 == number) & micro.inputs.valid
    mine[int(micro.used) :] = False
    return np.asarray(array)[mine]


def check(requests: Sequence[Request], sizes: Sizes, *, n: int, chunk: int) -> None:
    micro = micro_of(requests, sizes, n=n)
    head, adapters = head_of(sizes), adapters_of(sizes)
    out = train(head, micro, adapters, stale_gradient_slots(sizes), chunk)
    scored = score(head, micro, adapters, chunk)
    for number, request in enumerate(requests):
        expected = full_logits(request, sizes)
        for logprobs in (out.logprobs, scored.logprobs):
            found = tokens_of(logprobs, micro, number)
            np.testing.assert_allclose(found, expected.logprobs, rtol=0, atol=1e-5)
        close(tokens_of(out.gradient, micro, number), expected.gradient)
        for loss in (out.loss, scored.loss):
            np.testing.assert_allclose(
                tokens_of(loss, micro, number).sum(), expected.loss, rtol=1e-5, atol=1e-5
            )
        if adapters.trained[request.slot]:
            close(out.gradient_slots["a"][0, request.slot], expected.a)
            close(out.gradient_slots["b"][0, request.slot], expected.b)


# --- the numbers ---------------------------------------------------------------------------------


@pytest.mark.acceptance("H1", "H5")
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_every_loss_equals_full_logits_and_autodiff(loss: str):
    """Datums cross blocks and chunks, in a trained head and a frozen one."""
    requests = (Request(5, 0, (3, 35, 9), loss), Request(6, 1, (20, 31), loss))
    check(requests, SMALL, n=16, chunk=4)


@pytest.mark.acceptance("H1", "H4", "H5")
@pytest.mark.parametrize(
    ("chunk", "targets"), [(1, 1), at_night(3, 1), at_night(4, 1), (24, 1), (2, 64)]
)
def test_any_chunk_equals_full_logits_with_adapters_mixed(chunk: int, targets: int):
    """With 15 blocks in use, 4 and 2 are not divisors and 24 is more.

    With 64 targets out of a vocabulary of 61, some are named twice and count twice.
    """
    check(MIXED, replace(SMALL, targets=targets), n=-(-16 // chunk) * chunk, chunk=chunk)


@pytest.mark.acceptance("H4")
def test_chunks_of_a_single_token_equal_full_logits():
    requests = (Request(1, 0, (3, 2), "gspo"), Request(2, 1, (4,)), Request(3, 2, (3,), "ppo"))
    check(requests, replace(SMALL, block=1), n=12, chunk=1)


@pytest.mark.parametrize("target", [SMALL.vocabulary, 2**30])
def test_a_target_out_of_range_has_no_number(target: int):
    micro = micro_of([Request(1, 1, (10,))], SMALL, n=16)
    micro.targets[0, 3] = target
    out = score(head_of(SMALL), micro, adapters_of(SMALL), 4)
    assert np.isnan(out.logprobs[0, 3, 0]) and np.isnan(out.loss[0, 3])
    assert np.isfinite(np.delete(np.asarray(out.logprobs).reshape(-1), 3)).all()


def test_bfloat16_weights_and_states_give_the_numbers_of_float32_ones():
    """Products of bfloat16 numbers are exact in float32, so only roundings differ: those of the
    normed states, of the logits' gradient and of the results.
    """
    request = Request(9, 0, (40, 20))
    micro = micro_of([request], SMALL, n=16)
    narrow = micro._replace(x=jnp.asarray(micro.x, jnp.bfloat16))
    head = LmHead(*(x.astype(jnp.bfloat16) for x in head_of(SMALL)))
    wide = LmHead(*(x.astype(jnp.float32) for x in head))
    adapters = adapters_of(SMALL)

    found = train(head, narrow, adapters, stale_gradient_slots(SMALL), 4)
    exact = train(
        wide,
        micro._replace(x=narrow.x.astype(jnp.float32)),
        adapters,
        stale_gradient_slots(SMALL),
        4,
    )

    assert found.gradient.dtype == jnp.bfloat16 and found.logprobs.dtype == jnp.float32
    np.testing.assert_allclose(found.logprobs, exact.logprobs, atol=0.05)
    pairs = [(found.gradient.astype(jnp.float32), exact.gradient)]
    pairs += [
        (found.gradient_slots[name][0, 0], exact.gradient_slots[name][0, 0]) for name in ("a", "b")
    ]
    for mine, theirs in pairs:
        assert jnp.linalg.norm(mine - theirs) < 0.01 * jnp.linalg.norm(theirs)


# --- frozen heads, earlier micro-batches, padding ------------------------------------------------


@pytest.mark.acceptance("H5")
def test_requests_with_a_frozen_head_get_zeros_and_other_slots_are_not_touched():
    requests = (MIXED[0], MIXED[1])  # slot 0 trains its head, slot 1 does not
    stale = stale_gradient_slots(SMALL, 7.0)
    out = train(head_of(SMALL), micro_of(requests, SMALL, n=16), adapters_of(SMALL), stale, 4)
    for name, buffer in out.gradient_slots.items():
        assert np.all(np.asarray(buffer[0, 1]) == 0)
        np.testing.assert_array_equal(buffer[0, 2:], stale[name][0, 2:])
        assert np.any(np.asarray(buffer[0, 0]) != 7)


def test_a_request_adds_to_its_earlier_micro_batches():
    """Its first block overwrites the gradient slot. A micro-batch without that block adds to it."""
    head, adapters = head_of(SMALL), adapters_of(SMALL)
    both = (Request(1, 0, (40,)), Request(2, 2, (24,)))
    micro = micro_of(both, SMALL, n=16)
    again = micro._replace(blocks=micro.blocks._replace(is_first=np.zeros(16, bool)))
    once = train(head, micro, adapters, stale_gradient_slots(SMALL), 4).gradient_slots
    held = {name: np.array(x) for name, x in once.items()}
    twice = train(head, again, adapters, once, 4).gradient_slots
    for name in ("a", "b"):
        for slot in (0, 2):
            close(twice[name][0, slot], 2 * held[name][0, slot])


def test_tokens_without_a_gradient_change_nothing():
    """Weights are zero, so the backward pass skips a chunk that has no other token."""
    micro = micro_of([Request(1, 0, (64,))], SMALL, n=16)
    micro.inputs.weights[:5] = 0
    out = train(head_of(SMALL), micro, adapters_of(SMALL), stale_gradient_slots(SMALL), 4)
    gradient = np.asarray(out.gradient)
    assert np.all(gradient[:5] == 0) and np.any(gradient[5:8] != 0)
    assert np.all(np.asarray(out.logprobs)[:5] != 0)


def test_padding_and_unused_blocks_give_zeros():
    micro = micro_of(MIXED, SMALL, n=16)
    out = train(head_of(SMALL), micro, adapters_of(SMALL), stale_gradient_slots(SMALL), 4)
    padding = ~micro.inputs.valid
    padding[int(micro.used) :] = True
    for array in out[:3]:
        assert np.all(np.asarray(array)[padding] == 0)


# --- bits ----------------------------------------------------------------------------------------

MINE = Request(20, 2, (70, 20, 50), "gspo")
"""Three blocks of 64 with a trained head."""
FROZEN = replace(MINE, slot=1)


def bits_of(mine: Request, others: Sequence[Request], at: Sequence[int], **given: Any) -> list[Any]:
    """All results of ``mine`` in a micro-batch of 16 blocks, when it and the others lie there."""
    micro = micro_of([mine, *others], REAL, n=16, at=at)
    adapters = given.get("adapters", adapters_of(REAL))
    gradient_slots = given.get("scratch", stale_gradient_slots(REAL))
    out = train(head_of(REAL), micro, adapters, gradient_slots, 4)
    scored = score(head_of(REAL), micro, adapters, 4)
    arrays = [*out[:3], *scored]
    return [tokens_of(x, micro, 0) for x in arrays] + [
        np.asarray(x[0, mine.slot]) for x in out.gradient_slots.values()
    ]


def assert_equal_bits(one: list[Any], other: list[Any]) -> None:
    for x, y in zip(one, other, strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("mine", [MINE, FROZEN], ids=["trained", "frozen"])
@pytest.mark.parametrize("at", [1, 3, 6, 13])
def test_bits_are_the_same_at_any_block_and_beside_any_request(mine: Request, at: int):
    others = {
        1: [(Request(30, 0, (64,), "gspo"), 0), (Request(31, 3, (600,), "ppo"), 4)],
        3: [(Request(32, 3, (192,)), 0), (Request(33, 0, (60, 4, 100)), 6)],
        6: [(Request(34, 0, (384,), "dro"), 0)],
        13: [(Request(35, 3, (20,)), 11), (Request(36, 0, (5, 300)), 0)],
    }[at]
    alone = bits_of(mine, [], [0])
    beside = bits_of(mine, [r for r, _ in others], [at, *(place for _, place in others)])
    assert_equal_bits(alone, beside)


@pytest.mark.parametrize("mine", [MINE, FROZEN], ids=["trained", "frozen"])
def test_neighbours_full_of_nan_change_no_bit(mine: Request):
    """A NaN adapter in a trained head and NaN hidden states surround it in one chunk."""
    adapters = adapters_of(REAL)
    adapters = adapters._replace(a=adapters.a.at[0].set(jnp.nan), b=adapters.b.at[0].set(jnp.nan))
    others = (Request(40, 0, (60,)), Request(41, 3, (300,), "gspo", poison=np.nan))
    beside = bits_of(mine, others, [1, 0, 4], adapters=adapters)
    assert_equal_bits(bits_of(mine, [], [0]), beside)


@pytest.mark.acceptance("S5")
def test_an_earlier_batchs_gradient_slots_change_no_bit():
    clean = bits_of(MINE, [], [0], gradient_slots=stale_gradient_slots(REAL, 0.0))
    assert_equal_bits(
        clean, bits_of(MINE, [], [0], gradient_slots=stale_gradient_slots(REAL, np.nan))
    )
