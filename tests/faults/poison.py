"""Requests that must fail for one reason each, and must leave no trace."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.adapter import AdamwParams, BaseModelInfo
from tuneserve_engine.core.errors import Category
from tuneserve_engine.core.jobs import JobKind, OptimStep, encode

BROKEN = 57
"""A token on which the device fails, in the tests' backends."""

TOKENS, TARGETS = [1, 2, 3, 4], [2, 3, 4, 5]
MANY = [32, 7, 17, 44, 46, 39, 10, 24, 5, 2, 0, 7, 23, 46, 30, 20]
UNLIKELY = [7, 40, 30, 19, 33, 40, 21, 47, 26, 13, 15, 32, 32, 1, 33, 11]
"""Tokens of different kinds, whose gradients do not add up. The fake device's logprobs are -1."""


@dataclass(frozen=True)
class Poison:
    """A bad request. ``error`` is a part of the error message."""

    name: str
    payload: bytes
    error: str
    category: Category = "user"
    kind: JobKind = JobKind.FORWARD_BACKWARD


@dataclass(frozen=True)
class Data:
    """One datum as a client may send it. ``columns`` are float inputs of the loss."""

    tokens: Sequence[int]
    targets: Sequence[int]
    columns: Mapping[str, Sequence[float]]


def datum(
    tokens: Sequence[int] = TOKENS, targets: Sequence[int] = TARGETS, **columns: Sequence[float]
) -> Data:
    return Data(tokens, targets, columns)


def policy(**columns: Sequence[float]) -> Data:
    """A datum for a policy loss."""
    return datum(**{"logprobs": [-1.0] * 4, "advantages": [1.0] * 4, **columns})


def body(*data: Data, loss: str = "cross_entropy", **config: float) -> bytes:
    request = wire.ForwardBackwardRequest(loss_fn=loss, loss_fn_config=config)
    for each in data:
        added = request.data.add()
        added.model_input.add().encoded_text.tokens = np.array(each.tokens, "<i4").tobytes()
        target = added.loss_fn_inputs["target_tokens"]
        target.dense, target.dtype = np.array(each.targets, "<i8").tobytes(), wire.DTYPE_INT64
        for name, values in each.columns.items():
            column = added.loss_fn_inputs[name]
            column.dense, column.dtype = np.array(values, "<f4").tobytes(), wire.DTYPE_FLOAT32
    return request.SerializeToString()


def corpus(info: BaseModelInfo, too_heavy: Sequence[int]) -> list[Poison]:
    """The bad requests. ``too_heavy`` are tokens of a datum that never fits on the device."""
    return [
        *_numbers(),
        *_tokens(info),
        *_forms(),
        *_steps(),
        # It follows a good datum, whose gradient must be dropped too.
        Poison(
            "no memory",
            body(datum(), datum(too_heavy, [1] * len(too_heavy))),
            "the device has no memory for this forward_backward",
        ),
        Poison(
            "a failing device",
            body(datum(), datum([BROKEN] * 20, [1] * 20)),
            "internal error while running forward_backward",
            "server",
        ),
    ]


def _numbers() -> list[Poison]:
    importance = "importance_sampling"
    return [
        Poison(
            "an advantage of NaN",
            body(policy(advantages=[1, math.nan, 1, 1]), loss=importance),
            "data[0].advantages is nan at position 1",
        ),
        Poison(
            "an infinite advantage",
            body(policy(), policy(advantages=[1, 1, 1, math.inf]), loss="ppo"),
            "data[1].advantages is inf at position 3",
        ),
        Poison(
            "an infinite logprob",
            body(policy(logprobs=[-math.inf, 0, 0, 0]), loss=importance),
            "data[0].logprobs is -inf at position 0",
        ),
        Poison(
            "a weight of NaN",
            body(datum(weights=[1, 1, math.nan, 1])),
            "data[0].weights is nan at position 2",
        ),
        Poison(
            "weights whose sum overflows",
            body(datum(), datum(weights=[3e38] * 4)),
            "the loss or its gradient is not finite; nothing was accumulated",
        ),
        Poison(
            "a loss that overflows",
            body(datum(MANY, UNLIKELY, weights=[1e38] * 16)),
            "the loss or its gradient is not finite; nothing was accumulated",
        ),
        Poison(
            "advantages whose sum overflows",
            body(policy(), policy(advantages=[3e38] * 4, logprobs=[-30.0] * 4), loss=importance),
            "the loss or its gradient is not finite; nothing was accumulated",
        ),
    ]


def _tokens(info: BaseModelInfo) -> list[Poison]:
    vocabulary, longest = info.vocab_size, info.context_length
    long = [1] * (longest + 1)
    return [
        Poison(
            "a token out of the vocabulary",
            body(datum([1, 2, vocabulary, 4])),
            f"data[0].model_input has token {vocabulary} at position 2",
        ),
        Poison("a negative token", body(datum([-1, 2, 3, 4])), "has token -1 at position 0"),
        Poison(
            "a target out of the vocabulary",
            body(datum(targets=[2, 3, 4, vocabulary])),
            f"data[0].target_tokens has token {vocabulary} at position 3",
        ),
        Poison("too many tokens", body(datum(long, long)), f"has {len(long)} tokens"),
        Poison("no tokens", body(datum([], [])), "data[0].model_input has 0 tokens"),
    ]


def _forms() -> list[Poison]:
    return [
        Poison("no data", body(), "data has 0 datums"),
        Poison("a target too few", body(datum(targets=[2, 3, 4])), "has shape [3] for 4 input"),
        Poison("a weight too many", body(datum(weights=[1.0] * 5)), "weights has shape [5]"),
        Poison(
            "an advantage too few",
            body(policy(advantages=[1.0] * 3), loss="ppo"),
            "advantages has shape [3] for 4 input tokens",
        ),
        Poison("no advantages", body(datum(), loss="ppo"), "lacks logprobs, advantages"),
        Poison("an unknown loss", body(datum(), loss="no_such_loss"), "'no_such_loss' is not"),
        Poison(
            "an unknown setting of a loss",
            body(policy(), loss="ppo", temperature=1.0),
            "'temperature' is unknown to ppo",
        ),
        Poison(
            "an infinite setting of a loss",
            body(policy(), loss="dro", beta=math.inf),
            "loss_fn_config['beta'] is inf",
        ),
        Poison("no message", b"\xff" * 9, "is no ForwardBackwardRequest message"),
    ]


def _steps() -> list[Poison]:
    return [
        Poison(name, encode(OptimStep(params)), error, kind=JobKind.OPTIM_STEP)
        for name, params, error in (
            ("a rate of NaN", AdamwParams(learning_rate=math.nan), "learning_rate is nan"),
            ("an infinite eps", AdamwParams(eps=math.inf), "eps is inf"),
            ("a decay that is no float32", AdamwParams(weight_decay=1e39), "weight_decay is 1e+39"),
            ("a beta above one", AdamwParams(beta1=1.5), "beta1 is 1.5"),
            (
                "a rate and a decay whose product overflows",
                AdamwParams(learning_rate=1e20, weight_decay=1e20),
                "learning_rate is 1e+20 and weight_decay 1e+20",
            ),
            ("a step that overflows", AdamwParams(learning_rate=3e38), "learning_rate is 3e+38"),
        )
    ]
