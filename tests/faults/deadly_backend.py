"""A device on which some requests kill the worker, as a bug in a kernel would."""

import json
import os
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fake_backend import FakeBackend
from tuneserve_engine.backend.base import SampleResult, SamplingRequest, TrainBatch, TrainResult
from tuneserve_engine.core.adapter import AdapterConfig

DEADLY = {61: signal.SIGABRT, 62: signal.SIGSEGV}
"""Tokens reserved for deadly requests, and the signals that they cause."""

DEADLY_RANK = 31


def deadly_gradient(adapter_id: str) -> str:
    """The name of such a request in the notes. Other requests have the name of their adapter."""
    return f"{adapter_id}, deadly"


@dataclass(frozen=True)
class NewDeadlyBackend:
    """Makes a backend, which records the requests of its last batch in the file ``deaths``."""

    deaths: Path

    def __call__(self) -> "DeadlyBackend":
        return DeadlyBackend(self.deaths)

    def noted(self) -> list[list[str]]:
        return [json.loads(line) for line in self.deaths.read_text().splitlines()]


class DeadlyBackend(FakeBackend):
    """Its first gradients are slow, so others gather behind them and share the next batch."""

    def __init__(self, deaths: Path) -> None:
        super().__init__()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._deaths = deaths
        self._is_first = True

    def create_adapter(self, adapter_id: str, config: AdapterConfig) -> None:
        if config.rank == DEADLY_RANK:
            self._die(signal.SIGABRT, [adapter_id])
        super().create_adapter(adapter_id, config)

    def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
        names = list(batch.adapter_ids)
        found: set[int] = set()
        for micro_batch in batch.micro_batches:
            block = len(micro_batch.tokens) // len(micro_batch.block_request)
            for at, index in enumerate(micro_batch.block_request.tolist()):
                deadly = {*micro_batch.tokens[at * block : (at + 1) * block].tolist()} & {*DEADLY}
                if index >= 0 and deadly:
                    names[index] = deadly_gradient(batch.adapter_ids[index])
                    found |= deadly
        self._check(found, names)
        if self._is_first:
            self._is_first = False
            time.sleep(0.1)
        return super().forward_backward(batch, *between)

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SampleResult]:
        tokens = {token for request in requests for token in request.prompt.tolist()}
        self._check(tokens, [f"{each.snapshot_id}/{each.seed}" for each in requests])
        return super().sample(requests)

    def _check(self, tokens: set[int], batch: list[str]) -> None:
        for token, number in DEADLY.items():
            if token in tokens:
                self._die(number, batch)

    def _die(self, number: signal.Signals, batch: list[str]) -> None:
        with self._deaths.open("a") as notes:
            notes.write(json.dumps(batch) + "\n")
        os.kill(os.getpid(), number)
        signal.pause()  # the signal may hit another thread
