"""Samples of which some have a grammar: their tokens, and those of their neighbours."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.backend.jax.sampling.test_logit_edits import scored
from tests.engine.backend.jax.sampling.test_sampler import (
    COMPANY,
    DECODE_SLOTS,
    NAN,
    assert_same_bits,
    model,
    programs,
    request,
    sampler,
)
from tests.support.small_tokenizer import CHARACTERS
from tuneserve_engine.backend.base import SampledSequence, SamplingRequest
from tuneserve_engine.backend.jax.sampling import decode_slots
from tuneserve_engine.backend.jax.sampling.sampler import JaxSampler
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.grammar import Grammar

__all__ = ["model", "programs", "sampler"]

END = 66
FORM = r"[a-f]{2}-([0-9]{1,3}|xyz)(,[A-C])*"


def formed(
    form: str = FORM, length: int = 5, *, kind: Any = "regex", **options: Any
) -> SamplingRequest:
    defaults = {"max_tokens": 40, "stop_tokens": frozenset({END})}
    return request(length, grammar=Grammar(kind, form), **(defaults | options))


def text(drawn: SampledSequence) -> str:
    """The text without the end of sequence."""
    tokens = drawn.tokens.tolist()
    assert (tokens[-1] == END) == (drawn.stop_reason == "stop")
    return "".join(CHARACTERS[token] for token in tokens if token != END)


def steps_of(sampler: JaxSampler, *asked: SamplingRequest) -> int:
    """The steps of all dispatches."""
    before = sampler.counts.slot_steps
    sampler.sample(asked)
    return (sampler.counts.slot_steps - before) // DECODE_SLOTS


@pytest.mark.parametrize("snapshot_id", [None, "rank 4"])
@pytest.mark.parametrize("temperature", [0.0, 1e-38, 0.7, 1.0, 1e30])
def test_every_text_has_its_form(
    sampler: JaxSampler, snapshot_id: str | None, temperature: float
) -> None:
    asked = formed(snapshot_id=snapshot_id, temperature=temperature, num_samples=8)
    (result,) = sampler.sample([asked])
    texts = [text(each) for each in result.sequences if each.stop_reason == "stop"]
    assert all(re.fullmatch(FORM, each) for each in texts)
    assert texts or not temperature


def test_a_greedy_sample_takes_the_most_likely_allowed_token(sampler: JaxSampler) -> None:
    """By NumPy, from the logits that another program computes for a prompt."""
    places = ["abcdef", "abcdef", "-", "0123456789", "0123456789"]
    asked = formed("[a-f]{2}-[0-9]{2}", temperature=0.0)
    (drawn,) = sampler.sample([asked])[0].sequences
    logprobs = scored(sampler, replace(asked, grammar=None), drawn)
    for token, logits, allowed in zip(drawn.tokens, logprobs, places, strict=False):
        ids = [CHARACTERS.index(each) for each in allowed]
        assert token == ids[int(np.argmax(logits[ids]))]
    assert drawn.tokens[5:].tolist() == [END]


def test_logprobs_are_those_of_all_tokens(sampler: JaxSampler) -> None:
    asked = formed(temperature=1.0, num_samples=3, topk_sample=2)
    for drawn in sampler.sample([asked])[0].sequences:
        logprobs = scored(sampler, replace(asked, grammar=None), drawn)
        mine = logprobs[np.arange(len(drawn.tokens)), drawn.tokens]
        np.testing.assert_allclose(drawn.logprobs, mine, atol=1e-4)
        assert drawn.topk is not None
        best = np.sort(logprobs, axis=1)[:, :-3:-1]
        np.testing.assert_allclose(drawn.topk.logprobs, best, atol=1e-4)


@pytest.mark.parametrize("count", [1, 5])
def test_neighbours_keep_their_bits(sampler: JaxSampler, count: int) -> None:
    """With and without a grammar, whatever runs beside them."""
    free, mine = list(COMPANY), [formed(seed=7, num_samples=count), formed("[xyz]*", seed=8)]
    alone = [sampler.sample([each])[0] for each in (*free, *mine)]
    for got, want in zip(sampler.sample([*free, *mine]), alone, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_steps_of_a_dispatch_do_not_matter(
    sampler: JaxSampler, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    options: dict[str, Any] = {"temperature": temperature, "frequency_penalty": 1.0}
    asked = [formed(num_samples=3, seed=3, **options), formed("[a-z ]*", seed=4, **options)]
    found, steps = [], []
    for most in (1, 2, 4):
        monkeypatch.setattr(decode_slots, "_next_pace", lambda _, __, most=most: most)
        before = sampler.counts.slot_steps
        found.append(sampler.sample(asked))
        steps.append(sampler.counts.slot_steps - before)
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            assert_same_bits(got, want)
    assert steps[0] < steps[2]


def test_a_form_that_takes_whatever_is_drawn_costs_no_step(sampler: JaxSampler) -> None:
    anything = r"[\s\S]*"
    free = request(5, max_tokens=40, stop_tokens=frozenset({END}), num_samples=4)
    (plain,), (found,) = sampler.sample([free]), sampler.sample([formed(anything, num_samples=4)])
    assert_same_bits(found, plain)
    assert steps_of(sampler, formed(anything, num_samples=4)) == steps_of(sampler, free)


def test_a_form_that_the_model_does_not_like_costs_few_steps(sampler: JaxSampler) -> None:
    """One step per token in the end; free draws after the first of a dispatch are in vain."""
    asked = formed("(q_){12}", seed=5)
    (result,) = sampler.sample([asked])
    assert len(result.sequences[0].tokens) == 25
    assert steps_of(sampler, asked) < 2 * 25


def test_a_neighbour_without_a_grammar_still_gets_several_steps_at_once(
    sampler: JaxSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    decode = sampler._programs.decode

    def counted(*args: Any) -> Any:
        calls.append(int(args[-1].steps))
        return decode(*args)

    monkeypatch.setattr(sampler._programs, "decode", counted)
    free = request(4, num_samples=3, max_tokens=40)
    sampler.sample([free, formed("(q_){12}", seed=5)])
    while_four = calls[: 40 // 4]
    assert min(while_four) >= 3
    assert calls[-1] < 3, "alone, the form gets few"


def test_a_text_that_is_not_whole_ends_at_its_length(sampler: JaxSampler) -> None:
    (drawn,) = sampler.sample([formed("a{30}", max_tokens=9)])[0].sequences
    assert (text(drawn), drawn.stop_reason) == ("a" * 9, "length")
    (drawn,) = sampler.sample([formed("a{8}", max_tokens=9)])[0].sequences
    assert (text(drawn), drawn.stop_reason) == ("a" * 8, "stop")


def test_the_form_wins_over_biases_and_penalties(sampler: JaxSampler) -> None:
    ids = [CHARACTERS.index(each) for each in "ab"]
    bias = {ids[0]: -100.0, CHARACTERS.index("z"): 100.0}
    options: dict[str, Any] = {"logit_bias": bias, "presence_penalty": 2.0}
    for temperature in (0.0, 1.0):
        asked = formed("a{3}[ab]{3}", temperature=temperature, **options)
        (drawn,) = sampler.sample([asked])[0].sequences
        assert text(drawn) == "aaabbb"


def test_a_form_in_which_the_text_cannot_go_on_fails_alone(sampler: JaxSampler) -> None:
    endless = '{"$defs": {"n": {"$ref": "#/$defs/n"}}, "type": "array", "minItems": 1, '
    endless += '"items": {"$ref": "#/$defs/n"}}'
    free = request(5, max_tokens=30, num_samples=2)
    asked = {
        "free": free,
        "bad": formed(endless, kind="json_schema", num_samples=6),
        "good": formed(seed=2),
    }
    finished = sampler.sample_until(asked, lambda: False).finished
    assert isinstance(finished["bad"], UserError)
    assert "cannot go on" in str(finished["bad"])
    for name in ("free", "good"):
        result: Any = finished[name]
        assert_same_bits(result, sampler.sample([asked[name]])[0])
    assert sampler._cache.pool.room == sampler._pages - 1 or not sampler._running


def test_a_form_that_cannot_be_compiled_fails_before_anything_is_sampled(
    sampler: JaxSampler,
) -> None:
    before = sampler.counts.prompt_tokens_prefilled
    asked = {"bad": formed("((")}
    finished = sampler.sample_until(asked, lambda: False).finished
    assert "unclosed group" in str(finished["bad"])
    assert sampler.counts.prompt_tokens_prefilled == before


def test_weights_that_give_no_number_end_with_none(sampler: JaxSampler) -> None:
    """The worker refuses such results."""
    (result,) = sampler.sample([formed(snapshot_id=NAN, max_tokens=5)])
    assert not np.isfinite(result.sequences[0].logprobs).any()
