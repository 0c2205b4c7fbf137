"""The JAX backend: holds the device's state and runs the pure programs on it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from tokenizers import Tokenizer

from tuneserve_engine.adapters import AdamParams, AdapterConfig, BaseModelInfo
from tuneserve_engine.backend.base import (
    AdapterState,
    DeviceFailed,
    OutOfMemory,
    SampleRequest,
    SampleResult,
    TrainBatch,
    TrainOutput,
    TrainResult,
    TrainUnit,
)
from tuneserve_engine.backend.jax.adapters import (
    LoraWeights,
    TrainingAdapter,
    new_adapter,
    restored_adapter,
    saved_state,
    target_shapes,
)
from tuneserve_engine.backend.jax.binding import bind
from tuneserve_engine.backend.jax.models.weights import (
    DType,
    load_base_model,
    read_config,
    resolve_base_model,
)
from tuneserve_engine.backend.jax.numerics import numerics_id
from tuneserve_engine.backend.jax.optimizer import adamw_step, step_scalars
from tuneserve_engine.backend.jax.sample import Sampler
from tuneserve_engine.backend.jax.train import (
    RowsIn,
    RowsOut,
    add_rows,
    commit,
    score_rows,
    train_rows,
)
from tuneserve_engine.errors import ServerError
from tuneserve_engine.lattice import ShapeLattice

R = TypeVar("R")

_EXHAUSTED = "RESOURCE_EXHAUSTED"
"""XLA's only sign of it: every failure on the device is the same class."""
_OF_THE_PROGRAM = ("INVALID_ARGUMENT", "UNIMPLEMENTED")
"""What XLA says of a program that it will never run; other requests may need others."""


