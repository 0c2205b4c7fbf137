"""The state of decode slots in host arrays, between the dispatches of the decode program.

Dimension key: B decode slots, U steps per dispatch, Q choices per position.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from tuneserve_engine.backend.jax.sampling.logit_edits import SlotEdits
from tuneserve_engine.backend.jax.sampling.logits import AnyArray, seed_halves
from tuneserve_engine.backend.jax.sampling.programs import (
    STEPS_PER_DISPATCH,
    DecodeState,
    Programs,
    TopTokens,
    no_rows,
    no_slots,
)
from tuneserve_engine.backend.jax.sampling.sequence import DecodedSequence
from tuneserve_engine.backend.jax.sampling.token_masks import SlotMasks
from tuneserve_engine.core.errors import EngineError, ServerError


class Drawn(NamedTuple):
    """The tokens of one dispatch, on the host; the places after its last step are undefined."""

    tokens: AnyArray  # [U, B] int32
    logprobs: AnyArray  # [U, B] float32
    top: TopTokens | None  # [U, B, Q]; None: not asked for


class DecodeSlots:
    """The state of every decode slot."""

    def __init__(self, programs: Programs, slots: int) -> None:
        self._state = no_slots(
            slots, programs.table_width, programs.context_length, programs.vocab_size
        )
        self._edits = SlotEdits(self._state.edits, programs.put)
        self._masks = SlotMasks(slots, programs.vocab_size, programs.put)
        self._pace: dict[int, int] = {}  # of slots with a grammar: the steps to ask for

    @property
    def table(self) -> AnyArray:
        """The pages [B, E] of each slot's sequence."""
        return self._state.table

    @property
    def adapter_slot(self) -> AnyArray:
        """The adapter slot [B] of each slot."""
        return self._state.adapter_slot

    def start(self, slot: int, sequence: DecodedSequence) -> None:
        """Start decoding a sequence whose prompt is prefilled."""
        request, rows = sequence.request, self._state.rows
        rows.seed[slot] = seed_halves(request.seed)
        rows.sample[slot] = sequence.sample
        rows.temperature[slot] = request.temperature
        rows.top_k[slot] = request.top_k
        rows.top_p[slot] = request.top_p
        self._edits.start(slot, request)
        self._masks.start(slot, None if sequence.grammar is None else sequence.grammar.begin())
        self._pace[slot] = STEPS_PER_DISPATCH
        self._state.tokens[slot] = request.prompt[-1]
        self._state.positions[slot] = sequence.context
        self._state.step[slot] = 0

    def before_dispatch(self, decoding: Collection[int], *, top: bool) -> DecodeState:
        """Return the state of a dispatch, in which these slots decode.

        Its steps are the mean of what the slots will probably use: all of them, or with a grammar
        about as many as last time. They change no token.
        """
        wanted = [self._pace[slot] for slot in decoding]
        return self._state._replace(
            top=np.bool_(top),
            edits=self._edits.arrays,
            masks=self._masks.arrays,
            steps=np.int32(round(sum(wanted) / len(wanted))),
        )

    def add_tokens(self, slot: int, sequence: DecodedSequence, drawn: Drawn, steps: int) -> int:
        """Add the slot's tokens of a dispatch to its sequence; return how many were added.

        Tokens after the end are left out, and with a grammar those from the first on that it does
        not allow: only the first step has a mask. If the grammar cannot go on, the sequence has
        failed.
        """
        tokens, k = drawn.tokens[:steps, slot].tolist(), sequence.request.topk_sample
        taken = 0
        for step, token in enumerate(tokens):
            logprob = float(drawn.logprobs[step, slot])
            try:
                # Without numbers no mask has an effect, and the worker refuses the result.
                if not np.isnan(logprob) and not self._masks.accept_token(slot, token):
                    break
            except EngineError as error:
                sequence.failure = error
                return taken
            taken += 1
            if sequence.push(token, logprob, _best(drawn.top, step, slot, k)):
                return taken
        if not taken:
            sequence.failure = ServerError("no token continues the form that was asked for")
            return taken
        self._edits.extend(slot, int(self._state.step[slot]), drawn.tokens[:taken, slot])
        self._state.tokens[slot] = sequence.tokens[-1]
        self._state.positions[slot] += taken
        self._state.step[slot] += taken
        if self._masks.has_grammar(slot):
            self._pace[slot] = _next_pace(steps, taken)
        return taken

    def end(self, slot: int) -> None:
        """Make the slot idle."""
        self._state.positions[slot] = -1
        self._state.table[slot] = 0
        self._edits.end(slot)
        self._masks.end(slot)
        for values, idle in zip(self._state.rows, no_rows(1), strict=True):
            values[slot] = idle[0]


def _next_pace(steps: int, taken: int) -> int:
    """Return the steps to ask for after a dispatch of which a grammar took so many tokens."""
    return min(2 * steps, STEPS_PER_DISPATCH) if taken == steps else taken


def _best(top: TopTokens | None, step: int, slot: int, k: int) -> tuple[AnyArray, AnyArray] | None:
    """Return ids and logprobs [k] of one token, or None if they were not asked for."""
    if top is None or not k:
        return None
    # Copies: a view would keep the arrays of all decode slots alive.
    return top.ids[step, slot, :k].copy(), top.logprobs[step, slot, :k].copy()
