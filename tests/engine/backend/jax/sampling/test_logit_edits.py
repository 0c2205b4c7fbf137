"""Biases and penalties: the logits against NumPy, and whole samples against scored ones."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.engine.backend.jax.sampling.test_sampler import (
    CONFIG,
    model,
    programs,
    request,
    sampler,
)
from tuneserve_engine.backend.base import SampledSequence, SamplingRequest
from tuneserve_engine.backend.jax.sampling.logit_edits import (
    SlotEdits,
    edited,
    no_edits,
    no_recent,
)
from tuneserve_engine.backend.jax.sampling.sampler import JaxSampler

__all__ = ["model", "programs", "sampler"]

VOCAB, LENGTH = 40, 12
LOGITS = np.random.default_rng(0).normal(scale=2.0, size=(3, VOCAB)).astype(np.float32)


def some(*, logit_bias: dict[int, float] | None = None, **penalties: float) -> SamplingRequest:
    return request(3, logit_bias=logit_bias or {}, **penalties)


def slots(count: int = 3) -> SlotEdits:
    return SlotEdits(no_edits(count, LENGTH), lambda edits: edits)


def changed(edits: SlotEdits, *step: int, recent: Any = None) -> Any:
    recent = no_recent(3, 4) if recent is None else recent
    return np.asarray(jax.jit(edited)(LOGITS, edits.arrays, np.array(step, np.int32), recent))


def test_each_row_gets_its_biases_and_the_penalties_of_its_drawn_tokens() -> None:
    edits = slots()
    edits.start(0, some(logit_bias={0: 1.5, 39: -100.0}))
    edits.start(1, some(presence_penalty=0.75, frequency_penalty=0.5))
    edits.extend(1, 0, np.array([7, 9, 7, 7]))
    edits.start(2, some(logit_bias={9: 2.0}, frequency_penalty=-1.0))
    edits.extend(2, 0, np.array([9, 39, 9, 0]))
    want = LOGITS.astype(np.float64)
    want[0, 0] += 1.5
    want[0, 39] -= 100
    want[1, 7] -= 0.75 + 3 * 0.5
    want[1, 9] -= 0.75 + 0.5
    want[2, 9] += 2 + 2
    want[2, [0, 39]] += 1
    np.testing.assert_allclose(changed(edits, 4, 4, 4), want, atol=1e-5)


def test_only_tokens_before_the_step_count() -> None:
    edits = slots()
    edits.start(1, some(presence_penalty=2.0))
    edits.extend(1, 0, np.array([5, 6, 7, 8]))
    places = np.nonzero(changed(edits, 2, 2, 2) != LOGITS)
    assert [each.tolist() for each in places] == [[1, 1], [5, 6]]


def test_the_next_request_of_a_slot_inherits_nothing() -> None:
    edits = slots()
    edits.start(1, some(logit_bias={n: 9.0 for n in range(30)}, frequency_penalty=2.0))
    edits.extend(1, 0, np.arange(8))
    edits.end(1)
    assert not edits.arrays.asked
    edits.start(1, some())
    edits.start(2, some(logit_bias={3: 1.0}))
    got = changed(edits, 8, 8, 8)
    np.testing.assert_array_equal(got[:2].view(np.int32), LOGITS[:2].view(np.int32))
    assert got[2, 3] == LOGITS[2, 3] + 1


def test_slots_without_changes_are_put_on_the_device_once() -> None:
    sent = []
    edits = SlotEdits(no_edits(2, LENGTH), lambda each: sent.append(each) or each)  # type: ignore[func-returns-value]
    assert edits.arrays is edits.arrays and len(sent) == 1
    edits.start(0, some(presence_penalty=1.0))
    assert edits.arrays.asked and len(sent) == 1


def test_tokens_of_the_same_dispatch_count_too() -> None:
    edits = slots()
    edits.start(0, some(frequency_penalty=1.0))
    edits.extend(0, 0, np.array([4, 5]))
    recent = no_recent(3, 4).at[:, 0].set(4)
    got = changed(edits, 2, 2, 2, recent=recent)
    want = LOGITS.copy()
    want[0, 4] -= 2
    want[0, 5] -= 1
    np.testing.assert_array_equal(got, want)


# --- whole samples -------------------------------------------------------------------------------


def scored(sampler: JaxSampler, asked: SamplingRequest, drawn: SampledSequence) -> Any:
    """The logprob of every id of the vocabulary at each place of the drawn tokens [S, V]: those of
    a prompt, which another program computes.
    """
    prompt = np.concatenate([asked.prompt, drawn.tokens]).astype(np.int32)
    halves = []
    for ids in (np.arange(40), np.arange(40, CONFIG.vocab_size)):
        targets = np.tile(ids.astype(np.int32), (len(prompt) - 1, 1))
        scoring = SamplingRequest(prompt, asked.snapshot_id, 1, 1, 0, targets=targets)
        result = sampler.sample([scoring])[0].target_logprobs
        assert result is not None
        halves.append(result[len(asked.prompt) - 1 :])
    return np.concatenate(halves, axis=1)


def drawable(asked: SamplingRequest, logprobs: Any, drawn: SampledSequence) -> Any:
    """The logits from which each token was drawn, by NumPy."""
    logits = logprobs.astype(np.float64)
    for token, bias in asked.logit_bias.items():
        logits[:, token] += bias
    for step in range(len(logits)):
        for token, count in zip(*np.unique(drawn.tokens[:step], return_counts=True), strict=True):
            logits[step, token] -= asked.presence_penalty + count * asked.frequency_penalty
    return logits


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {11: 2.5, 12: 2.0, 13: -3.0}},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.0},
        {"frequency_penalty": -1.0},
        {"logit_bias": {5: 6.0, 50: 5.5}, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    ],
)
@pytest.mark.parametrize("snapshot_id", [None, "rank 4"])
def test_a_greedy_sample_takes_the_largest_changed_logit_and_reports_its_own_logprob(
    sampler: JaxSampler, options: dict[str, Any], snapshot_id: str | None
) -> None:
    asked = request(4, snapshot_id=snapshot_id, temperature=0.0, max_tokens=22, **options)
    (drawn,) = sampler.sample([asked])[0].sequences
    logprobs = scored(sampler, asked, drawn)
    best = drawable(asked, logprobs, drawn).argmax(axis=1)
    assert drawn.tokens.tolist() == best.tolist()
    plain = request(4, snapshot_id=snapshot_id, temperature=0.0, max_tokens=22)
    assert drawn.tokens.tolist() != sampler.sample([plain])[0].sequences[0].tokens.tolist()
    np.testing.assert_allclose(drawn.logprobs, logprobs[np.arange(22), best], atol=1e-4)


def test_draws_follow_the_changed_distribution(sampler: JaxSampler) -> None:
    bias, count = {9: 2.5, 20: 1.5, 21: -1.0}, 3000
    asked = request(4, num_samples=count, max_tokens=1, logit_bias=bias, seed=5)
    drawn = sampler.sample([asked])[0].sequences
    logprobs = scored(sampler, asked, drawn[0])
    seen = np.bincount([int(each.tokens[0]) for each in drawn], minlength=CONFIG.vocab_size)

    def is_expected(logits: Any) -> bool:
        exact = np.exp(logits - logits.max())
        exact /= exact.sum()
        error = np.sqrt(exact * (1 - exact) / count)
        return bool((np.abs(seen / count - exact) < 5 * error + 1e-3).all())

    assert is_expected(drawable(asked, logprobs, drawn[0])[0])
    assert not is_expected(logprobs[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_largest_bias_forces_a_token_and_the_least_bans_it(
    sampler: JaxSampler, temperature: float
) -> None:
    options: dict[str, Any] = {"temperature": temperature, "num_samples": 20, "max_tokens": 8}
    forced = request(4, logit_bias={9: 100.0}, **options)
    drawn = sampler.sample([forced])[0].sequences
    assert {token for each in drawn for token in each.tokens.tolist()} == {9}
    others = dict.fromkeys(set(range(CONFIG.vocab_size)) - {9, 10}, -100.0)
    drawn = sampler.sample([request(4, logit_bias=others, **options)])[0].sequences
    assert {token for each in drawn for token in each.tokens.tolist()} <= {9, 10}
