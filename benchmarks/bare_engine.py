"""The bare engine, in the benchmark's own process, and random tokens for every contender."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tuneserve_engine.backend.base import TrainBatch
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData
from tuneserve_engine.worker.execution.packing import PackedBatch, PackingRequest, pack, unpack

Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


def random_tokens(lengths: Sequence[int], vocab: int, *, seed: int) -> list[Tokens]:
    """Return one sequence per length, one token longer, so every position has a target."""
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab, length + 1, dtype=np.int32) for length in lengths]


def training_data(sequences: Sequence[Tokens], *, forward_only: bool = False) -> TrainingData:
    """Return the cross-entropy of each sequence's tokens but the first, one datum per sequence."""
    data = [
        DecodedDatum(s[:-1], s[1:, None], np.ones((len(s) - 1, 1), np.float32), flat=True)
        for s in sequences
    ]
    return TrainingData("cross_entropy", {}, forward_only, data)


class Bare:
    """The engine without the service."""

    def __init__(self, backend: JaxBackend, learning_rate: float) -> None:
        self.backend = backend
        self._adam = AdamwParams(learning_rate=learning_rate)
        self._ranks: dict[str, int] = {}

    @classmethod
    def beside(cls, folder: Path, model: Path, cache: Path, learning_rate: float = 0.0) -> "Bare":
        """Return an engine with a service's settings and the programs of the service's cache."""
        settings = WorkerSettings(
            data_dir=folder, base_model=str(model), compile_cache=cache, compile_ahead=False
        )
        return cls(JaxBackend.from_options(settings.backend_options), learning_rate)

    def create(self, name: str, config: AdapterConfig) -> None:
        self.backend.create_adapter(name, config)
        self._ranks[name] = config.rank

    def packed(self, work: Sequence[tuple[str, TrainingData]]) -> list[PackedBatch]:
        asked = [PackingRequest(name, self._ranks[name], data) for name, data in work]
        return pack(asked, self.backend.static_shapes)

    def gradients(self, work: Sequence[tuple[str, TrainingData]]) -> list[float]:
        """Run one ``forward_backward`` per adapter in one pass, and return their losses."""
        losses = [0.0] * len(work)
        for packed in self.packed(work):
            result = self.backend.forward_backward(packed.batch)
            assert all(result.finite)
            for index, member in enumerate(packed.members):
                losses[member] = unpack(packed, result.outputs, index, work[member][1])[1]
        return losses

    def optim_steps(self, names: Sequence[str]) -> None:
        results = self.backend.optim_steps([(name, self._adam) for name in names])
        for result in results:
            if isinstance(result, Exception):
                raise result

    def step(self, work: Sequence[tuple[str, TrainingData]]) -> list[float]:
        losses = self.gradients(work)
        self.optim_steps([name for name, _ in work])
        return losses

    def computed_tokens(self, batches: Sequence[TrainBatch]) -> int:
        """Return the tokens of all chunks that the batches compute, padding included."""
        static_shapes = self.backend.static_shapes
        blocks_per_chunk = static_shapes.chunk // static_shapes.block
        chunks = sum(
            -(-b.blocks // blocks_per_chunk) for batch in batches for b in batch.micro_batches
        )
        return chunks * static_shapes.chunk
