"""Masks of the tokens that a row may draw next, as a request's grammar has it.

A token is drawn from all tokens first. If the mask excludes it, another is drawn from those that
the mask allows. The two draws together have the distribution of the allowed tokens. So a row whose
mask the host does not have yet may draw freely: if the grammar takes the token, it is the same.

Dimension key: B decode slots, V vocabulary, W words of a mask.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tuneserve_engine.backend.jax.sampling.adapter_slots import Scalar
from tuneserve_engine.backend.jax.sampling.grammars import GrammarMatcher, fill_masks
from tuneserve_engine.backend.jax.sampling.logits import REDRAWS, RowParams, draw
from tuneserve_engine.core.shapes import MASK_BITS, mask_words

_EVERY_TOKEN = np.int32(-1)

_AnyArray = Array | np.ndarray[Any, np.dtype[Any]]


class TokenMasks(NamedTuple):
    """The tokens that each row may draw first."""

    words: _AnyArray  # [B, W] int32: bit i of word w is token 32 * w + i
    asked: Scalar  # bool: whether any row excludes a token


def no_masks(slots: int, vocab: int) -> TokenMasks:
    """Return masks that allow every token."""
    words = np.full((slots, mask_words(vocab)), _EVERY_TOKEN, np.int32)
    return TokenMasks(words, asked=np.bool_(False))


class SlotMasks:
    """The grammars and masks of all decode slots, in host arrays.

    ``put`` puts host arrays on the device: masks that allow everything are sent only once.
    """

    def __init__(self, slots: int, vocab: int, put: Callable[[TokenMasks], TokenMasks]) -> None:
        self._masks = no_masks(slots, vocab)
        self._vocab = vocab
        self._put = put
        self._nothing: TokenMasks | None = None
        self._matchers: dict[int, GrammarMatcher] = {}

    @property
    def arrays(self) -> TokenMasks:
        """The masks for the next token of each slot, as a program takes them."""
        if self._matchers:
            fill_masks(self._matchers, self._masks.words)
            return self._masks._replace(asked=np.bool_(True))
        if self._nothing is None:
            self._nothing = self._put(no_masks(len(self._masks.words), self._vocab))
        return self._nothing

    def start(self, slot: int, matcher: GrammarMatcher | None) -> None:
        """Restrict the slot to what the matcher takes, from its beginning."""
        if matcher is not None:
            self._matchers[slot] = matcher

    def has_grammar(self, slot: int) -> bool:
        return slot in self._matchers

    def accept_token(self, slot: int, token: int) -> bool:
        """Continue the slot's grammar with the token; return False if it is no continuation."""
        matcher = self._matchers.get(slot)
        return matcher is None or matcher.accept_token(token)

    def end(self, slot: int) -> None:
        """Allow the slot every token."""
        if self._matchers.pop(slot, None) is not None:
            self._masks.words[slot] = _EVERY_TOKEN


def allowed(words: _AnyArray, vocab: int) -> Bool[Array, "B V"]:
    """Return which tokens the masks allow."""
    bits = jnp.asarray(words)[:, :, None] >> jnp.arange(MASK_BITS, dtype=jnp.int32)[None, None]
    return (bits & 1).reshape(len(words), -1)[:, :vocab] == 1


def redrawn(
    drawn: Int[Array, " B"],
    logits: Float[Array, "B V"],
    step: Int[Array, " B"],
    rows: RowParams,
    masks: TokenMasks,
) -> Int[Array, " B"]:
    """Return the drawn tokens, with another one where the mask excludes it.

    The other one depends on the row's seed, sample index, step, logits and mask alone.
    """

    def checked() -> Array:
        may = allowed(masks.words, logits.shape[1])
        is_allowed = jnp.take_along_axis(may, drawn[:, None], axis=1)[:, 0]

        def again() -> Array:
            others = draw(jnp.where(may, logits, -jnp.inf), step, rows, stream=REDRAWS)
            return jnp.where(is_allowed, drawn, others)

        kept: Array = jax.lax.cond(jnp.all(is_allowed), lambda: drawn, again)
        return kept

    with jax.named_scope("token_masks"):
        chosen: Array = jax.lax.cond(jnp.asarray(masks.asked), checked, lambda: drawn)
    return chosen
