"""In the shipped shapes, neighbours and place change no bit of a request either.

A device chooses its kernels by shape, so results on toy shapes prove nothing about these.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import Row
from tests.support.decoders import random_decoder
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.jax.adapters.arrays import (
    TrainingAdapter,
    new_state,
    restored_adapter,
    target_shapes,
)
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.training.trainer import Trainer
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.shapes import StaticShapes

CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=8192,
    hidden=512,
    layers=2,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate=1536,
    context_length=1024,
    qk_norm=True,
)
STATIC_SHAPES = StaticShapes(CONFIG.context_length)
RANK = 8
MINE, OTHERS = 0, 31


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    model = random_decoder(CONFIG)
    assert (
        (model.block, model.chunk_blocks)
        == (64, 4)
        == (STATIC_SHAPES.block, STATIC_SHAPES.chunk // 64)
    )
    return Trainer(ProgramRegistry(), model, STATIC_SHAPES)


def adapter_of(seed: int) -> TrainingAdapter:
    shapes, config = target_shapes(CONFIG), AdapterConfig(RANK, 32.0, seed)
    random = np.random.default_rng(seed)
    weights = {
        name: x if name.endswith("A") else 0.02 * random.standard_normal(x.shape, np.float32)
        for name, x in new_state(config, shapes).weights.items()
    }
    return restored_adapter(AdapterState(config, weights), shapes, RANK)


def datum(seed: int, length: int, loss: str = "cross_entropy") -> Row:
    random = np.random.default_rng(seed)
    tokens, targets = random.integers(0, CONFIG.vocab_size, (2, length)).tolist()
    inputs = {
        "old_logprobs": random.normal(-9, 0.1, length).tolist(),
        "advantages": random.standard_normal(length).tolist(),
    }
    return Row(tokens, targets, loss, random.normal(1, 0.5, length).tolist(), inputs)


ROWS = (datum(1, 100), datum(2, 70, "importance_sampling"))  # three blocks
Got = tuple[list[bytes], dict[str, bytes]]


@pytest.fixture(scope="module")
def train(
    trainer: Trainer, micro_batch_of: Callable[..., Any], batch_of: Callable[..., Any]
) -> Callable[..., Got]:
    """``train(before, after)``: logprobs, loss and gradient of the request, between others."""

    def run(before: list[Row], after: list[Row]) -> Got:
        place, count = len(before), len(before) + 1 + len(after)
        rows = [[row] for row in before] + [list(ROWS)] + [[row] for row in after]
        micro_batch = micro_batch_of(
            *((i, *each) for i, each in enumerate(rows)), static_shapes=STATIC_SHAPES
        )
        seeds = [MINE if i == place else 1 + i for i in range(count)]
        adapters = [adapter_of(seed) for seed in seeds]
        result = trainer.run_batch(batch_of([str(s) for s in seeds], [micro_batch]), adapters)
        assert all(result.finite)
        mine = np.repeat(micro_batch.block_request == place, STATIC_SHAPES.block) & (
            micro_batch.segment_ids >= 0
        )
        assert mine.sum() == 170
        (out,) = result.outputs
        gradient = {
            f"{name}.{side}": np.asarray(x)
            for side, arrays in zip("AB", adapters[place].accumulator, strict=True)
            for name, x in arrays.items()
        }
        assert all(x.any() for x in gradient.values())
        numbers = [out.logprobs[mine].tobytes(), out.loss[mine].tobytes()]
        return numbers, {name: x.tobytes() for name, x in gradient.items()}

    return run


@pytest.fixture(scope="module")
def alone(train: Callable[..., Got]) -> Got:
    return train([], [])


def test_after_three_blocks_of_another_a_request_has_the_same_bits_as_alone(
    train: Callable[..., Got], alone: Got
) -> None:
    """Its first block ends one chunk, and the rest starts the next."""
    assert train([datum(3, 150)], []) == alone


def test_among_31_others_a_request_has_the_same_bits_as_alone(
    train: Callable[..., Got], alone: Got
) -> None:
    others = [datum(10 + i, 30 + 7 * i % 60) for i in range(OTHERS)]
    assert train(others[:17], others[17:]) == alone
