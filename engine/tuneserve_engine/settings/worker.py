"""The settings of a worker. Settings are the only readers of the environment."""

import os
import socket
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    NoDecode,
)

from tuneserve_engine.core.backend_options import BackendOptions, DType, PlanRequest, Remat
from tuneserve_engine.core.jobs import MAX_JOBS
from tuneserve_engine.core.policies import SLICE_S
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.settings.common import CommonSettings, from_commas, from_json

RequestSlots = Annotated[int, Field(ge=1, le=MAX_JOBS)]
_KEY_CHARS = 16
ChunkTokens = Annotated[int, Field(ge=StaticShapes.block, multiple_of=StaticShapes.block)]


class WorkerSettings(CommonSettings):
    """Settings of ``tuneserve worker``."""

    dtype: Literal["auto"] | DType = Field(
        default="auto",
        description="Type of the base model's weights and of the activations. auto: `float32` on a "
        "CPU, `bfloat16` on a GPU. Adapters are always `float32`.",
    )
    devices: PositiveInt | Literal["auto"] = Field(
        default=1,
        description="Number of this machine's devices that share the base model. Each has a part "
        "of the weights, and trains on a part of every batch. auto: the fewest on which it fits, "
        "of 1, 2, 4 and so on. Other workers on the machine need devices of their own: see "
        "`CUDA_VISIBLE_DEVICES`. With `hosts`: the number of each host, and auto: all of them.",
    )
    hosts: Annotated[list[str], NoDecode] = Field(
        default_factory=list,
        description="Names of the hosts whose devices share the base model of one worker, "
        "separated by commas. The first is the leader, which needs the store and the files; run "
        "`tuneserve worker` on all of them. Default: this machine alone.",
    )
    host_number: NonNegativeInt | None = Field(
        default=None,
        description="Number of this machine in `hosts`, from 0. Default: the place of its name.",
    )
    hosts_port: Annotated[int, Field(ge=1, le=65534)] = Field(
        default=8470,
        description="Port on which the leader of `hosts` expects the others. JAX uses the next "
        "one, and chooses others. None of them is encrypted, and only the first asks for the key: "
        "keep them within a private network.",
    )
    hosts_key: str = Field(
        default="",
        repr=False,
        description="Secret of at least 16 characters that the machines of `hosts` share. Anyone "
        "who knows it and reaches `hosts_port` can run code in the worker.",
    )
    max_context_tokens: PositiveInt = Field(
        default=4096,
        description="Longest sequence in tokens, samples included, if the base model allows as "
        "much. Memory use grows with it.",
    )
    batch_tokens: PositiveInt | None = Field(
        default=None,
        description="Tokens of one training micro-batch, never less than the longest sequence, "
        "or than a device's share of it. Default: chosen to fit the memory.",
    )
    chunk_tokens: ChunkTokens | None = Field(
        default=None,
        description="Tokens of one matrix product, a multiple of 64. Default: 256 on a CPU, 2048 "
        "elsewhere. As many as a micro-batch has make large requests faster on a GPU (predicted), "
        "and small requests slower.",
    )
    remat: Literal["auto"] | Remat = Field(
        default="auto",
        description="Activations that training keeps of each layer for its backward pass, beside "
        "the layer's input. none: all of them, so nothing is recomputed (on a GPU, norms are). "
        "dots: the results of matrix products and of attention. attention: the results of "
        "attention. full: nothing, so everything is recomputed. auto: the fastest of dots, "
        "attention and full that fits.",
    )
    max_rank: PositiveInt | None = Field(
        default=None,
        description="Largest rank of an adapter. Each rank bucket (up to 8, 32 and 128) costs "
        "memory and programs. Default: 128, or less if memory is short.",
    )
    request_slots: RequestSlots | None = Field(
        default=None,
        description="Number of training requests in the lowest rank bucket that run together, each "
        "with its own gradient. Higher buckets take fewer. The maximum is 32. Default: 32, or less "
        "if memory is short.",
    )
    sample_rows: PositiveInt = Field(
        default=8,
        description="Number of sequences that are decoded together.",
    )
    sample_only: bool = Field(
        default=False,
        description="Take samples only, and no models. As long as such workers run, they take all "
        "samples. They need no memory for training.",
    )
    relative_speed: float = Field(
        default=1.0,
        ge=0.01,
        le=100.0,
        description="How fast this worker trains, relative to other workers of its base model. One "
        "with twice the speed gets twice the models. Samples are spread without regard to it.",
    )
    rescore_samples: bool = Field(
        default=False,
        description="Return samples at temperature 1 or 0 with the logprobs that `forward` and "
        "`forward_backward` compute for them, bit for bit, instead of the logprobs from decoding. "
        "Tested on CPUs in `float32` and `bfloat16`. Measured on an H100 in `bfloat16` with LoRA: "
        "equal with `remat` dots, attention and full. Costs a forward pass per sample.",
    )
    device_memory_bytes: PositiveInt | None = Field(
        default=None,
        description="Memory in bytes of each device to plan with. Default: the size that the "
        "device reports; on a CPU, half of the machine's memory, divided among its devices.",
    )
    device_peak_flops: PositiveFloat | None = Field(
        default=None,
        description="Floating-point operations per second that the worker's devices can do "
        "together in `dtype`, according to their vendor. Only reported, as "
        "`tuneserve_device_peak_flops`, to compute utilisation.",
    )
    adapter_device_bytes: PositiveInt | None = Field(
        default=None,
        description="Largest part of each device's memory, in bytes, for adapters: weights, "
        "moments and gradient. Default: all that is left.",
    )
    adapter_host_bytes: NonNegativeInt | None = Field(
        default=None,
        description="Host memory in bytes for adapters that do not fit on the device, a quarter of "
        "it for adapters that are sampled from. Further adapters are stored on disk. Default: half "
        "of the machine's memory; on a CPU, a quarter.",
    )
    compile_ahead: bool = Field(
        default=True,
        description="Compile every program before it is needed. The worker accepts requests "
        "meanwhile, and compiles a quarter of the time at most while it runs them.",
    )
    compile_cache: Path | None = Field(
        default=None,
        description="Directory of the program cache. Anyone who can write there can run code in "
        "the worker. Default: compiled/ in the data directory.",
    )
    decompositions: Path | None = Field(
        default=None,
        description="Directory of the decomposed weights of the base model, for adapters of kind "
        "osft. They take about twice the size of the weights in float32. Workers on several hosts "
        "that serve the same base model must share it. Default: decompositions/ in the data "
        "directory.",
    )

    worker_name: str | None = Field(
        default=None,
        description="Name of this worker in the store. A second worker with the same name takes "
        "over from the first. Default: <host>-<process id>.",
    )
    alive_file: Path | None = Field(
        default=None,
        description="File that the worker touches whenever it renews its lease. For health checks, "
        "run `python -m tuneserve_engine.worker.health` with the same settings.",
    )
    point_s: PositiveFloat = Field(
        default=60.0, description="Time in seconds between recovery points of a model in use."
    )
    point_steps: PositiveInt = Field(
        default=50, description="Number of optimizer steps between recovery points of a model."
    )

    slice_s: PositiveFloat = Field(
        default=SLICE_S,
        description="Approximate time in seconds of one micro-batch of a long training request, "
        "which holds one sequence or more. Requests of other tenants can run between two "
        "micro-batches.",
    )

    tenant_weights: Annotated[dict[str, PositiveFloat], NoDecode] = Field(
        default_factory=dict,
        description="Shares of device time for tenants that are busy at the same time, as a JSON "
        "object of tenant names. The name of a tenant is the `model_owner` of its training runs. "
        "Tenants without an entry have weight 1.",
    )

    @field_validator("tenant_weights", mode="before")
    @classmethod
    def _from_json(cls, given: object) -> object:
        return from_json(given)

    @field_validator("hosts", mode="before")
    @classmethod
    def _names(cls, given: object) -> object:
        return from_commas(given)

    @model_validator(mode="after")
    def _trains_to_rescore(self) -> Self:
        if self.sample_only and self.rescore_samples:
            raise ValueError(
                "rescore_samples runs samples through training, which a worker with sample_only "
                "has no memory for; set one of the two"
            )
        return self

    @model_validator(mode="after")
    def _whole_group(self) -> Self:
        if not self.hosts:
            return self
        count = len(self.hosts)
        if count == 1:
            raise ValueError(f"hosts names one host, {self.hosts[0]}; name two or more, or none")
        if self.host_number is not None and self.host_number >= count:
            raise ValueError(
                f"host_number is {self.host_number}; the {count} hosts have 0 to {count - 1}"
            )
        if len(self.hosts_key) < _KEY_CHARS:
            raise ValueError(
                f"hosts_key has {len(self.hosts_key)} characters; hosts need the same secret of at "
                f"least {_KEY_CHARS}, such as that of `openssl rand -hex 16`"
            )
        return self

    @property
    def own_host_number(self) -> int:
        """The number of this machine in ``hosts``; 0 without hosts.

        Raises ``ValueError`` if ``host_number`` is not set and the machine's name is not there.
        """
        if self.host_number is not None or not self.hosts:
            return self.host_number or 0
        own = socket.gethostname()
        found = [
            number
            for number, name in enumerate(self.hosts)
            if own == name or own.partition(".")[0] == name.partition(".")[0]
        ]
        if len(found) != 1:
            raise ValueError(
                f"this machine is called {own}, which is {len(found)} times in hosts "
                f"({', '.join(self.hosts)}); set host_number"
            )
        return found[0]

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
    def plan_request(self) -> PlanRequest:
        """The choices that shape the plan of the device's memory."""
        return PlanRequest(**{each.name: getattr(self, each.name) for each in fields(PlanRequest)})

    @property
    def backend_options(self) -> BackendOptions:
        """The choices for the backend."""
        return BackendOptions(
            base_model=self.base_model,
            base_model_revision=self.base_model_revision,
            served_name=self.served_name,
            tokenizer_id=self.tokenizer_id,
            client_tokenizer_id=self.client_tokenizer_id,
            compile_ahead=self.compile_ahead,
            compile_cache_dir=self.compile_cache_dir,
            pages_dir=self.pages_dir,
            decompositions_dir=self.decompositions_dir,
            min_free_bytes=self.min_free_bytes,
            plan=self.plan_request,
        )

    @property
    def lease_name(self) -> str:
        """The name under which this process takes its lease."""
        return self.worker_name or f"{socket.gethostname()}-{os.getpid()}"
