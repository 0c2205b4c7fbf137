"""The choices of a worker's settings that its backend needs, without the settings themselves."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DType = Literal["float32", "bfloat16"]
"""The type of the base model's weights and of the activations."""

Remat = Literal["none", "dots", "attention", "full"]
"""The values of a layer that training keeps beside the layer's input.

``none``: all that autodiff asks for. ``dots``: the results of attention and of the products with
weights, and on a GPU of those with A. ``attention``: the result of attention. ``full``: nothing.
"""


@dataclass(frozen=True)
class PlanRequest:
    """The choices that shape a plan of the device's memory; None leaves one to the planner.

    With ``sample_only``, nothing is planned for training. ``devices`` share the base model; auto:
    the fewest on which it fits. ``dtype`` auto is float32 on a CPU, which computes bfloat16 more
    slowly, and bfloat16 elsewhere.
    """

    dtype: DType | Literal["auto"] = "auto"
    max_context_tokens: int = 4096
    batch_tokens: int | None = None
    chunk_tokens: int | None = None
    remat: Remat | Literal["auto"] = "auto"
    max_rank: int | None = None
    request_slots: int | None = None
    sample_rows: int = 8
    sample_only: bool = False
    devices: int | Literal["auto"] = 1
    device_memory_bytes: int | None = None
    adapter_device_bytes: int | None = None
    adapter_host_bytes: int | None = None


@dataclass(frozen=True)
class BackendOptions:
    """The choices for a backend: its base model, its directories and its memory plan."""

    base_model: str
    base_model_revision: str | None
    served_name: str
    tokenizer_id: str
    client_tokenizer_id: str
    compile_ahead: bool
    compile_cache_dir: Path | None
    pages_dir: Path
    decompositions_dir: Path
    min_free_bytes: int
    plan: PlanRequest
