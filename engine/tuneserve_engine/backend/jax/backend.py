"""The JAX backend: the device's state, and the pure programs that run on it."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

from tuneserve_engine.adapters import kinds
from tuneserve_engine.adapters.kinds import kind_of
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import (
    DeviceFailed,
    SampleProgress,
    SampleResult,
    SamplingRequest,
    TrainBatch,
    TrainResult,
    nothing,
)
from tuneserve_engine.backend.jax.adapters.arrays import (
    TrainingAdapter,
    adapter_bytes,
    arrays_of,
    new_state,
    target_shapes,
)
from tuneserve_engine.backend.jax.adapters.cache import AdapterCache
from tuneserve_engine.backend.jax.adapters.device_svd import DeviceSvd, layers_in_files
from tuneserve_engine.backend.jax.adapters.room import AdapterRoom
from tuneserve_engine.backend.jax.adapters.spill_files import SpillFolder
from tuneserve_engine.backend.jax.device_errors import translate_device_errors
from tuneserve_engine.backend.jax.fingerprint import (
    NumericChoices,
    ask_for_float32,
    numerics_id,
    program_id,
)
from tuneserve_engine.backend.jax.memory.device import default_device
from tuneserve_engine.backend.jax.memory.planner import Device, gib, plan
from tuneserve_engine.backend.jax.mesh import DeviceMesh, process_devices
from tuneserve_engine.backend.jax.model.weights import load_base_model, read_config
from tuneserve_engine.backend.jax.model_info import base_model_info, tokenizer_json, tokenizer_of
from tuneserve_engine.backend.jax.programs.cache import ProgramCache, is_marked
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.sampling.grammars import GrammarCompiler
from tuneserve_engine.backend.jax.sampling.sampler import JaxSampler
from tuneserve_engine.backend.jax.training.trainer import Trainer
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.backend_options import BackendOptions, DType, Remat
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.grammar import Grammar
from tuneserve_engine.core.hub import resolve_base_model
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.telemetry.metric_names import WORKER_METRICS

_MEMORY = [name for name in WORKER_METRICS if name.startswith("memory_")]

_EXPORTED = "exported"
"""The id of an adapter that is loaded only to be exported; the ids of models have a colon."""

Stepped = dict[str, Mapping[str, float] | Exception]
"""By adapter: the metrics of its step, or the error that prevented it."""


class JaxBackend:
    """Implements ``backend.base.Backend`` on the devices of ``mesh``: JAX's default one if None.

    ``base_model`` is a directory or a hub id. ``static_shapes`` defaults to one over the whole
    context length. ``sample_rows`` sequences are decoded together, in ``kv_pages`` pages: as many
    as the longest need by default. Programs are compiled when they are needed, or by
    ``compile_ahead``: those of training only if it ``trains``. ``compile_cache_dir`` keeps them.
    """

    def __init__(  # noqa: PLR0913
        self,
        base_model: str,
        *,
        name: str,
        tokenizer_id: str,
        client_tokenizer_id: str = "",
        dtype: DType = "float32",
        static_shapes: StaticShapes | None = None,
        remat: Remat = "dots",
        sample_rows: int = 8,
        kv_pages: int | None = None,
        room: AdapterRoom | None = None,
        compile_cache_dir: Path | None = None,
        mesh: DeviceMesh | None = None,
        trains: bool = True,
    ) -> None:
        ask_for_float32(dtype)
        folder = resolve_base_model(base_model)
        mesh = mesh or DeviceMesh()
        model, config = load_base_model(str(folder), dtype=dtype, mesh=mesh)
        self.static_shapes = static_shapes or StaticShapes(config.context_length)
        self._shapes = target_shapes(config)
        self.info = base_model_info(
            folder, config, self.static_shapes, name, (tokenizer_id, client_tokenizer_id)
        )
        self.sample_rows = sample_rows
        """The number of sequences that are decoded together."""
        self.memory: Mapping[str, float] = dict.fromkeys(_MEMORY, 0.0)
        """The plan of the device's memory, in bytes; all zeros if no plan was made."""
        self._is_prepared_for = False  # whether ``prepare`` is called ahead of what needs it
        absent = bool(compile_cache_dir and is_marked(compile_cache_dir))
        choices = NumericChoices(dtype, self.static_shapes, remat, sample_rows, absent, mesh.count)
        self.numerics_id = numerics_id(folder, choices)
        model.remat = remat
        model.use_shapes(self.static_shapes)
        room = room or AdapterRoom()
        self._room_bytes = room.device_bytes
        self._spill_folder = SpillFolder(room.directory)
        self._svd = DeviceSvd(
            room.decompositions or self._spill_folder.path / "decompositions",
            layers_in_files(folder, dtype),
            self._shapes,
            self.static_shapes.max_rank,
            min_free_bytes=room.min_free_bytes,
            put=mesh.put,
        )
        self._adapters = AdapterCache(
            self._spill_folder.path,
            self._shapes,
            device_bytes=room.device_bytes,
            host_bytes=room.host_bytes - room.host_bytes // 4,
            frozen=self._svd,
            min_free_bytes=room.min_free_bytes,
            put=mesh.put,
        )
        kept = compile_cache_dir and ProgramCache(
            *(compile_cache_dir, program_id(folder, choices)),
            min_free_bytes=room.min_free_bytes,
            devices=mesh.devices,
        )
        self.programs = ProgramRegistry(kept or None, mesh)
        """The programs that are compiled or will be."""
        self._trainer = Trainer(self.programs, model, self.static_shapes)
        self._trains = trains
        if trains:
            self._trainer.declare()
        self._sampler = JaxSampler(
            *(self.programs, model, self.static_shapes, tokenizer_of(folder)),
            slots=sample_rows,
            pages=kv_pages,
            snapshot_bytes=room.snapshot_bytes,
            snapshot_host_bytes=room.host_bytes // 4,
            grammars=GrammarCompiler(
                partial(tokenizer_json, folder), config.vocab_size, config.eos_token_ids
            ),
        )

    @classmethod
    def from_options(cls, options: BackendOptions, device: Device | None = None) -> "JaxBackend":
        """Build a worker's backend for ``device``, or what is here; download a model of the hub."""
        folder = resolve_base_model(options.base_model, options.base_model_revision)
        planned = plan(read_config(folder), device or default_device(), options.plan)
        backend = cls(
            str(folder),
            name=options.served_name,
            tokenizer_id=options.tokenizer_id,
            client_tokenizer_id=options.client_tokenizer_id,
            dtype=planned.dtype,
            static_shapes=planned.static_shapes,
            remat=planned.remat,
            sample_rows=planned.sample_rows,
            kv_pages=planned.kv_pages,
            room=AdapterRoom(
                planned.adapter_device_bytes,
                planned.adapter_host_bytes,
                options.pages_dir,
                planned.snapshot_bytes,
                options.decompositions_dir,
                options.min_free_bytes,
            ),
            compile_cache_dir=options.compile_cache_dir,
            mesh=DeviceMesh(process_devices(planned.devices)),
            trains=planned.trains,
        )
        backend.memory = planned.memory
        if options.compile_ahead:
            backend.compile_ahead()
        return backend

    def compile_ahead(self) -> None:
        """Compile every program in the background; a call waits at most for its own program."""
        self.programs.compile_ahead(os.cpu_count() or 1)

    @property
    def micro_batches_at_once(self) -> int:
        return self.programs.mesh.count

    def is_prepared(self, config: AdapterConfig) -> bool:
        kind = kind_of(config)
        is_known = self._svd.decomposition.is_whole or not kind.needs_decomposition
        return is_known and self._trainer.is_prepared(kind)

    def prepare(self, config: AdapterConfig) -> str:
        kind = kind_of(config)
        if kind.needs_decomposition:
            self._is_prepared_for = True
            self._svd.decomposition.prepare()
        self._trainer.prepare(kind)
        return self._svd.decomposition.id if kind.needs_decomposition else ""

    def create_adapter(self, adapter_id: str, config: AdapterConfig) -> None:
        self.static_shapes.rank_bucket(config.rank)  # raises before anything of that size is made
        config = kinds.validated(config, self._shapes, self.static_shapes.max_rank)
        if kind_of(config).needs_decomposition:
            self._need_directions()
            config = replace(config, frozen=self._svd.decomposition.id)
        self._put(adapter_id, new_state(config, self._shapes, self._svd.svd_factors))

    def _need_directions(self) -> None:
        """Require the decomposition if ``prepare`` makes it; otherwise make it here.

        So it is never computed a second time.
        """
        if self._is_prepared_for:
            self._svd.decomposition.require()
        else:
            self._svd.decomposition.prepare()

    def _put(self, adapter_id: str, state: AdapterState) -> None:
        rank_bucket = self.static_shapes.rank_bucket(state.config.rank)
        self._check_room(state.config, rank_bucket)
        translate_device_errors(self._adapters.register, adapter_id, state, rank_bucket)

    def _check_room(self, config: AdapterConfig, rank_bucket: int) -> None:
        """Raise ``UserError`` if the device has too little room for adapters of this kind.

        The memory plan has room for every LoRA that the static shapes take, but not for what
        adapters of some other kinds share.
        """
        kind = kind_of(config)
        if not kind.needs_decomposition:
            return
        slots, size = (
            self.static_shapes.slots(rank_bucket) if self._trains else 1,
            adapter_bytes(self._shapes, rank_bucket, kind),
        )
        needed = slots * size + self._svd.bytes
        if needed > self._room_bytes:
            error = UserError(
                f"adapters of kind {kind.name} need {gib(needed)} of the device here: "
                f"{gib(self._svd.bytes)} that all of them share and {slots} times {gib(size)} "
                f"of rank {rank_bucket}, as many as one pass takes; there are "
                f"{gib(self._room_bytes)} for adapters; choose a lower rank or lora, or ask the "
                "operator for a lower max_rank, fewer request_slots or more memory"
            )
            error.no_room = True  # on this worker; another worker may be planned for it
            raise error

    def delete_adapter(self, adapter_id: str) -> None:
        self._adapters.remove(adapter_id)

    def adapter_state(
        self, adapter_id: str, *, optimizer: bool, accumulator: bool = False
    ) -> AdapterState:
        return translate_device_errors(
            partial(self._adapters.state, adapter_id, optimizer=optimizer, accumulator=accumulator)
        )

    def exported_adapter(self, adapter_id: str) -> AdapterState:
        if not kind_of(self._adapters.config(adapter_id)).program:
            return _relabelled(self.adapter_state(adapter_id, optimizer=False))
        (adapter,) = translate_device_errors(self._adapters.get, [adapter_id])
        return translate_device_errors(self._trainer.exported, adapter)

    def exported(self, state: AdapterState) -> AdapterState:
        kind = kind_of(state.config)
        if not kind.program:
            return _relabelled(state)
        if kind.needs_decomposition:
            self._svd.decomposition.require()  # computes nothing, unlike ``load_adapter``
        self.load_adapter(_EXPORTED, AdapterState(state.config, state.weights))
        try:
            return self.exported_adapter(_EXPORTED)
        finally:
            self.delete_adapter(_EXPORTED)

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        if kind_of(state.config).needs_decomposition:
            self._need_directions()
            self._svd.decomposition.check(state.config)
        self._put(adapter_id, state)

    def prefetch(self, adapter_ids: Sequence[str]) -> None:
        self._adapters.prefetch(adapter_ids)

    def forward_backward(
        self, batch: TrainBatch, between: Callable[[], None] = nothing, /
    ) -> TrainResult:
        adapters = partial(translate_device_errors, self._adapters.get, batch.adapter_ids)

        def resumed() -> list[TrainingAdapter]:
            between()
            return adapters()  # another call may have evicted them from the device

        return translate_device_errors(self._trainer.run_batch, batch, adapters(), resumed)

    def optim_steps(
        self, steps: Sequence[tuple[str, AdamwParams]]
    ) -> list[Mapping[str, float] | Exception]:
        asked = dict(steps)
        results: Stepped = {}
        for group in self._adapters.groups(list(asked)):
            results |= self._steps({adapter_id: asked[adapter_id] for adapter_id in group})
        return [results[adapter_id] for adapter_id, _ in steps]

    def _steps(self, asked: Mapping[str, AdamwParams]) -> Stepped:
        """Run the steps of adapters that fit on the device together.

        Raises ``DeviceFailed`` only: an earlier group has already taken its steps, so no caller may
        repeat the call.
        """
        try:
            adapters = translate_device_errors(self._adapters.get, list(asked))
        except DeviceFailed:
            raise
        except Exception as error:
            if len(asked) == 1:
                return dict.fromkeys(asked, error)
            alone = [self._steps({adapter_id: params}) for adapter_id, params in asked.items()]
            return {adapter_id: result for each in alone for adapter_id, result in each.items()}
        results: Stepped = {}
        norms: dict[str, jax.Array] = {}
        for (adapter_id, params), adapter in zip(asked.items(), adapters, strict=True):
            try:
                norms[adapter_id] = translate_device_errors(
                    self._trainer.start_step, adapter, params, donated=arrays_of(adapter)
                )
            except DeviceFailed:
                raise
            except Exception as error:
                results[adapter_id] = error
        try:
            waited = jax.device_get(norms)
        except jax.errors.JaxRuntimeError as error:  # any cause: the only copies are consumed
            raise DeviceFailed(f"a step failed on the device: {error}") from error
        return results | {name: {"grad_norm": float(norm)} for name, norm in waited.items()}

    def pending_grammar(self, grammar: Grammar) -> Callable[[], object] | None:
        return self._sampler.grammars.pending(grammar)

    def has_snapshot(self, snapshot_id: str) -> bool:
        return self._sampler.has_snapshot(snapshot_id)

    def load_snapshot(self, snapshot_id: str, state: AdapterState) -> None:
        translate_device_errors(self._sampler.load_snapshot, snapshot_id, state)

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SampleResult]:
        return translate_device_errors(self._sampler.sample, requests)

    def sample_until(
        self, asked: Mapping[str, SamplingRequest], should_yield: Callable[[], bool]
    ) -> SampleProgress:
        return translate_device_errors(self._sampler.sample_until, asked, should_yield)

    @property
    def load_wait_s(self) -> float:
        return self._adapters.waited_s

    @property
    def metrics(self) -> Mapping[str, float]:
        """Gauges and counters by the names in ``metric_names.WORKER_METRICS``."""
        pager, trained, sampled = self._adapters, self._trainer.counts, self._sampler.counts
        decomposition = self._svd.decomposition
        is_at_work = decomposition.is_at_work
        return {
            **self.programs.metrics,
            **self.memory,
            "weights_to_decompose": decomposition.weights if is_at_work else 0,
            "weights_decomposed": decomposition.done if is_at_work else 0,
            "tokens_trained_total": trained.tokens,
            "tokens_computed_total": trained.tokens_computed,
            "policy_tokens_total": trained.policy_tokens,
            "policy_logprob_gap_total": trained.policy_gap,
            "tokens_sampled_total": sampled.tokens,
            "lane_steps_total": sampled.slot_steps,
            "decode_slots": self.sample_rows,
            "samples_preempted_total": sampled.preempted,
            "prompt_tokens_total": sampled.prompt_tokens,
            "prompt_tokens_read_total": sampled.prompt_tokens_prefilled,
            "adapters": len(pager.ids),
            "adapters_on_device": pager.on_device,
            "adapters_paged_in_total": pager.loads,
            "adapters_paged_out_total": pager.evictions,
            "page_wait_seconds_total": pager.waited_s,
        }


def _relabelled(state: AdapterState) -> AdapterState:
    """Return the LoRA of the same effect of an adapter whose arrays are its pairs."""
    return AdapterState(kinds.exported(state.config), state.weights)
