"""Commands survive their payloads, and errors become rejections."""

from dataclasses import replace

import msgspec
import pytest

from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.errors import ServerError, UserError
from tuneserve_engine.core.jobs import (
    CreateModel,
    LoadWeights,
    OptimStep,
    Rejection,
    SampleCommand,
    SaveWeights,
    SparseTargets,
    decode,
    encode,
)
from tuneserve_engine.core.records import CheckpointKind, CheckpointRecord

CONFIG = AdapterConfig(8, 16.0, 1, options={"form": "core"})
CHECKPOINT = CheckpointRecord(
    "tinker://m/weights/a", "t", "m", CheckpointKind.TRAINING, "a", "f", "base", CONFIG, 5.0
)
COMMANDS = (
    CreateModel("base", CONFIG),
    OptimStep(AdamwParams(learning_rate=1e-3)),
    SaveWeights(CheckpointKind.TRAINING, "f", CHECKPOINT, age_recipients=("age1",)),
    LoadWeights("f", "tinker://m/weights/a", True, CONFIG),
    SampleCommand([5, 6], 2**63, target_sparse=SparseTargets([0, 1], [7]), stop_strings=[]),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_survives_its_payload(command: SampleCommand) -> None:
    assert decode(encode(command), type(command)) == command


@pytest.mark.parametrize("payload", [b"", b"\xc1", encode(COMMANDS[1])])
def test_another_payload_is_a_decode_error(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(payload, LoadWeights)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_command_for_scores_and_up_to_one_token_only_scores(max_tokens: int) -> None:
    plain = SampleCommand([5, 6], 1, max_tokens=max_tokens)
    assert not plain.only_scores
    for asks in (
        {"prompt_logprobs": True},
        {"topk_prompt_logprobs": 1},
        {"prompt_alt_tokens_k": 1},
        {"target_prompt_logprobs": []},
    ):
        assert replace(plain, **asks).only_scores
        assert not replace(plain, max_tokens=2, **asks).only_scores
        assert not replace(plain, max_tokens=None, **asks).only_scores


def test_a_rejection_has_the_errors_message_and_category() -> None:
    assert Rejection.from_error(UserError("too long")) == Rejection("too long", "user")
    full = ServerError("no memory")
    full.no_room = True
    assert Rejection.from_error(full) == Rejection("no memory", "server", no_room=True)