class BackendSettings(Protocol):
    """What the backend reads of the worker's settings."""

    @property
    def base_model(self) -> str: ...
    @property
    def served_name(self) -> str: ...
    @property
    def tokenizer_id(self) -> str: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def max_context_tokens(self) -> int: ...
    @property
    def batch_tokens(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def sample_rows(self) -> int: ...
    @property
    def compile_cache_dir(self) -> Path | None: ...


class JaxBackend:
    """Implements ``backend.base.Backend`` on JAX's default device.

    ``base_model`` is a directory or a hub id. ``lattice`` defaults to one over the model's whole
    context length; ``sample_rows`` sequences are decoded together. Programs are kept in
    ``compile_cache_dir``, when given, so that a restart does not compile them again.
    """

    def __init__(  # noqa: PLR0913
        self,
        base_model: str,
        *,
        name: str,
        tokenizer_id: str,
        dtype: DType = "float32",
        lattice: ShapeLattice | None = None,
        sample_rows: int = 8,
        compile_cache_dir: Path | None = None,
    ) -> None:
        if compile_cache_dir is not None:
            keep_programs(compile_cache_dir)
        folder = resolve_base_model(base_model)
        model, config = load_base_model(str(folder), dtype=dtype)
        self._lattice = lattice or ShapeLattice(config.context_length)
        if self._lattice.context_length > config.context_length:
            raise ValueError(
                f"the lattice has a context length of {self._lattice.context_length} tokens; "
                f"{name} was built for {config.context_length}; lower it"
            )
        self._info = BaseModelInfo(
            name=name,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            context_length=self._lattice.context_length,
            max_rank=self._lattice.max_rank,
            tokenizer_id=tokenizer_id,
            eos_token_ids=config.eos_token_ids,
        )
        self._shapes = target_shapes(config)
        self._numerics_id = numerics_id(
            folder, dtype=dtype, lattice=self._lattice, sample_rows=sample_rows
        )
        self._adapters: dict[str, TrainingAdapter] = {}
        self._sampler = Sampler(model, self._lattice, _tokenizer(folder), lanes=sample_rows)
        model.train()  # type: ignore[no-untyped-call]
        self._train = bind(model, train_rows)
        self._score = bind(model, score_rows)

    @classmethod
    def from_settings(cls, settings: BackendSettings) -> "JaxBackend":
        """The backend of a worker; downloads the base model first if it is a hub id."""
        folder = resolve_base_model(settings.base_model)
        lattice = ShapeLattice(
            min(settings.max_context_tokens, read_config(folder).context_length),
            token_budget=settings.batch_tokens,
            max_rows=settings.max_rows,
        )
        return cls(
            str(folder),
            name=settings.served_name,
            tokenizer_id=settings.tokenizer_id,
            dtype=settings.dtype,
            lattice=lattice,
            sample_rows=settings.sample_rows,
            compile_cache_dir=settings.compile_cache_dir,
        )

    @property
    def info(self) -> BaseModelInfo:
        return self._info

    @property
    def lattice(self) -> ShapeLattice:
        return self._lattice

    @property
    def numerics_id(self) -> str:
        return self._numerics_id

    def create_adapter(self, adapter_id: str, config: AdapterConfig) -> None:
        rank_class = self._lattice.rank_class(config.rank)
        self._adapters[adapter_id] = _on_device(new_adapter, config, self._shapes, rank_class)

    def delete_adapter(self, adapter_id: str) -> None:
        self._adapter(adapter_id)
        del self._adapters[adapter_id]

    def adapter_state(
        self, adapter_id: str, *, optimizer: bool, accumulator: bool = False
    ) -> AdapterState:
        return saved_state(self._adapter(adapter_id), optimizer=optimizer, accumulator=accumulator)

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        rank_class = self._lattice.rank_class(state.config.rank)
        self._adapters[adapter_id] = _on_device(restored_adapter, state, self._shapes, rank_class)

    def forward_backward(self, unit: TrainUnit) -> TrainResult:
        return _on_device(self._forward_backward, unit)

    def optim_step(self, adapter_id: str, params: AdamParams) -> Mapping[str, float]:
        return _on_device(self._optim_step, adapter_id, params)

    def has_snapshot(self, snapshot_id: str) -> bool:
        return self._sampler.has_snapshot(snapshot_id)

    def load_snapshot(self, snapshot_id: str, state: AdapterState) -> None:
        _on_device(self._sampler.load_snapshot, snapshot_id, state)

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        return _on_device(self._sampler.sample, requests)

    def _forward_backward(self, unit: TrainUnit) -> TrainResult:
        adapters = [self._adapter(request.adapter_id) for request in unit.requests]
        rows: list[RowsOut] = []
        scratch: dict[int, LoraWeights] = {}
        for batch in unit.batches:
            out, gradient = self._run(batch, unit, adapters)
            rows.append(out)
            if gradient is not None:
                for index in _requests_of(batch):
                    mine = batch.row_request == index
                    scratch[index] = add_rows(scratch.get(index), gradient, mine)
        # Waits here: whatever fails on the device fails before an accumulator is replaced.
        host: list[Any] = jax.device_get(rows)
        finite = [True] * len(unit.requests)
        for batch, out in zip(unit.batches, host, strict=True):
            for index in _requests_of(batch):
                finite[index] &= bool(out.finite[batch.row_request == index].all())
        finite = self._commit(unit, scratch, finite)
        outputs = tuple(TrainOutput(out.logprobs, out.loss) for out in host)
        return TrainResult(outputs, tuple(finite))

    def _optim_step(self, adapter_id: str, params: AdamParams) -> Mapping[str, float]:
        adapter = self._adapter(adapter_id)
        scalars = step_scalars(params, adapter.step + 1)
        stepped = adamw_step(
            adapter.weights,
            adapter.first_moment,
            adapter.second_moment,
            adapter.accumulator,
            scalars,
        )
        # Waits here: a step that fails on the device fails before it replaces anything.
        jax.block_until_ready(stepped)  # type: ignore[no-untyped-call]
        adapter.weights = stepped.weights
        adapter.first_moment = stepped.first_moment
        adapter.second_moment = stepped.second_moment
        adapter.accumulator = stepped.accumulator
        adapter.accumulated = False
        adapter.step += 1
        return {"grad_norm": float(stepped.grad_norm)}

    def _run(
        self, batch: TrainBatch, unit: TrainUnit, adapters: Sequence[TrainingAdapter]
    ) -> tuple[RowsOut, LoraWeights | None]:
        """Dispatches one micro-batch. Padding rows borrow the adapter of the batch's first request:
        nothing reads what they give."""
        first = _requests_of(batch)[0]
        of_row = [adapters[first if index < 0 else index] for index in batch.row_request.tolist()]
        weights = tuple(adapter.weights for adapter in of_row)
        scale = np.array([adapter.config.scale for adapter in of_row], np.float32)
        rows = RowsIn.of(batch)
        if unit.requests[first].forward_only:
            return self._score(weights, scale, rows), None
        out, gradient = self._train(weights, scale, rows)
        return out, gradient

    def _commit(
        self, unit: TrainUnit, scratch: dict[int, LoraWeights], finite: list[bool]
    ) -> list[bool]:
        """Adds each finite request to its adapter's accumulator, all of them or, on an exception,
        none; returns which requests are finite, gradients included."""
        accumulators: dict[str, LoraWeights] = {}
        checks: dict[int, Any] = {}
        for index, request in enumerate(unit.requests):
            if finite[index] and index in scratch:
                name = request.adapter_id
                before = accumulators.get(name, self._adapters[name].accumulator)
                accumulators[name], checks[index] = commit(before, scratch.pop(index))
        checked: dict[int, np.bool_] = jax.device_get(checks)
        jax.block_until_ready(accumulators)  # type: ignore[no-untyped-call]
        for name, accumulator in accumulators.items():
            self._adapters[name].accumulator = accumulator
        for index, request in enumerate(unit.requests):
            self._adapters[request.adapter_id].accumulated |= bool(checked.get(index, False))
        return [ok and bool(checked.get(index, True)) for index, ok in enumerate(finite)]

    def _adapter(self, adapter_id: str) -> TrainingAdapter:
        adapter = self._adapters.get(adapter_id)
        if adapter is None:
            raise ServerError(
                f"adapter {adapter_id!r} is not on this device ({len(self._adapters)} are); "
                "create or load it first"
            )
        return adapter


def keep_programs(directory: Path) -> None:
    """Makes JAX store every compiled program in ``directory`` and look there first."""
    jax.config.update("jax_compilation_cache_dir", str(directory))  # type: ignore[no-untyped-call]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # type: ignore[no-untyped-call]
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)  # type: ignore[no-untyped-call]


def _on_device(call: Callable[..., R], *args: object) -> R:
    """What the call returns. Raises OutOfMemory if the device, or the host, had no room for it,
    DeviceFailed if the device is in trouble.

    OutOfMemory has no cause: the failed call's frames, and with them its arrays, are gone by the
    time that somebody tries a smaller one.
    """
    try:
        return call(*args)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        reason = (str(error).splitlines() or [""])[0]
        if isinstance(error, jax.errors.JaxRuntimeError) and _EXHAUSTED not in str(error):
            if reason.startswith(_OF_THE_PROGRAM):
                raise
            raise DeviceFailed(f"the device failed: {reason}") from error
    raise OutOfMemory(f"the device has no room: {reason or 'out of memory'}")


def _tokenizer(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.is_file() else None


def _requests_of(batch: TrainBatch) -> list[int]:
    """Indices of the requests with rows in the batch, in order."""
    return sorted({index for index in batch.row_request.tolist() if index >= 0})
