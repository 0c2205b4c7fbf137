"""Training examples from plain Python and NumPy, and from texts.

>>> Datum([5, 6, 7], targets=[6, 7, 8], weights=[0, 1, 1])
Datum(3 tokens, target_tokens [3], weights [3])
>>> next_token_datum([5, 6, 7, 8], weights=[0, 0, 1, 1])
Datum(3 tokens, target_tokens [3], weights [3])
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from tuneserve_client.hints import hint

Array = np.ndarray[Any, Any]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
Message = Mapping[str, Any]
Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]

TARGETS = "target_tokens"
INPUTS = ("weights", "logprobs", "advantages", "sequence_ratio_mask", "sampled_mask")
"""The inputs that a loss of the server reads, beside the targets."""


class Encoder(Protocol):
    """The part of a tokenizer that is needed to make datums; ``Tokenizer`` implements it."""

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...

    def render(
        self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True, **options: Any
    ) -> str: ...


class Datum:
    """One training sequence: the tokens that the model reads, and the loss inputs per position.

    Position i of ``tokens`` predicts ``targets[i]``: targets are shifted already. ``inputs`` are
    per position, too: ``weights`` for cross_entropy (ones if left out), ``logprobs`` and
    ``advantages`` for policy losses. For K targets per position, targets and weights are [N, K].
    Raises ``TypeError`` for an input that no loss of the server reads. If your own loss needs
    others, add them to ``inputs`` afterwards.
    """

    tokens: IntArray
    inputs: dict[str, Array]

    def __init__(
        self,
        tokens: Tokens,
        targets: npt.ArrayLike,
        weights: npt.ArrayLike | None = None,
        **inputs: npt.ArrayLike,
    ) -> None:
        for name in inputs:
            if name not in INPUTS:
                raise TypeError(
                    f"Datum() has no input {name!r} (for a loss of your own, set "
                    f"datum.inputs[{name!r}]); {hint(name, ('tokens', 'targets', *INPUTS))}"
                )
        self.tokens = as_tokens(tokens)
        self.inputs = {TARGETS: _integers(TARGETS, targets, np.int64)}
        if weights is not None:
            inputs["weights"] = weights
        for name, values in inputs.items():
            self.inputs[name] = np.asarray(values, np.float32)

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        inputs = (f"{name} {list(array.shape)}" for name, array in self.inputs.items())
        return f"Datum({len(self)} tokens, {', '.join(inputs)})"

    @property
    def targets(self) -> Array:
        return self.inputs[TARGETS]

    @property
    def size_bytes(self) -> int:
        """The size of the datum's numbers in a request."""
        return 4 * len(self) + sum(array.nbytes for array in self.inputs.values())


def as_tokens(tokens: Tokens) -> IntArray:
    """Return token ids as int32. Raises ``TypeError`` for values other than integers."""
    return _integers("tokens", tokens, np.int32)


def _integers(name: str, values: npt.ArrayLike, dtype: type[np.integer[Any]]) -> Array:
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} are {array.dtype}; they must be token ids, which are integers")
    most = np.iinfo(dtype).max
    if array.size and not (0 <= array.min() and array.max() <= most):
        raise ValueError(f"{name} are {array.min()} to {array.max()}; token ids are 0 to {most}")
    return array.astype(dtype)


def next_token_datum(tokens: Tokens, weights: npt.ArrayLike | None = None) -> Datum:
    """Return a datum in which each token of the sequence is predicted from those before it.

    Each prediction has the weight of the predicted token; all weights default to 1.
    """
    ids = as_tokens(tokens)
    given = np.ones(len(ids), np.float32) if weights is None else np.asarray(weights, np.float32)
    if given.shape != ids.shape:
        raise ValueError(
            f"weights have shape {given.shape} for {len(ids)} tokens; give one weight per token"
        )
    return Datum(ids[:-1], ids[1:], given[1:])


def sft_datum(tokenizer: Encoder, prompt: str, completion: str, *, end: bool = True) -> Datum:
    """Return a datum that learns the completion and only reads the prompt.

    With ``end`` it also learns the end of sequence.
    """
    asked = tokenizer.encode(prompt)
    answered = tokenizer.encode(completion, special=False)
    if end and tokenizer.eos_token_id is not None and answered[-1:] != [tokenizer.eos_token_id]:
        answered.append(tokenizer.eos_token_id)
    weights = [0.0] * len(asked) + [1.0] * len(answered)
    return next_token_datum(asked + answered, weights)


def chat_datum(
    tokenizer: Encoder,
    messages: Sequence[Message],
    *,
    learn: Literal["last", "all"] = "last",
    **options: Any,
) -> Datum:
    """Return a datum that learns the assistant's last message, or all of its messages.

    The rest of the conversation is only read, and so is a message of the assistant that opens it:
    there is nothing that it answers. The base model's chat template, which gets ``options``,
    renders the conversation. Some templates render a message differently once others follow, for
    example because they leave out past reasoning. This function then raises ``ValueError``: learn
    only the last message of each conversation instead.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or (learn == "last" and turns[-1] != len(messages) - 1):
        raise ValueError("the last message is not the assistant's: there is nothing to learn")
    learnt = [turn for turn in (turns if learn == "all" else turns[-1:]) if turn > 0]
    if not learnt:
        raise ValueError("no message comes before the assistant's: there is nothing to answer")
    text = tokenizer.render(messages, add_generation_prompt=False, **options)
    spans = []
    for turn in learnt:
        before = tokenizer.render(messages[:turn], **options)
        upto = tokenizer.render(messages[: turn + 1], add_generation_prompt=False, **options)
        if not (upto.startswith(before) and text.startswith(upto)):
            raise ValueError(
                f"the chat template renders message {turn} differently when others follow it; "
                "use learn='last' and one datum per answer"
            )
        spans.append((len(before), len(upto.rstrip())))
    tokens, offsets = tokenizer.encode_with_offsets(text)
    return next_token_datum(tokens, [_is_in(spans, start, end) for start, end in offsets])


def _is_in(spans: Iterable[tuple[int, int]], start: int, end: int) -> float:
    return float(any(first <= start and start < last for first, last in spans) and end > start)
