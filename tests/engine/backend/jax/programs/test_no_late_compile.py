"""After ready, no work of tenants compiles anything."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tuneserve_engine.backend.base import LOSS_NAMES, SamplingRequest
from tuneserve_engine.backend.jax.adapters.room import AdapterRoom
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData
from tuneserve_engine.worker.execution.packing import PackingRequest, pack

CONTEXT, VOCAB = 24, 61
STATIC_SHAPES = StaticShapes(
    CONTEXT, block=4, chunk=8, requested_tokens=128, request_slots=8, rank_buckets=(8, 32)
)
"""Datums of up to three chunks, and sequences of up to six pages."""
ROOM_BYTES, SNAPSHOT_BYTES = 1_000_000, 200_000
"""Room on the device for 16 adapters of 75 or 300 KB each, half of it again on the host, and two or
more snapshots of a quarter of that each.
"""
CONFIGS = {"cross_entropy": {}, "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}}


@pytest.fixture(scope="module")
def spoken_model(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model with a tokenizer, whose tokens are "a", "b", … and "t26", "t27", …"""
    folder = tmp_path_factory.mktemp("spoken")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(base_model / name, folder)
    words = {chr(97 + i) if i < 26 else f"t{i}": i for i in range(VOCAB)}
    Tokenizer(WordLevel(words, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def ready(
    spoken_model: Path, tmp_path_factory: pytest.TempPathFactory, quickly_compiled: None
) -> JaxBackend:
    room = AdapterRoom(
        ROOM_BYTES, ROOM_BYTES // 2, tmp_path_factory.mktemp("pages"), SNAPSHOT_BYTES
    )
    backend = JaxBackend(
        str(spoken_model),
        name="tiny",
        tokenizer_id="tiny",
        static_shapes=STATIC_SHAPES,
        sample_rows=2,
        room=room,
    )
    backend.compile_ahead()
    assert backend.programs.wait(280)
    assert backend.metrics["programs_failed"] == 0
    return backend


def test_no_work_of_16_tenants_compiles_anything(ready: JaxBackend) -> None:
    random = np.random.default_rng(0)
    lengths = _every_length(random)
    ranks: dict[str, int] = {}
    before = ready.programs.compilations_after_ready
    for turn in range(32):
        # Every rank once, 16 tenants at a time.
        name, rank = f"tenant {turn}", 1 + turn
        ranks[name] = rank
        ready.create_adapter(name, AdapterConfig(rank, 8.0, turn, train_attn=turn % 3 > 0))
        if len(ranks) > 16:
            oldest = next(iter(ranks))
            ready.delete_adapter(oldest)
            del ranks[oldest]
        tenants = random.choice(list(ranks), size=random.integers(1, len(ranks) + 1), replace=False)
        _train(ready, [(str(one), ranks[str(one)]) for one in tenants], turn, lengths, random)
        state = ready.adapter_state(name, optimizer=True, accumulator=True)
        ready.load_adapter(name, state)
        ready.load_snapshot(name, state)
        ready.sample(_requests(name, turn, random))
    assert ready.programs.compilations_after_ready == before
    assert ready.metrics["adapters_paged_in_total"] > 0
    assert not ready.has_snapshot("tenant 0")  # it was evicted for others


def _every_length(random: np.random.Generator) -> Iterator[int]:
    while True:
        yield from random.permutation(CONTEXT) + 1


def _train(
    backend: JaxBackend,
    tenants: list[tuple[str, int]],
    turn: int,
    lengths: Iterator[int],
    random: np.random.Generator,
) -> None:
    """Send one request of each tenant, with any loss and 1 to 64 datums. Then take some steps."""
    requests = [
        PackingRequest(name, rank, _data(LOSS_NAMES[(turn + i) % len(LOSS_NAMES)], lengths, random))
        for i, (name, rank) in enumerate(tenants)
    ]
    for packed in pack(requests, backend.static_shapes):
        result = backend.forward_backward(packed.batch)
        assert all(result.finite)
    backend.prefetch([name for name, _ in tenants])
    params = AdamwParams(
        learning_rate=float(random.uniform(0, 1e-3)),
        weight_decay=float(random.choice([0.0, 0.1])),
        grad_clip_norm=float(random.choice([0.0, 1.0])),
    )
    steps = backend.optim_steps([(name, params) for name, _ in tenants[: 1 + turn % 4]])
    assert not [step for step in steps if isinstance(step, Exception)]


def _data(loss: str, lengths: Iterator[int], random: np.random.Generator) -> TrainingData:
    count = int(random.choice([1, 2, 5, 64]))
    targets = int(random.choice([1, 2, 64])) if loss == "cross_entropy" else 1
    data = [_datum(next(lengths), targets, loss, random) for _ in range(count)]
    return TrainingData(loss, CONFIGS.get(loss, {}), bool(random.integers(4) == 0), data)


def _datum(length: int, targets: int, loss: str, random: np.random.Generator) -> DecodedDatum:
    tokens = random.integers(0, VOCAB, length).astype(np.int32)
    ids = random.integers(0, VOCAB, (length, targets)).astype(np.int32)
    per_token: dict[str, Any] = {}
    if loss != "cross_entropy":
        per_token = {
            "logprobs": random.normal(-4, 0.1, length).astype(np.float32),
            "advantages": random.normal(size=length).astype(np.float32),
        }
    weights = random.random((length, targets)).astype(np.float32)
    return DecodedDatum(tokens, ids, weights, targets == 1, per_token)


def _requests(snapshot: str, turn: int, random: np.random.Generator) -> list[SamplingRequest]:
    """Requests for the snapshot and for the base model, each with different parameters."""
    length = 1 + turn % (CONTEXT - 1)
    prompt = random.integers(0, VOCAB, length).astype(np.int32)
    return [
        SamplingRequest(prompt, name, turn, **_parameters(length, random))
        for name in (snapshot, None)
    ]


def _parameters(length: int, random: np.random.Generator) -> dict[str, Any]:
    """Every parameter that a sample can have, for a prompt of this length."""

    def some(*values: int) -> int:
        return int(random.choice(values))

    stop_tokens = random.choice(VOCAB, some(0, 1, 5), replace=False)
    stop_strings = random.choice(["a", "b c", "t30 t31", "zz"], some(0, 1, 3), replace=False)
    asked: dict[str, Any] = {
        "num_samples": some(1, 2, 3),
        "max_tokens": int(random.integers(1, CONTEXT - length + 1)),
        "temperature": float(random.choice([0.0, 0.5, 1.0])),
        "top_k": some(-1, 3),
        "top_p": float(random.choice([1.0, 0.7])),
        "logit_bias": {token: 1.5 for token in range(some(0, 1, min(VOCAB, 300)))},
        "presence_penalty": float(random.choice([0.0, 1.0])),
        "frequency_penalty": float(random.choice([0.0, -0.5])),
        "stop_tokens": frozenset(stop_tokens.tolist()),
        "stop_strings": tuple(stop_strings.tolist()),
        "prompt_logprobs": bool(some(0, 1)),
        "topk_prompt": some(0, 1, 64),
        "topk_sample": some(0, 1, 64),
        "alt_tokens": some(0, 1, 64),
    }
    if width := some(0, 1, 64):
        asked["targets"] = random.integers(-1, VOCAB, (length - 1, width)).astype(np.int32)
    return asked
