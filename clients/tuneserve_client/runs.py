"""The words for runs that the server, the client and the commands share."""

from typing import Literal

RunOutcome = Literal["finished", "stopped", "diverged", "failed"]
"""The end of a run, as its training loop reports it."""
RunState = Literal["running", "finished", "stopped", "failed", "diverged"]
RunOrder = Literal[
    "created",
    "last_request",
    "name",
    "state",
    "step",
    "loss",
    "held_out_loss",
    "duration",
    "tokens",
    "device",
]
"""The figures by which a search sorts runs."""
