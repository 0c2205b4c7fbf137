"""Changes that a request makes to logits before a token is drawn: biases and penalties.

They are rows of arrays of fixed width, like all options. The returned logprobs are those of the
logits before the changes.

Dimension key: B decode slots, V vocabulary, W biases per row, L most drawn tokens per row,
U steps per dispatch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tuneserve_engine.backend.base import SamplingRequest
from tuneserve_engine.backend.jax.sampling.adapter_slots import Scalar
from tuneserve_engine.core.shapes import MAX_LOGIT_BIASES

_NO_TOKEN = np.iinfo(np.int32).max
"""The id of an unused place: a scatter drops it. A negative one would count from the end."""

_AnyArray = Array | np.ndarray[Any, np.dtype[Any]]


class LogitEdits(NamedTuple):
    """The changes to the logits of each row."""

    ids: _AnyArray  # [B, W] int32 the ids that have a bias, each once
    bias: _AnyArray  # [B, W] float32
    presence: _AnyArray  # [B] float32, 0 = no penalty
    frequency: _AnyArray  # [B] float32, 0 = no penalty
    drawn: _AnyArray  # [B, L] int32 the tokens drawn so far, by step; later places are ignored
    asked: Scalar  # bool: whether any row is changed


def no_edits(slots: int, length: int) -> LogitEdits:
    """Return rows that change nothing, for sequences of up to ``length`` drawn tokens."""
    return LogitEdits(
        ids=np.full((slots, MAX_LOGIT_BIASES), _NO_TOKEN, np.int32),
        bias=np.zeros((slots, MAX_LOGIT_BIASES), np.float32),
        presence=np.zeros(slots, np.float32),
        frequency=np.zeros(slots, np.float32),
        drawn=np.full((slots, length), _NO_TOKEN, np.int32),
        asked=np.bool_(False),
    )


class SlotEdits:
    """The changes of all decode slots, in host arrays.

    ``put`` puts host arrays on the device: slots without any change are sent only once.
    """

    def __init__(self, edits: LogitEdits, put: Callable[[LogitEdits], LogitEdits]) -> None:
        self._edits = edits
        self._put = put
        self._nothing: LogitEdits | None = None
        self._asking: set[int] = set()

    @property
    def arrays(self) -> LogitEdits:
        """The changes, as a program takes them."""
        if self._asking:
            return self._edits._replace(asked=np.bool_(True))
        if self._nothing is None:
            self._nothing = self._put(no_edits(*self._edits.drawn.shape))
        return self._nothing

    def start(self, slot: int, request: SamplingRequest) -> None:
        """Set the slot to what the request asks for."""
        edits, count = self._edits, len(request.logit_bias)
        edits.ids[slot] = _NO_TOKEN
        edits.ids[slot, :count] = list(request.logit_bias)
        edits.bias[slot, :count] = list(request.logit_bias.values())
        edits.presence[slot] = request.presence_penalty
        edits.frequency[slot] = request.frequency_penalty
        if count or request.presence_penalty or request.frequency_penalty:
            self._asking.add(slot)

    def extend(self, slot: int, step: int, tokens: _AnyArray) -> None:
        """Note the tokens that the slot drew from number ``step`` on."""
        if slot in self._asking:
            self._edits.drawn[slot, step : step + len(tokens)] = tokens

    def end(self, slot: int) -> None:
        """Forget what the slot asks for."""
        self._asking.discard(slot)
        self._edits.ids[slot] = _NO_TOKEN
        self._edits.presence[slot] = self._edits.frequency[slot] = 0.0


def edited(
    logits: Float[Array, "B V"],
    edits: LogitEdits,
    step: Int[Array, " B"],
    recent: Int[Array, "B U"],
) -> Float[Array, "B V"]:
    """Return the logits with biases and penalties. A row that asks for no change keeps its bits.

    Penalties count the first ``step`` tokens of ``edits.drawn``, and those of ``recent``.
    """
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

    def changed() -> Array:
        place = jnp.arange(edits.drawn.shape[1], dtype=jnp.int32)[None, :]
        before = jnp.where(place < step[:, None], jnp.asarray(edits.drawn), _NO_TOKEN)
        drawn = jnp.concatenate([before, recent], axis=1)
        # Integers: floats would add in another order each time.
        counts = jnp.zeros(logits.shape, jnp.int32).at[row, drawn].add(1, mode="drop")
        presence, frequency = jnp.asarray(edits.presence), jnp.asarray(edits.frequency)
        penalty = frequency[:, None] * counts.astype(jnp.float32)
        penalty += presence[:, None] * (counts > 0).astype(jnp.float32)
        result: Array = (logits - penalty).at[row, edits.ids].add(edits.bias, mode="drop")
        return result

    with jax.named_scope("logit_edits"):
        chosen: Array = jax.lax.cond(jnp.asarray(edits.asked), changed, lambda: logits)
    return chosen


def no_recent(slots: int, steps: int) -> Int[Array, "B U"]:
    """Return the tokens of a dispatch of so many steps that has drawn none yet."""
    return jnp.full((slots, steps), _NO_TOKEN, jnp.int32)
