"""The client of a tuneserve server: ``Client``, or ``AsyncClient`` for asyncio.

Names are imported on first use: the server and the engine share the wire types of this package, and
need nothing else from it. ``dir`` shows the public names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuneserve_client.adapter import Adapter
    from tuneserve_client.client import AsyncClient
    from tuneserve_client.data import Datum, chat_datum, next_token_datum, sft_datum
    from tuneserve_client.errors import (
        BudgetSpent,
        Forbidden,
        InvalidRequest,
        LossFailed,
        ModelInterrupted,
        NotFound,
        Overloaded,
        Refused,
        RequestFailed,
        ResultExpired,
        ServerFault,
        SessionEnded,
        TuneserveError,
        Unauthorized,
        Unreachable,
    )
    from tuneserve_client.futures import AsyncFuture
    from tuneserve_client.progress_bars import gather, progress
    from tuneserve_client.results import Sample, SampleOutput, StepOutput, Top, TrainOutput
    from tuneserve_client.sampling import AsyncSampler
    from tuneserve_client.sync import Client, Future, Model, Sampler
    from tuneserve_client.training import AsyncModel, torch_loss

_NAMES = {
    "adapter": ["Adapter"],
    "progress_bars": ["gather", "progress"],
    "data": ["Datum", "chat_datum", "next_token_datum", "sft_datum"],
    "errors": [
        *(
            "BudgetSpent",
            "Forbidden",
            "InvalidRequest",
            "LossFailed",
            "ModelInterrupted",
            "NotFound",
        ),
        *("Overloaded", "Refused", "RequestFailed", "ResultExpired", "ServerFault"),
        *("SessionEnded", "TuneserveError", "Unauthorized", "Unreachable"),
    ],
    "futures": ["AsyncFuture"],
    "results": ["Sample", "SampleOutput", "StepOutput", "Top", "TrainOutput"],
    "sampling": ["AsyncSampler"],
    "client": ["AsyncClient"],
    "sync": ["Client", "Future", "Model", "Sampler"],
    "training": ["AsyncModel", "torch_loss"],
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Adapter",
    "AsyncClient",
    "AsyncFuture",
    "AsyncModel",
    "AsyncSampler",
    "BudgetSpent",
    "Client",
    "Datum",
    "Forbidden",
    "Future",
    "InvalidRequest",
    "LossFailed",
    "Model",
    "ModelInterrupted",
    "NotFound",
    "Overloaded",
    "Refused",
    "RequestFailed",
    "ResultExpired",
    "Sample",
    "SampleOutput",
    "Sampler",
    "ServerFault",
    "SessionEnded",
    "StepOutput",
    "Top",
    "TrainOutput",
    "TuneserveError",
    "Unauthorized",
    "Unreachable",
    "chat_datum",
    "gather",
    "next_token_datum",
    "progress",
    "sft_datum",
    "torch_loss",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("tuneserve")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
