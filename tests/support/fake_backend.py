"""A backend without a model, for tests of the service: every number can be worked out by hand.

The logprob of token ``y`` after token ``x`` is ``-(1 + (x + y) % 8) / 8 + shift``. An adapter's
shift is ``scale`` times the sum, over its targets, layers and ranks r, of (the sum of A[:, r])
times (the sum of B[r, :]). It is zero while B is zero. ``cross_entropy`` is ``-Σ w·lp``, and every
other loss is ``-Σ advantages·lp``. A step is AdamW without bias correction or clipping.

Sampling counts upwards: sample s at position p of the sequence (the prompt's first token is at 0)
is token ``(seed + s + p) % V``. At temperature 0 it is ``p % V``. Logprobs ignore the temperature,
and every token reads as one letter: ``chr(97 + token % 26)``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tests.support.fake_samples import drawn_between, sampled
from tuneserve_engine.adapters import kinds
from tuneserve_engine.adapters.state import AdapterState, Tensors
from tuneserve_engine.backend.base import (
    LOSS_NAMES,
    FloatArray,
    IntArray,
    MicroBatch,
    MicroBatchOutput,
    OutOfMemory,
    SampleProgress,
    SampleResult,
    SamplingRequest,
    TokenDelta,
    TrainBatch,
    TrainResult,
    nothing,
)
from tuneserve_engine.core.adapter import (
    PROJECTIONS,
    UNEMBED,
    AdamwParams,
    AdapterConfig,
    BaseModelInfo,
    check_adam_params,
)
from tuneserve_engine.core.errors import EngineError, ServerError, UserError
from tuneserve_engine.core.grammar import Grammar
from tuneserve_engine.core.shapes import StaticShapes

LAYERS, WIDTH = 2, 4
FAKE_INFO = BaseModelInfo(
    name="tuneserve/fake",
    architecture="fake",
    vocab_size=64,
    context_length=64,
    max_rank=32,
    tokenizer_id="tuneserve/fake",
    eos_token_ids=(63,),
    parameters=1000,
    target_shapes=(
        *((target, (LAYERS, WIDTH, WIDTH)) for target in PROJECTIONS),
        (UNEMBED, (WIDTH, WIDTH)),
    ),
)


@dataclass
class _Adapter:
    """The adapter's state and gradient. ``state.accumulator`` stays empty."""

    state: AdapterState
    accumulator: Tensors
    accumulated: bool = False  # since the last step; the accumulator is zero until then


