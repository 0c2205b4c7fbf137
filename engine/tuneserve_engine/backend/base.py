"""The backend seam: NumPy in, NumPy out. What runs the arithmetic knows nothing of jobs or HTTP.

Dimension key: B rows of a micro-batch, T padded tokens, K targets per position, V vocabulary,
N tokens of a prompt, S generated tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from tuneserve_engine.adapters import AdamParams, AdapterConfig, BaseModelInfo

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Tensors = dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]

LOSS_NAMES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
"""Position = ``TrainBatch.loss_id``."""


class TrainBatch(NamedTuple):
    """One micro-batch: rows from any tenants, padded to the bucket that their requests chose.

    A row is one datum. Padding rows have ``row_request == -1``, padding positions ``valid == 0``.
    """

    tokens: IntArray  # [B, T]
    targets: IntArray  # [B, T, K]
    valid: FloatArray  # [B, T] 1 on real positions
    weights: FloatArray  # [B, T, K] cross_entropy only; 0 elsewhere
    old_logprobs: FloatArray  # [B, T] of the sampling policy
    advantages: FloatArray  # [B, T]
    clip_low: FloatArray  # [B, T] ratio bounds
    clip_high: FloatArray  # [B, T]
    sequence_mask: FloatArray  # [B, T] gspo: positions in the sequence ratio
    beta: FloatArray  # [B] dro
    loss_id: IntArray  # [B] index into LOSS_NAMES
    row_request: IntArray  # [B] index into the unit's requests, -1 on padding rows


class TrainOutput(NamedTuple):
    """What one micro-batch gave, row by row."""

    logprobs: FloatArray  # [B, T, K] natural log, temperature 1
    loss: FloatArray  # [B] sum over the row


@dataclass(frozen=True)
class TrainRequest:
    """One request of a unit: whose adapter it runs under, and whether gradients are kept."""

    adapter_id: str
    forward_only: bool


@dataclass(frozen=True)
class TrainUnit:
    """Requests that share a pass, and their micro-batches in the order of each request's rows.

    Callers guarantee that all rows of a micro-batch belong to requests of one rank class and one
    ``forward_only``, that at least one row is no padding, and that ids are in the vocabulary.
    """

    requests: tuple[TrainRequest, ...]
    batches: tuple[TrainBatch, ...]


@dataclass(frozen=True)
class TrainResult:
    """``outputs`` per micro-batch; ``finite[i]`` is False if request i was left out: its loss or
    gradient was not finite and its adapter's accumulator is exactly as before."""

    outputs: tuple[TrainOutput, ...]
    finite: tuple[bool, ...]


@dataclass(frozen=True)
class SampleRequest:
    """One prompt to continue, and to score. ``snapshot_id`` None = the base model."""

    prompt: IntArray  # [N]
    snapshot_id: str | None
    seed: int
    num_samples: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    topk_prompt: int = 0
    topk_sample: int = 0
    targets: IntArray | None = None  # [N-1, K] ids to score at positions 1..N-1, -1 = skip
    alt_tokens: int = 0  # draws per prompt position after the first


@dataclass(frozen=True)
class TopK:
    """The k most likely tokens per position, most likely first."""

    token_ids: IntArray  # [n, k]
    logprobs: FloatArray  # [n, k]


@dataclass(frozen=True)
class SampledSequence:
    tokens: IntArray  # [S], S >= 1, the stop token or completing token included
    logprobs: FloatArray  # [S] of the temperature-scaled distribution, before top-k and top-p
    stop_reason: Literal["stop", "length"]
    topk: TopK | None = None  # [S, k]


@dataclass(frozen=True)
class SampleResult:
    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: FloatArray | None = None  # [N] temperature 1, [0] is NaN
    topk_prompt: TopK | None = None  # [N-1, k] for positions 1..N-1
    target_logprobs: FloatArray | None = None  # [N-1, K], 0 where the target is -1
    alt_tokens: TopK | None = None  # [N-1, k] draws and their logprobs at the request's temperature


@dataclass(frozen=True)
class AdapterState:
    """A resumable adapter on the host. ``weights`` holds true-rank arrays (no padding):
    ``<target>.A`` [L, d_in, rank] and ``<target>.B`` [L, rank, d_out]; ``unembed`` without L.
    Moments, when asked for, have the same names, and so has the accumulated gradient, which is
    empty when there is none."""

    config: AdapterConfig
    weights: Tensors
    step: int = 0
    first_moment: Tensors = field(default_factory=dict)
    second_moment: Tensors = field(default_factory=dict)
    accumulator: Tensors = field(default_factory=dict)


class OutOfMemory(Exception):
    """The device has no room for this call; no adapter has changed. A smaller one may pass."""


class DeviceFailed(Exception):
    """The device is in trouble, and may be for good: whatever runs next may fail too, whoever asked
    for it. Its user has to start anew, in another process."""


class Lattice(Protocol):
    """The closed set of shapes; every choice depends on the request alone, never on its neighbours,
    so that a request has the same bits in any company."""

    def bucket(self, length: int) -> int:
        """Padded length T for a datum of ``length`` tokens."""
        ...

    def rows(self, bucket: int, datums: int) -> int:
        """Rows B of the micro-batches for a request with ``datums`` datums in this bucket."""
        ...

    def rank_class(self, rank: int) -> int:
        """The rank that adapters of ``rank`` are padded to."""
        ...

    def target_class(self, targets: int) -> int:
        """Padded K for ``targets`` targets per position."""
        ...


class Backend(Protocol):
    """Holds one base model, training adapters and frozen snapshots.

    Calls come from one thread, one at a time. A method that raises has changed no adapter; it
    raises ``OutOfMemory`` if the device has no room, ``DeviceFailed`` if it cannot go on.
    """

    @property
    def info(self) -> BaseModelInfo: ...

    @property
    def lattice(self) -> Lattice: ...

    @property
    def numerics_id(self) -> str:
        """Names everything that bits depend on beside state and request: device kind, threads,
        library versions, flags, base model. The same id, the same bits."""
        ...

    def create_adapter(self, adapter_id: str, config: AdapterConfig) -> None:
        """A fresh adapter: A from the seed, B zero, so that it equals the base model."""
        ...

    def delete_adapter(self, adapter_id: str) -> None: ...

    def forward_backward(self, unit: TrainUnit) -> TrainResult:
        """Runs the unit; adds each finite request's gradient to its adapter's accumulator, in the
        order of ``unit.requests``. ``forward_only`` requests touch no accumulator."""
        ...

    def optim_step(self, adapter_id: str, params: AdamParams) -> Mapping[str, float]:
        """Applies AdamW to the accumulated gradient and clears it; returns finite metrics."""
        ...

    def adapter_state(
        self, adapter_id: str, *, optimizer: bool, accumulator: bool = False
    ) -> AdapterState: ...

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        """Replaces or creates the adapter, its accumulator included; without moments the optimizer
        starts fresh."""
        ...

    def has_snapshot(self, snapshot_id: str) -> bool: ...

    def load_snapshot(self, snapshot_id: str, state: AdapterState) -> None:
        """Registers frozen weights for sampling; old ones may be dropped to make room."""
        ...

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """One result per request, in order. Tokens depend on (seed, sample index, position) and
        the request alone."""
        ...
