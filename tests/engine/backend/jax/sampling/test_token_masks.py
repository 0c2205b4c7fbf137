"""Masked draws against NumPy, and the rows that have no mask."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneserve_engine.backend.jax.sampling import token_masks
from tuneserve_engine.backend.jax.sampling.grammars import GrammarMatcher
from tuneserve_engine.backend.jax.sampling.logits import REDRAWS, RowParams, draw, seed_halves
from tuneserve_engine.backend.jax.sampling.token_masks import (
    SlotMasks,
    TokenMasks,
    allowed,
    no_masks,
    redrawn,
)
from tuneserve_engine.core.shapes import mask_words

VOCAB, ROWS = 70, 3
random = np.random.default_rng(0)
LOGITS = random.normal(scale=2.0, size=(ROWS, VOCAB)).astype(np.float32)
_draw = jax.jit(draw, static_argnames="stream")
_redrawn = jax.jit(redrawn)


def packed(may: Any) -> Any:
    """The masks as words, bit by bit."""
    words = np.zeros((len(may), mask_words(VOCAB)), np.uint32)
    for row, tokens in enumerate(may):
        for token in np.flatnonzero(tokens):
            words[row, token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


def masks(may: Any) -> TokenMasks:
    return TokenMasks(packed(may), np.bool_(True))


def rows(temperature: float, seed: int, **options: Any) -> RowParams:
    """One seed, another sample index per row."""
    return RowParams(
        seed=np.tile(seed_halves(seed), (ROWS, 1)),
        sample=np.arange(ROWS, dtype=np.int32),
        temperature=np.full(ROWS, temperature, np.float32),
        top_k=np.full(ROWS, options.get("top_k", -1), np.int32),
        top_p=np.full(ROWS, options.get("top_p", 1.0), np.float32),
    )


STEP = np.array([0, 5, 9], np.int32)


@st.composite
def some_masks(draw: st.DrawFn) -> Any:
    """For each row, at least one token."""
    may = np.zeros((ROWS, VOCAB), bool)
    for row in range(ROWS):
        may[row, draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB))] = True
    return may


@settings(max_examples=30, deadline=None)
@given(may=some_masks())
def test_the_bits_of_a_mask_are_the_tokens_that_it_allows(may: Any) -> None:
    np.testing.assert_array_equal(allowed(packed(may), VOCAB), may)


@settings(max_examples=30, deadline=None)
@given(may=some_masks(), seed=st.integers(0, 2**63))
def test_a_greedy_row_takes_the_most_likely_of_the_allowed_tokens(may: Any, seed: int) -> None:
    options = rows(0.0, seed)
    found = _redrawn(_draw(LOGITS, STEP, options), LOGITS, STEP, options, masks(may))
    assert found.tolist() == np.where(may, LOGITS, -np.inf).argmax(axis=1).tolist()


@settings(max_examples=30, deadline=None)
@given(
    may=some_masks(),
    seed=st.integers(0, 2**63),
    temperature=st.sampled_from([1e-30, 0.5, 1.0, 1e30]),
    top_p=st.sampled_from([1.0, 0.5, 1e-9]),
    top_k=st.sampled_from([-1, 1, 3]),
)
def test_an_allowed_token_stays_and_another_is_drawn_from_the_allowed_logits_alone(
    may: Any, seed: int, temperature: float, top_p: float, top_k: int
) -> None:
    options = rows(temperature, seed, top_p=top_p, top_k=top_k)
    free = np.asarray(_draw(LOGITS, STEP, options))
    found = np.asarray(_redrawn(free, LOGITS, STEP, options, masks(may)))
    for row in range(ROWS):
        if may[row, free[row]]:
            assert found[row] == free[row]
            continue
        # The same draw from a vocabulary in which only these tokens have a finite logit.
        few = np.full_like(LOGITS, -np.inf)
        few[row, may[row]] = LOGITS[row, may[row]]
        assert found[row] == _draw(few, STEP, options, stream=REDRAWS)[row]
        assert may[row, found[row]]


def test_both_draws_together_have_the_distribution_of_the_allowed_tokens() -> None:
    """By NumPy: the softmax over them. Many samples of one seed, as a request has them."""
    count, may = 3000, np.zeros(VOCAB, bool)
    may[[3, 4, 9, 33, 69]] = True
    logits = np.tile(LOGITS[0], (count, 1))
    logits[:, 33] = logits.max() + 1  # so that many first draws are kept
    options = RowParams(
        seed=np.tile(seed_halves(11), (count, 1)),
        sample=np.arange(count, dtype=np.int32),
        temperature=np.ones(count, np.float32),
        top_k=np.full(count, -1, np.int32),
        top_p=np.ones(count, np.float32),
    )
    step = np.zeros(count, np.int32)
    words = np.tile(packed(may[None]), (count, 1))
    free = np.asarray(_draw(logits, step, options))
    drawn = _redrawn(free, logits, step, options, TokenMasks(words, np.bool_(True)))
    seen = np.bincount(np.asarray(drawn), minlength=VOCAB) / count
    exact = np.where(may, np.exp(logits[0].astype(np.float64)), 0)
    exact /= exact.sum()
    assert (np.abs(seen - exact) < 5 * np.sqrt(exact * (1 - exact) / count) + 1e-12).all()
    assert 0.2 < may[free].mean() < 0.9


def test_rows_without_a_mask_keep_their_tokens() -> None:
    options = rows(1.0, 5)
    free = _draw(LOGITS, STEP, options)
    may = np.ones((ROWS, VOCAB), bool)
    may[1] = False
    may[1, (int(free[1]) + 1) % VOCAB] = True
    found = _redrawn(free, LOGITS, STEP, options, masks(may)).tolist()
    assert [found[0], found[2]] == [int(free[0]), int(free[2])]
    assert found[1] == (int(free[1]) + 1) % VOCAB
    empty = TokenMasks(np.zeros_like(packed(may)), np.bool_(False))
    assert _redrawn(free, LOGITS, STEP, options, empty).tolist() == free.tolist()


class Counting(GrammarMatcher):
    """A matcher of one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def accept_token(self, token: int) -> bool:
        return token == self.token


def filled(matchers: Any, words: Any) -> None:
    for slot, each in matchers.items():
        words[slot] = packed(np.arange(VOCAB)[None] == each.token)[0]


def test_masks_follow_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[TokenMasks] = []
    monkeypatch.setattr(token_masks, "fill_masks", filled)
    slots = SlotMasks(ROWS, VOCAB, lambda each: sent.append(each) or each)  # type: ignore[func-returns-value]
    assert slots.arrays is slots.arrays and len(sent) == 1
    assert not slots.arrays.asked
    slots.start(0, None)
    assert slots.arrays is sent[0]
    slots.start(1, Counting(40))
    assert slots.arrays.asked
    assert [np.flatnonzero(each).size for each in allowed(slots.arrays.words, VOCAB)] == [70, 1, 70]
    assert (slots.accept_token(0, 5), slots.accept_token(1, 5), slots.accept_token(1, 40)) == (
        True,
        False,
        True,
    )
    slots.end(1)
    assert slots.arrays is sent[0] and len(sent) == 1
    slots.start(2, Counting(1))
    assert np.asarray(allowed(slots.arrays.words, VOCAB)).sum(axis=1).tolist() == [70, 70, 1]


def test_masks_of_nothing_allow_everything() -> None:
    nothing = no_masks(2, VOCAB)
    assert nothing.words.shape == (2, 3)
    assert np.asarray(allowed(nothing.words, VOCAB)).all()