class FakeBackend:
    """Implements ``backend.base.Backend``.

    It stores the ``max_snapshots`` snapshots that were last loaded or used. If ``memory_tokens`` is
    given, it is the length of the longest micro-batch, with padding, that fits on this device.
    """

    def __init__(
        self,
        info: BaseModelInfo = FAKE_INFO,
        *,
        max_snapshots: int = 64,
        memory_tokens: int | None = None,
    ) -> None:
        self._info = info
        self._static_shapes = StaticShapes(
            info.context_length,
            block=8,
            chunk=16,
            requested_tokens=256,
            rank_buckets=(8, info.max_rank),
        )
        self._adapters: dict[str, _Adapter] = {}
        self._snapshots: dict[str, AdapterState] = {}
        self._wanted: set[str] = set()  # since the last call that samples
        self._places: dict[str, int] = {}  # the progress of streamed samples
        self._max_snapshots = max_snapshots
        self._memory_tokens = memory_tokens

    @property
    def info(self) -> BaseModelInfo:
        return self._info

    @property
    def static_shapes(self) -> StaticShapes:
        return self._static_shapes

    @property
    def micro_batches_at_once(self) -> int:
        return 1

    @property
    def numerics_id(self) -> str:
        return "fake-1"

    @property
    def load_wait_s(self) -> float:
        return 0.0

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"adapters": len(self._adapters)}

    def is_prepared(self, config: AdapterConfig) -> bool:
        return True

    def prepare(self, config: AdapterConfig) -> str:
        """Does nothing: every kind is a LoRA of its rank here."""
        return ""

    def exported_adapter(self, adapter_id: str) -> AdapterState:
        return self.exported(self.adapter_state(adapter_id, optimizer=False))

    def exported(self, state: AdapterState) -> AdapterState:
        return replace(state, config=kinds.exported(state.config))

    def create_adapter(self, adapter_id: str, config: AdapterConfig) -> None:
        self._static_shapes.rank_bucket(config.rank)
        weights: Tensors = {}
        for name, shape in _shapes(config).items():
            start = (1 + config.seed % 8) / 8 if name.endswith(".A") else 0
            weights[name] = np.full(shape, start, np.float32)
        self._adapters[adapter_id] = _fresh(AdapterState(config, weights))

    def delete_adapter(self, adapter_id: str) -> None:
        self._adapter(adapter_id)
        del self._adapters[adapter_id]

    @np.errstate(all="ignore")  # like a device, which returns NaN and continues
    def forward_backward(
        self, batch: TrainBatch, between: Callable[[], None] = nothing, /
    ) -> TrainResult:
        adapters = [self._adapter(adapter_id) for adapter_id in batch.adapter_ids]
        self._check_room(batch)
        slopes = [0.0] * len(adapters)  # d loss / d shift of each request
        finite = [True] * len(adapters)
        outputs = []
        for index, micro_batch in enumerate(batch.micro_batches):
            if index:
                between()
            output = MicroBatchOutput(
                np.zeros_like(micro_batch.weights), np.zeros_like(micro_batch.beta)
            )
            block = len(micro_batch.tokens) // len(micro_batch.block_request)
            for number in range(micro_batch.segment_ids.max() + 1):
                first, last = np.flatnonzero(micro_batch.segment_ids == number)[[0, -1]].tolist()
                index = int(micro_batch.block_request[first // block])
                part = slice(first, last + 1)
                slopes[index] += _run_datum(micro_batch, part, adapters[index].state, output)
                finite[index] &= bool(np.isfinite([*output.loss[part], slopes[index]]).all())
            outputs.append(output)
        if not batch.forward_only:
            for index, adapter in enumerate(adapters):
                finite[index] = finite[index] and _accumulate(adapter, slopes[index])
        return TrainResult(tuple(outputs), tuple(finite))

    def optim_steps(
        self, steps: Sequence[tuple[str, AdamwParams]]
    ) -> list[Mapping[str, float] | Exception]:
        results: list[Mapping[str, float] | Exception] = []
        for adapter_id, params in steps:
            try:
                results.append(self._optim_step(adapter_id, params))
            except EngineError as error:
                results.append(error)
        return results

    @np.errstate(all="ignore")
    def _optim_step(self, adapter_id: str, params: AdamwParams) -> Mapping[str, float]:
        adapter = self._adapter(adapter_id)
        check_adam_params(params)
        state = adapter.state
        weights: Tensors = {}
        first: Tensors = {}
        second: Tensors = {}
        for name, gradient in adapter.accumulator.items():
            first[name] = params.beta1 * state.first_moment[name] + (1 - params.beta1) * gradient
            second[name] = (
                params.beta2 * state.second_moment[name] + (1 - params.beta2) * gradient**2
            )
            decayed = state.weights[name] * (1 - params.learning_rate * params.weight_decay)
            root = np.sqrt(second[name]) + params.eps
            direction = np.where(first[name] == 0, 0, first[name] / root)
            weights[name] = (decayed - params.learning_rate * direction).astype(np.float32)
        norm = np.sqrt(sum(float(np.sum(g**2)) for g in adapter.accumulator.values()))
        self._adapters[adapter_id] = _fresh(
            AdapterState(state.config, weights, state.step + 1, _float32(first), _float32(second))
        )
        return {"grad_norm": float(norm)}

    def prefetch(self, adapter_ids: Sequence[str]) -> None:
        """Does nothing: all adapters are loaded."""

    def adapter_state(
        self, adapter_id: str, *, optimizer: bool, accumulator: bool = False
    ) -> AdapterState:
        adapter = self._adapter(adapter_id)
        state = adapter.state
        taken = AdapterState(state.config, _copied(state.weights))
        if optimizer:
            taken = replace(
                taken,
                step=state.step,
                first_moment=_copied(state.first_moment),
                second_moment=_copied(state.second_moment),
            )
        if accumulator and adapter.accumulated:
            taken = replace(taken, accumulator=_copied(adapter.accumulator))
        return taken

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        self._check_fits(state)
        self._adapters[adapter_id] = _fresh(state)

    def pending_grammar(self, grammar: Grammar) -> None:
        return None

    def has_snapshot(self, snapshot_id: str) -> bool:
        found = snapshot_id in self._snapshots
        self._wanted.add(snapshot_id)
        if found:
            self._snapshots[snapshot_id] = self._snapshots.pop(snapshot_id)  # now the newest
        return found

    def load_snapshot(self, snapshot_id: str, state: AdapterState) -> None:
        self._check_fits(state)
        self._snapshots.pop(snapshot_id, None)
        self._snapshots[snapshot_id] = state
        self._wanted.add(snapshot_id)
        self._make_room()

    def _make_room(self) -> None:
        for oldest in list(self._snapshots)[: -self._max_snapshots]:
            if oldest not in self._wanted:
                del self._snapshots[oldest]

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SampleResult]:
        return [sampled(request, self._row_logprobs(request)) for request in requests]

    def sample_until(
        self, asked: Mapping[str, SamplingRequest], should_yield: Callable[[], bool]
    ) -> SampleProgress:
        """A step is a whole request, or one token of every sequence of each streamed request."""
        ended: dict[str, SampleResult | EngineError] = {}
        streams: dict[str, SampleResult] = {}
        is_ended = False
        for name, request in asked.items():
            try:
                (result,) = self.sample([request])
            except EngineError as error:
                ended[name] = error
            else:
                if request.stream:
                    streams[name] = result
                    continue
                ended[name] = result
            if is_ended := should_yield():
                break
        drawn = {} if is_ended else self._drawn_on(streams, ended, should_yield)
        left = {name: asked[name].num_samples for name in asked if name not in ended}
        work = {name: len(asked[name].prompt) + asked[name].max_tokens for name in ended}
        if not left:
            self._wanted.clear()
            self._make_room()
        return SampleProgress(ended, left, work, drawn)

    def _drawn_on(
        self,
        streams: Mapping[str, SampleResult],
        ended: dict[str, SampleResult | EngineError],
        should_yield: Callable[[], bool],
    ) -> dict[str, list[TokenDelta]]:
        """Decode the streams until ``should_yield``, and add the ended ones to ``ended``."""
        before = {name: self._places.get(name, 0) for name in streams}
        self._places, left = dict(before), dict(streams)
        while left:
            for name, result in list(left.items()):
                self._places[name] += 1
                if self._places[name] >= max(len(each.tokens) for each in result.sequences):
                    ended[name] = left.pop(name)
                    del self._places[name]
            if should_yield():
                break
        return {
            name: drawn_between(result, before[name], self._places[name])
            for name, result in left.items()
        }

    def _row_logprobs(self, request: SamplingRequest) -> FloatArray:
        """[V, V]: the logprob of every token after every token."""
        shift = 0.0
        if request.snapshot_id is not None:
            if request.snapshot_id not in self._snapshots:
                raise ServerError(f"snapshot {request.snapshot_id} is not loaded; load it first")
            shift = _shift(self._snapshots[request.snapshot_id])
        ids = np.arange(self._info.vocab_size, dtype=np.int32)
        return np.float32(shift) + _base_logprobs(ids[:, None], ids[None, :])

    def _adapter(self, adapter_id: str) -> _Adapter:
        if adapter_id not in self._adapters:
            raise ServerError(f"adapter {adapter_id} does not exist here; create or load it first")
        return self._adapters[adapter_id]

    def _check_room(self, batch: TrainBatch) -> None:
        for micro_batch in batch.micro_batches:
            tokens = len(micro_batch.tokens)
            if self._memory_tokens is not None and tokens > self._memory_tokens:
                raise OutOfMemory(
                    f"the device has no room: a stream has {tokens} tokens, "
                    f"{self._memory_tokens} fit"
                )

    def _check_fits(self, state: AdapterState) -> None:
        self._static_shapes.rank_bucket(state.config.rank)
        expected = _shapes(state.config)
        groups = (state.weights, state.first_moment, state.second_moment, state.accumulator)
        for group in groups:
            shapes = {name: tensor.shape for name, tensor in group.items()}
            if shapes != expected and (shapes or group is state.weights):
                raise UserError(
                    f"the saved tensors are {shapes}; this base model needs {expected}; load them "
                    "on the base model that they were trained on"
                )


def _base_logprobs(x: IntArray, y: IntArray) -> FloatArray:
    return (-(1 + (x + y) % 8) / 8).astype(np.float32)


def _shapes(config: AdapterConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for target in config.targets:
        layers = () if target == UNEMBED else (LAYERS,)
        shapes[f"{target}.A"] = (*layers, WIDTH, config.rank)
        shapes[f"{target}.B"] = (*layers, config.rank, WIDTH)
    return shapes


def _fresh(state: AdapterState) -> _Adapter:
    """An adapter in this state. Missing moments and accumulators are zero."""
    first, second = state.first_moment or _zeros(state), state.second_moment or _zeros(state)
    resumed = replace(state, first_moment=first, second_moment=second, accumulator={})
    return _Adapter(resumed, state.accumulator or _zeros(state), bool(state.accumulator))


def _zeros(state: AdapterState) -> Tensors:
    return {name: np.zeros_like(tensor) for name, tensor in state.weights.items()}


def _copied(tensors: Tensors) -> Tensors:
    return {name: tensor.copy() for name, tensor in tensors.items()}


def _float32(tensors: Tensors) -> Tensors:
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def _scale(state: AdapterState) -> float:
    return kinds.kind_of(state.config).scale(state.config)


def _shift(state: AdapterState) -> float:
    """The amount that the adapter adds to every logprob."""
    total = 0.0
    for target in state.config.targets:
        into = state.weights[f"{target}.A"].sum(-2)  # [L, R]
        out = state.weights[f"{target}.B"].sum(-1)
        total += float((into * out).sum())
    return _scale(state) * total


def _run_datum(
    micro_batch: MicroBatch, part: slice, state: AdapterState, output: MicroBatchOutput
) -> float:
    """Fill the outputs of a datum. Returns the derivative of its loss by the adapter's shift."""
    tokens, targets = micro_batch.tokens[part][:, None], micro_batch.targets[part]
    logprobs = _base_logprobs(tokens, targets) + np.float32(_shift(state))
    if LOSS_NAMES[micro_batch.loss_id[part][0]] == "cross_entropy":
        weights = micro_batch.weights[part]
    else:
        weights = micro_batch.advantages[part][:, None]
    output.logprobs[part] = logprobs
    output.loss[part] = -np.sum(weights * logprobs, axis=1)
    return -float(np.sum(weights))


def _accumulate(adapter: _Adapter, slope: float) -> bool:
    """Add ``slope`` times the derivative of the shift by each weight, if the sum is finite."""
    state = adapter.state
    total = {}
    for target in state.config.targets:
        a, b = f"{target}.A", f"{target}.B"
        by_shift = np.float32(slope * _scale(state))
        total[a] = adapter.accumulator[a] + by_shift * state.weights[b].sum(-1)[..., None, :]
        total[b] = adapter.accumulator[b] + by_shift * state.weights[a].sum(-2)[..., :, None]
    finite = all(bool(np.isfinite(tensor).all()) for tensor in total.values())
    if finite:
        adapter.accumulator, adapter.accumulated = total, True
    return finite
