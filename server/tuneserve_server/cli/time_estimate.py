"""The time that a training run will take, from the speed of an earlier run."""

from dataclasses import dataclass
from typing import Self

from tuneserve_client import Client
from tuneserve_server.cli.resolve import run_name
from tuneserve_server.cli.train_view import time_text

_READ = 50
_FEWEST_STEPS = 10
"""With fewer steps, most of a run's time is for its start."""


@dataclass(frozen=True)
class TimeEstimate:
    """The estimated time of a run, in seconds, and the earlier run whose speed it assumes."""

    seconds: float
    tokens_per_s: float
    run: str

    @classmethod
    def of(cls, client: Client, base_model: str, tokens: int) -> Self | None:
        """Return the estimate for so many tokens at the speed of an earlier run.

        It is the tenant's newest run of ten steps or more on the same base model that has ended.
        Its speed counts all tokens from its creation to its last request, so it includes
        evaluations, the compiler, and the work of other tenants. Without such a run, return None.
        """
        for run in client.search_runs(limit=_READ).training_runs:
            if run.base_model != base_model or run.state == "running" or not run.tokens:
                continue
            if run.duration_s and (run.step or 0) >= _FEWEST_STEPS:
                speed = run.tokens / run.duration_s
                return cls(tokens / speed, speed, run_name(run) or run.training_run_id)
        return None

    @property
    def text(self) -> str:
        return (
            f"{time_text(self.seconds)}, at the {self.tokens_per_s:,.0f} tokens/s of run "
            f"{self.run!r}"
        )
