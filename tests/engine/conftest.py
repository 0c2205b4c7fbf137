"""A random tiny base model on disk, a backend on it, and hand-made training batches."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.compiled import UNOPTIMISED
from tuneserve_engine.backend.base import LOSS_NAMES, MicroBatch, TrainBatch
from tuneserve_engine.core.shapes import StaticShapes, multiple_from

if TYPE_CHECKING:  # most tests here need no model, so the fixtures import what they use
    from tuneserve_engine.backend.jax.backend import JaxBackend

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 24,
    "max_position_embeddings": 24,
}
STATIC_SHAPES = StaticShapes(24, block=8, chunk=16, requested_tokens=128)
"""Bins have up to 64 tokens: several make a micro-batch, and a datum may have several blocks."""


@dataclass(frozen=True)
class Row:
    """One datum. ``inputs`` are any other per-token fields of ``MicroBatch``."""

    tokens: Sequence[int]
    targets: Sequence[int]
    loss: str = "cross_entropy"
    weights: Sequence[float] = ()
    inputs: dict[str, Sequence[float]] = field(default_factory=dict)


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face layout, with every weight random."""
    return write_base_model(tmp_path_factory.mktemp("base"), TINY)


def write_base_model(folder: Path, config: dict[str, Any]) -> Path:
    from tuneserve_engine.backend.jax.model.config import ModelConfig
    from tuneserve_engine.backend.jax.model.weights import expected_tensors

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    tensors = {
        name: ("norm" in name) + 0.3 * random.standard_normal(place.shape).astype(np.float32)
        for name, place in expected_tensors(ModelConfig.from_hf(config)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def new_backend(base_model: Path) -> "Callable[..., JaxBackend]":
    from tuneserve_engine.backend.jax.backend import JaxBackend

    # One cache for all processes of the test run: none compiles what another has compiled.
    compiled = Path(os.environ["TUNESERVE_COMPILE_CACHE"])
    return lambda compile_cache_dir=compiled: JaxBackend(
        str(base_model),
        name="tiny",
        tokenizer_id=str(base_model),
        static_shapes=STATIC_SHAPES,
        compile_cache_dir=compile_cache_dir,
    )


@pytest.fixture(scope="session")
def backend(new_backend: "Callable[[], JaxBackend]") -> "JaxBackend":
    """One backend for all tests, to share its programs. Each test uses its own adapter ids."""
    return new_backend()


@pytest.fixture(scope="session")
def datum() -> Callable[..., Row]:
    """``datum(seed, length)``: random tokens and targets, and fractional weights, some negative."""

    def make(seed: int, length: int, loss: str = "cross_entropy", **inputs: Any) -> Row:
        random = np.random.default_rng(seed)
        tokens, targets = random.integers(0, TINY["vocab_size"], (2, length)).tolist()
        weights = random.normal(0.7, 0.6, length).tolist()
        return Row(tokens, targets, loss, inputs.pop("weights", weights), inputs)

    return make


@pytest.fixture(scope="session")
def micro_batch_of() -> Callable[..., MicroBatch]:
    """``micro_batch_of((0, row), (1, row, row))``: each bin is a request and its datums, in order.

    Datums are numbered in this order, so ``micro_batch.segment_ids == 2`` are the tokens of the
    third.
    """

    def make(*bins: Any, static_shapes: StaticShapes = STATIC_SHAPES) -> MicroBatch:
        arrays = empty(static_shapes.micro_batch_tokens, static_shapes.block)
        first = number = 0
        for request, *rows in bins:
            start = first
            for row in rows:
                fill(arrays, number, first, row, static_shapes.block)
                first, number = first + len(row.tokens), number + 1
            first = multiple_from(first, static_shapes.block)
            arrays["block_request"][start // static_shapes.block : first // static_shapes.block] = (
                request
            )
        return MicroBatch(**arrays, blocks=first // static_shapes.block)

    return make


def empty(n: int, block: int) -> dict[str, Any]:
    """The arrays of a micro-batch without datums."""
    shapes = {"targets": (n, 1), "weights": (n, 1)}
    shapes |= {"block_request": (n // block,), "first_visible_block": (n // block,)}
    whole = (
        "tokens",
        "targets",
        "positions",
        "segment_ids",
        "loss_id",
        "block_request",
        "first_visible_block",
    )
    arrays: dict[str, Any] = {
        name: np.zeros(shapes.get(name, (n,)), np.int32 if name in whole else np.float32)
        for name in MicroBatch._fields
        if name not in {"blocks", "part"}
    }
    arrays["segment_ids"][:] = arrays["block_request"][:] = -1
    arrays["first_visible_block"][:] = np.arange(n // block)
    return arrays


def fill(arrays: dict[str, Any], number: int, first: int, row: Row, block: int) -> None:
    length = len(row.tokens)
    part = slice(first, first + length)
    arrays["tokens"][part] = row.tokens
    arrays["targets"][part, 0] = row.targets
    arrays["positions"][part] = range(length)
    arrays["segment_ids"][part] = number
    arrays["loss_id"][part] = LOSS_NAMES.index(row.loss)
    if row.loss == "cross_entropy":
        arrays["weights"][part, 0] = row.weights
    for name, values in row.inputs.items():
        arrays[name][part] = values
    starts = arrays["first_visible_block"]
    for each in range(first // block, (first + length - 1) // block + 1):
        starts[each] = min(starts[each], first // block)


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., TrainBatch]:
    """``batch_of(["a", "b"], micro_batches)``: requests by adapter id."""

    def make(
        adapters: Sequence[str], micro_batches: Sequence[MicroBatch], *, forward_only: bool = False
    ) -> TrainBatch:
        return TrainBatch(tuple(adapters), forward_only, tuple(micro_batches))

    return make


@pytest.fixture(scope="module")
def quickly_compiled() -> Iterator[None]:
    """Backends made by the module's tests compile faster, to slower code with other roundings."""
    from tuneserve_engine.backend.jax.programs import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_EVERYWHERE", registry._EVERYWHERE | UNOPTIMISED)
        yield
