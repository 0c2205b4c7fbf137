"""The seam between the engine and the device: NumPy arrays in, NumPy arrays out.

A backend does the arithmetic; it knows nothing of jobs or HTTP.

Dimension key: N tokens of a micro-batch, or of a prompt; K targets per position, V vocabulary,
S generated tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig, BaseModelInfo
from tuneserve_engine.core.grammar import Grammar
from tuneserve_engine.core.shapes import StaticShapes

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

PROMPT_TOKENS_PER_STEP = 32
"""Prompt tokens that cost about as much as one decoded token: prefill is batched, decoding is not.
"""

LOSS_NAMES = (
    *("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"),
    "stable_reinforce",
)
"""The loss names. The position of a name is its ``MicroBatch.loss_id``."""


class MicroBatch(NamedTuple):
    """One micro-batch: packed datums from any tenants, in blocks that share an adapter.

    N is the capacity of every micro-batch. The datums of a request are contiguous; padding
    (``segment_ids == -1``) fills the last block of each bin. Blocks from ``blocks`` on are
    unused.

    A datum that is divided among devices has a micro-batch for each part, without other datums. All
    its parts but the last fill equally many blocks, and ``first_visible_block`` counts the blocks
    of all of them.
    """

    tokens: IntArray  # [N]
    targets: IntArray  # [N, K]
    positions: IntArray  # [N] position of the token in its datum
    segment_ids: IntArray  # [N] number of the datum in this micro-batch, -1 on padding
    weights: FloatArray  # [N, K] cross_entropy only; 0 elsewhere
    old_logprobs: FloatArray  # [N] of the sampling policy
    advantages: FloatArray  # [N]
    clip_low: FloatArray  # [N] lower bound of the ratio
    clip_high: FloatArray  # [N] upper bound of the ratio
    sequence_mask: FloatArray  # [N] not 0: in gspo's sequence ratio; in stable_reinforce, sampled
    beta: FloatArray  # [N] dro; stable_reinforce: kl_coeff
    loss_id: IntArray  # [N] index into LOSS_NAMES
    block_request: IntArray  # [N / block] index into the batch's requests, side by side; -1: unused
    first_visible_block: IntArray  # [N / block] the first block that this block's tokens attend to
    blocks: int  # number of used blocks
    part: int | None = None  # the number of the part of a divided datum


class MicroBatchOutput(NamedTuple):
    """The result of one micro-batch, token by token; undefined on padding."""

    logprobs: FloatArray  # [N, K] natural log, temperature 1
    loss: FloatArray  # [N] each token's term, summed over its targets


@dataclass(frozen=True)
class TrainBatch:
    """A batch of requests that share a pass, and its micro-batches.

    The datums of a request keep their order. ``adapter_ids[i]`` is the adapter of request i. The
    gradient of a request is the sum of its gradients in each micro-batch, added in their order; of
    the requests that are in several micro-batches, each micro-batch has at most one.
    Callers guarantee that all adapters have one rank bucket, that there are at most
    ``StaticShapes.slots`` requests for that bucket, and that token ids are in the vocabulary.
    """

    adapter_ids: tuple[str, ...]
    forward_only: bool
    micro_batches: Sequence[MicroBatch]


@dataclass(frozen=True)
class TrainResult:
    """The result of a ``TrainBatch``: ``outputs`` has one entry per micro-batch.

    ``finite[i]`` is False if request i was left out because its loss or its gradient was not
    finite; the accumulator of its adapter is then exactly as before.
    """

    outputs: tuple[MicroBatchOutput, ...]
    finite: tuple[bool, ...]


@dataclass(frozen=True)
class SamplingRequest:
    """One prompt to continue and to score. A ``snapshot_id`` of None is the base model."""

    prompt: IntArray  # [N]
    snapshot_id: str | None
    seed: int
    num_samples: int
    max_tokens: int  # 0: only score the prompt
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to logits, by id
    presence_penalty: float = 0.0  # subtracted from logits of ids drawn so far
    frequency_penalty: float = 0.0  # the same, once for each time that the id was drawn
    grammar: Grammar | None = None  # what the text must be; wins over biases and penalties
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    topk_prompt: int = 0
    topk_sample: int = 0
    targets: IntArray | None = None  # [N-1, K] ids to score at positions 1..N-1, -1 = skip
    alt_tokens: int = 0  # draws per prompt position after the first
    stream: bool = False  # whether the client wants tokens before the sequence has ended
    owner: str = ""  # the tenant: cached prompt pages are shared within one owner only


@dataclass(frozen=True)
class TopK:
    """The k most likely tokens per position, most likely first."""

    token_ids: IntArray  # [n, k]
    logprobs: FloatArray  # [n, k]


@dataclass(frozen=True)
class SampledSequence:
    tokens: IntArray  # [S] the stop token or completing token included; S is 0 if none may be drawn
    logprobs: FloatArray  # [S] of the temperature-scaled distribution, before top-k and top-p
    stop_reason: Literal["stop", "length"]
    topk: TopK | None = None  # [S, k]


@dataclass(frozen=True)
class TokenDelta:
    """The next tokens of an unfinished sequence, from position ``start`` of the sequence on."""

    sequence: int
    start: int
    tokens: IntArray  # [S], S >= 1
    logprobs: FloatArray  # [S]
    topk: TopK | None = None  # [S, k]


@dataclass(frozen=True)
class SampleResult:
    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: FloatArray | None = None  # [N] temperature 1, [0] is NaN
    topk_prompt: TopK | None = None  # [N-1, k] for positions 1..N-1
    target_logprobs: FloatArray | None = None  # [N-1, K], 0 where the target is -1
    alt_tokens: TopK | None = None  # [N-1, k] draws and their logprobs at the request's temperature
    prompt_cache_hit_tokens: int = 0  # prompt tokens that did not have to be computed


@dataclass(frozen=True)
class SampleProgress:
    """The result of one slice of sampling.

    ``finished`` maps requests to their results, or to the reason why a request could not run.
    ``remaining`` is the number of unfinished sequences of every other request. ``work`` is the work
    done for each request, in decoded tokens: ``PROMPT_TOKENS_PER_STEP`` prefilled tokens count as
    one.

    ``new_tokens`` holds the tokens that each unfinished request with ``stream`` has drawn since the
    previous slice. If a sequence is restarted, its deltas restart too, with the same tokens.
    """

    finished: Mapping[str, SampleResult | Exception]
    remaining: Mapping[str, int]
    work: Mapping[str, float]
    new_tokens: Mapping[str, Sequence[TokenDelta]] = field(default_factory=dict)


class OutOfMemory(Exception):
    """The device has no room for this call. No adapter has changed; a smaller call may succeed."""


class DeviceFailed(Exception):
    """The device failed, perhaps for good: whatever runs next may fail too, for any tenant.

    The user of the backend has to start again in another process.
    """


def nothing() -> None:
    return None


class Backend(Protocol):
    """One base model with its training adapters and frozen snapshots.

    Calls come from one thread, one at a time, unless said otherwise. A method that raises has
    changed no adapter. It raises ``OutOfMemory`` if the device has no room and ``DeviceFailed`` if
    the device cannot go on.
    """

    @property
    def info(self) -> BaseModelInfo: ...

    @property
    def static_shapes(self) -> StaticShapes: ...

    @property
    def micro_batches_at_once(self) -> int:
        """The number of micro-batches that run at the same time, each on a device of its own."""
        ...

    @property
    def numerics_id(self) -> str:
        """The name of everything that bits depend on beside state and request.

        It covers device kind, threads, library versions, flags and base model. Backends with the
        same id compute the same bits.
        """
        ...

    @property
    def load_wait_s(self) -> float:
        """Seconds that calls have waited for adapters to load, since the start."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Gauges and counters by the names in ``metric_names.WORKER_METRICS``. Thread-safe."""
        ...

    def is_prepared(self, config: AdapterConfig) -> bool:
        """Return whether ``prepare`` would have nothing to do. Thread-safe."""
        ...

    def prepare(self, config: AdapterConfig) -> str:
        """Make what adapters of this kind share, which may take minutes; return its id.

        The id is empty if they share nothing. Thread-safe; concurrent callers wait. If it fails, it
        raises ``ServerError``, and so does every later call that needs the result. Optional:
        otherwise the first call that needs the result makes it.
        """
        ...

    def create_adapter(self, adapter_id: str, config: AdapterConfig) -> None:
        """Create a fresh adapter, which equals the base model."""
        ...

    def delete_adapter(self, adapter_id: str) -> None: ...

    def forward_backward(
        self, batch: TrainBatch, on_micro_batch_done: Callable[[], None] = nothing, /
    ) -> TrainResult:
        """Run the batch and add each finite request's gradient to its adapter's accumulator.

        Gradients are added in the order of ``batch.adapter_ids``. A ``forward_only`` batch touches
        no accumulator. ``on_micro_batch_done`` is called after every round but the last (the
        micro-batches that run at once are a round); it
        may call anything that touches none of the batch's adapters, another batch included. The
        results do not depend on what it calls.
        """
        ...

    def optim_steps(
        self, steps: Sequence[tuple[str, AdamwParams]]
    ) -> list[Mapping[str, float] | Exception]:
        """Apply AdamW to each adapter's accumulated gradient and clear the accumulator.

        An adapter may occur at most once. Returns, in order, the finite metrics of each step or the
        error that prevented it. The steps of as many adapters as fit on the device are dispatched
        before the first of them is waited for.
        """
        ...

    def prefetch(self, adapter_ids: Sequence[str]) -> None:
        """Announce the adapters that the next calls will probably need, most urgent first.

        Returns at once. Thread-safe.
        """
        ...

    def adapter_state(
        self, adapter_id: str, *, optimizer: bool, accumulator: bool = False
    ) -> AdapterState: ...

    def exported_adapter(self, adapter_id: str) -> AdapterState:
        """Return the weights of the LoRA with the adapter's effect, to sample from.

        Its pairs have the bits that training computes with.
        """
        ...

    def exported(self, state: AdapterState) -> AdapterState:
        """Return ``exported_adapter`` of a saved adapter.

        Needs the room on the device that training such an adapter needs. Raises ``ServerError`` if
        what adapters of its kind share is missing, and what ``load_adapter`` raises.
        """
        ...

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        """Create or replace the adapter, its accumulator included.

        Without moments, the optimizer starts fresh.
        """
        ...

    def has_snapshot(self, snapshot_id: str) -> bool: ...

    def pending_grammar(self, grammar: Grammar) -> Callable[[], object] | None:
        """Return the compilation to run before samples with this grammar; None if there is none.

        Thread-safe, and so is the compilation, which raises nothing: a grammar that cannot be
        compiled fails its samples. Optional: otherwise the call that samples compiles it.
        """
        ...

    def load_snapshot(self, snapshot_id: str, state: AdapterState) -> None:
        """Register frozen weights for sampling.

        May evict other snapshots to make room, but none that was registered or looked up since the
        last call that samples.
        """
        ...

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SampleResult]:
        """Return one result per request, in order.

        Tokens depend only on (seed, sample index, position) and the request. Sequences that
        ``sample_until`` left unfinished are dropped.
        """
        ...

    def sample_until(
        self, asked: Mapping[str, SamplingRequest], should_yield: Callable[[], bool]
    ) -> SampleProgress:
        """Continue the requests that the previous call left unfinished, and start the others.

        Returns when all have ended or, after at least one step, when ``should_yield()``. An
        unfinished request that is missing from ``asked`` is dropped.
        """
        ...
