"""The settings of a worker. Settings are the only readers of the environment."""

import os
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)
from pydantic_settings import (
    NoDecode,
)

from tuneserve_engine.core.jobs import MAX_JOBS
from tuneserve_engine.core.policies import SLICE_S
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.settings.common import CommonSettings, from_json

RequestSlots = Annotated[int, Field(ge=1, le=MAX_JOBS)]
ChunkTokens = Annotated[int, Field(ge=StaticShapes.block, multiple_of=StaticShapes.block)]


class WorkerSettings(CommonSettings):
    """Settings of ``tuneserve worker``."""

    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Type of the base weights and activations."
    )
    max_context_tokens: PositiveInt = Field(
        default=4096,
        description="Longest sequence, samples included, if the base model allows as much; memory "
        "grows with it.",
    )
    batch_tokens: PositiveInt | None = Field(
        default=None,
        description="Tokens of one training micro-batch, at least one sequence of the longest; "
        "default: what fits the memory.",
    )
    chunk_tokens: ChunkTokens | None = Field(
        default=None,
        description="Tokens of one matrix product, a multiple of 64; default: 256 on a CPU, 1024 "
        "elsewhere.",
    )
    remat: Literal["auto", "none", "dots", "attention", "full"] = Field(
        default="auto",
        description="What training keeps of each layer for its backward pass, beside the layer's "
        "input: all (none is computed again), the results of matrix products and of attention "
        "(dots), of attention, or nothing (full: all is computed again); auto: the fastest of "
        "dots, attention and full that fits.",
    )
    max_rank: PositiveInt | None = Field(
        default=None,
        description="Largest rank of an adapter; each class of ranks (to 8, to 32, to 128) costs "
        "memory and programs. Default: 128, or less where the memory lacks.",
    )
    request_slots: RequestSlots | None = Field(
        default=None,
        description="Training requests of the lowest ranks that run together, each with a gradient "
        "of its own; of higher ranks fewer. At most 32, which is also the default, or less where "
        "the memory lacks.",
    )
    sample_rows: PositiveInt = Field(default=8, description="Sequences decoded together.")
    rescore_samples: bool = Field(
        default=False,
        description="Samples at temperature 1 or 0 carry the logprobs that `forward` and "
        "`forward_backward` give for them, bit for bit in `float32` and `bfloat16`, instead of "
        "those that they were drawn with. Costs a forward pass each.",
    )
    device_memory_bytes: PositiveInt | None = Field(
        default=None,
        description="Memory of the device to plan with; default: what the device reports, for a "
        "CPU half of the machine's memory.",
    )
    device_peak_flops: PositiveFloat | None = Field(
        default=None,
        description="Floating-point operations that the device can do in a second, in `dtype`, as "
        "its maker says; only shown, as `tuneserve_device_peak_flops`, for those who divide by it.",
    )
    adapter_device_bytes: PositiveInt | None = Field(
        default=None,
        description="Most of it for adapters: weights, moments and gradient. Default: what the "
        "rest leaves.",
    )
    adapter_host_bytes: NonNegativeInt | None = Field(
        default=None,
        description="Memory of the host for adapters that the device has no room for, a quarter of "
        "it for those that are sampled from; what it has no room for lies on disk. Default: half "
        "of the machine's memory, for a CPU a quarter.",
    )
    compile_ahead: bool = Field(
        default=True,
        description="Compile every program before it is needed; requests are taken meanwhile.",
    )
    compile_cache: Path | None = Field(
        default=None,
        description="Where compiled programs are kept; who can write there can run code in the "
        "worker. Default: compiled/ in the data directory.",
    )
    decompositions: Path | None = Field(
        default=None,
        description="Where the directions of the base model's weights are kept, for adapters of "
        "kind osft: about twice the weights in float32. Workers on several hosts that serve the "
        "same base model have to share the folder. Default: decompositions/ in the data directory.",
    )

    worker_name: str | None = Field(
        default=None,
        description="What the store knows this worker by; a second worker under the name takes "
        "over from the first. Default: <host>-<process id>.",
    )
    alive_file: Path | None = Field(
        default=None,
        description="Touched whenever the lease is renewed. For health checks, run "
        "`python -m tuneserve_engine.worker.health` with the same settings.",
    )
    point_s: PositiveFloat = Field(
        default=60.0, description="Time between recovery points of a model in use."
    )
    point_steps: PositiveInt = Field(
        default=50, description="Optimizer steps between recovery points of a model."
    )

    slice_s: PositiveFloat = Field(
        default=SLICE_S,
        description="About how long one micro-batch of a long training request takes, at least one "
        "sequence; other tenants' requests come in between two of them.",
    )

    tenant_weights: Annotated[dict[str, PositiveFloat], NoDecode] = Field(
        default_factory=dict,
        description="Shares of device time of tenants that are busy at once, as a JSON object; the "
        "names are those of `model_owner` in a training run, and who is not named has 1.",
    )

    @field_validator("tenant_weights", mode="before")
    @classmethod
    def _from_json(cls, given: object) -> object:
        return from_json(given)

    @property
    def compile_cache_dir(self) -> Path:
        return self.compile_cache or self.data_dir / "compiled"

    @property
    def decompositions_dir(self) -> Path:
        return self.decompositions or self.data_dir / "decompositions"

    @property
    def pages_dir(self) -> Path:
        """The folder in which each worker makes a directory for evicted adapters.

        It takes the adapters for which neither the device nor the host has room.
        """
        return self.data_dir / "pages"

    @property
    def lease_name(self) -> str:
        """The name under which this process takes its lease."""
        return self.worker_name or f"{socket.gethostname()}-{os.getpid()}"
