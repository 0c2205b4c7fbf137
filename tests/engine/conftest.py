"""A random tiny base model on disk, a backend on it, and training units written row by row."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tuneserve_engine.backend.base import LOSS_NAMES, TrainBatch, TrainRequest, TrainUnit
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.models.config import ModelConfig
from tuneserve_engine.backend.jax.models.weights import expected_tensors
from tuneserve_engine.lattice import ShapeLattice

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
LATTICE = ShapeLattice(24, token_budget=64, max_rows=4)
"""Buckets 16 (1 or 4 rows) and 24 (1 or 2 rows)."""


@dataclass(frozen=True)
class Row:
    """One datum; ``inputs`` are any other per-token fields of ``TrainBatch``."""

    tokens: Sequence[int]
    targets: Sequence[int]
    loss: str = "cross_entropy"
    weights: Sequence[float] = ()
    inputs: dict[str, Sequence[float]] = field(default_factory=dict)


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face layout, with every weight random."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(TINY))
    random = np.random.default_rng(0)
    tensors = {
        name: ("norm" in name) + 0.3 * random.standard_normal(place.shape).astype(np.float32)
        for name, place in expected_tensors(ModelConfig.from_hf(TINY)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def new_backend(base_model: Path) -> Callable[[], JaxBackend]:
    return lambda: JaxBackend(
        str(base_model), name="tiny", tokenizer_id=str(base_model), lattice=LATTICE
    )


@pytest.fixture(scope="session")
def backend(new_backend: Callable[[], JaxBackend]) -> JaxBackend:
    """Shared by all tests, programs and all: each uses adapter ids of its own."""
    return new_backend()


@pytest.fixture(scope="session")
def datum() -> Callable[..., Row]:
    """``datum(seed, length)``: random tokens, targets and fractional, also negative, weights."""

    def make(seed: int, length: int, loss: str = "cross_entropy", **inputs: Any) -> Row:
        random = np.random.default_rng(seed)
        tokens, targets = random.integers(0, TINY["vocab_size"], (2, length)).tolist()
        weights = random.normal(0.7, 0.6, length).tolist()
        return Row(tokens, targets, loss, inputs.pop("weights", weights), inputs)

    return make


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., TrainBatch]:
    """``batch_of({0: (request, row), 2: ...}, rows=4, bucket=16)``: a datum at each named place."""

    def make(places: dict[int, tuple[int, Row]], *, rows: int, bucket: int) -> TrainBatch:
        shapes = {"targets": (rows, bucket, 1), "weights": (rows, bucket, 1)}
        shapes |= {"beta": (rows,), "loss_id": (rows,), "row_request": (rows,)}
        whole = ("tokens", "targets", "loss_id", "row_request")
        batch = TrainBatch(**{
            name: np.zeros(
                shapes.get(name, (rows, bucket)), np.int32 if name in whole else np.float32
            )
            for name in TrainBatch._fields
        })  # fmt: skip
        batch.row_request[:] = -1
        for place, (request, row) in places.items():
            fill(batch, place, row)
            batch.row_request[place] = request
        return batch

    return make


def fill(batch: TrainBatch, place: int, row: Row) -> None:
    length = len(row.tokens)
    batch.tokens[place, :length] = row.tokens
    batch.targets[place, :length, 0] = row.targets
    batch.valid[place, :length] = 1
    batch.loss_id[place] = LOSS_NAMES.index(row.loss)
    if row.loss == "cross_entropy":
        batch.weights[place, :length, 0] = row.weights
    for name, values in row.inputs.items():
        getattr(batch, name)[place, :length] = values


@pytest.fixture(scope="session")
def unit_of() -> Callable[..., TrainUnit]:
    """``unit_of(["a", "b"], batches)``: requests by adapter id."""

    def make(
        adapters: Sequence[str], batches: Sequence[TrainBatch], *, forward_only: bool = False
    ) -> TrainUnit:
        requests = tuple(TrainRequest(adapter, forward_only) for adapter in adapters)
        return TrainUnit(requests, tuple(batches))

    return make
