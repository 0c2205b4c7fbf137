"""The time that a training run will take, from the speed of an earlier run."""

from dataclasses import dataclass
from typing import Self

from tuneserve_client import Client
from tuneserve_server.cli.resolve import run_name
from tuneserve_server.cli.train_view import time_text

_READ = 50
_SHORTEST_S = 1.0


@dataclass(frozen=True)
class TimeEstimate:
    """The estimated time of a run, in seconds, and the earlier run whose speed it assumes."""

    seconds: float
    tokens_per_s: float
    run: str

    @classmethod
    def of(cls, client: Client, base_model: str, tokens: int) -> Self | None:
        """Return the estimate for so many tokens at the speed of an earlier run.

        It is the tenant's newest run on the same base model.
        The speed counts all tokens from the run's creation to its last request, so it includes the
        evaluations of that run, the compiler, and the work of other tenants. A run that still goes
        on, or that took less than a second, does not count. Without such a run, return None.
        """
        for run in client.search_runs(limit=_READ).training_runs:
            if run.base_model != base_model or run.state == "running" or not run.tokens:
                continue
            if (took_s := run.duration_s or 0.0) >= _SHORTEST_S:
                speed = run.tokens / took_s
                return cls(tokens / speed, speed, run_name(run) or run.training_run_id)
        return None

    @property
    def text(self) -> str:
        return (
            f"{time_text(self.seconds)}, at the {self.tokens_per_s:,.0f} tokens/s of run "
            f"{self.run!r}"
        )
