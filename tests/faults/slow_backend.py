"""A device on which some requests never end, once."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fake_backend import FakeBackend
from tuneserve_engine.backend.base import TrainBatch, TrainResult

SLOW = 63
"""A token reserved for these requests."""


@dataclass(frozen=True)
class NewSlowBackend:
    """Makes a backend. The file ``began`` exists once the device is busy for ever."""

    began: Path

    def __call__(self) -> "SlowBackend":
        return SlowBackend(self.began)


class SlowBackend(FakeBackend):
    def __init__(self, began: Path) -> None:
        super().__init__()
        self._began = began

    def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
        slow = any((micro_batch.tokens == SLOW).any() for micro_batch in batch.micro_batches)
        if slow and not self._began.exists():
            self._began.touch()
            time.sleep(3600)
        return super().forward_backward(batch, *between)
