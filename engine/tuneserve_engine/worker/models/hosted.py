"""The event loop's record of a model on this worker."""

from dataclasses import dataclass, field

from tuneserve_engine.core.jobs import Job
from tuneserve_engine.core.records import Update


@dataclass
class HostedModel:
    """A model that this worker holds, restores or hands over."""

    is_ready: bool  # its state is on the device
    held: list[Job] = field(default_factory=list)  # jobs that wait until it is ready, or gone
    is_leaving: bool = False
    changed_s: float | None = None  # the time since when it differs from its newest point
    steps: int = 0  # optimizer steps since then
    is_accumulating: bool = False
    has_bad_point: bool = False  # the store keeps a point of it that cannot be read
    updates: tuple[Update, ...] = ()  # record updates to send with its next outcome

    def take_held(self) -> list[Job]:
        """Return the held jobs, which are held no longer."""
        held, self.held = self.held, []
        return held


def log_extra(model_id: str) -> dict[str, str]:
    """Return the ``extra`` of a log line about a model."""
    return {"model_id": model_id}
