"""What each kind of job does: a unit of jobs in, one outcome per job out. Nothing escapes as an
exception, and one bad job fails alone."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tuneserve_engine import checkpoint, jobs, sampling_wire, training_wire
from tuneserve_engine.adapters import AdapterConfig
from tuneserve_engine.backend.base import AdapterState, Backend, SampleResult, TrainResult
from tuneserve_engine.batch import Packed, PackRequest, pack, unpack
from tuneserve_engine.errors import EngineError, ServerError, UserError
from tuneserve_engine.files import FileStore
from tuneserve_engine.jobs import Job, JobKind, Outcome, Rejection
from tuneserve_engine.records import CheckpointKind, ModelStatus, Update
from tuneserve_engine.training_wire import TrainingData

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 80 * 2**20
"""Largest result: it passes to the store in one message. More than any ``forward_backward`` that
``training_wire`` accepts gives, so that none is refused after its gradient was added."""


class Operations:
    """Executes jobs on a backend. Called from one thread."""

    def __init__(self, backend: Backend, files: FileStore) -> None:
        self._backend = backend
        self._files = files
        self._configs: dict[str, AdapterConfig] = {}
        self._missing_gradients: set[str] = set()
        self._single: dict[JobKind, Callable[[Job], Outcome]] = {
            JobKind.CREATE_MODEL: self._create_model,
            JobKind.OPTIM_STEP: self._optim_step,
            JobKind.SAVE_WEIGHTS: self._save_weights,
            JobKind.LOAD_WEIGHTS: self._load_weights,
            JobKind.UNLOAD_MODEL: self._unload_model,
        }

    def execute(self, unit: Sequence[Job]) -> list[Outcome]:
        """One outcome per job, in order. All jobs of a unit have one kind."""
        kind = unit[0].kind
        if kind == JobKind.FORWARD_BACKWARD:
            return self._together(unit, self._forward_backward)
        if kind == JobKind.SAMPLE:
            return self._together(unit, self._sample)
        return [_attempt(job, self._single[kind]) for job in unit]

    def _together(
        self, unit: Sequence[Job], run: Callable[[Sequence[Job]], list[Outcome]]
    ) -> list[Outcome]:
        """Runs the unit in one pass; if the pass fails as a whole, each job alone."""
        if len(unit) > 1:
            try:
                return run(unit)
            except Exception:
                logger.exception("a unit of %d jobs failed; running them one by one", len(unit))
        return [_attempt(job, lambda job: run([job])[0]) for job in unit]

    def _config(self, job: Job) -> AdapterConfig:
        config = self._configs.get(job.model_id or "")
        if config is None:
            raise UserError(
                f"model {job.model_id} is not loaded: its creation failed; create a new model"
            )
        return config

    def _forward_backward(self, unit: Sequence[Job]) -> list[Outcome]:
        outcomes: dict[str, Outcome] = {}
        requests: list[tuple[Job, PackRequest]] = []
        for job in unit:
            try:
                config = self._config(job)
                data = training_wire.decode_request(job.payload, self._backend.info)
                requests.append((job, PackRequest(job.model_id or "", config.rank, data)))
            except EngineError as error:
                outcomes[job.request_id] = _rejected(job, error)
        if requests:
            packed = pack([request for _, request in requests], self._backend.lattice)
            result = self._backend.forward_backward(packed.unit)
            for index, (job, request) in enumerate(requests):
                # One by one: the gradients are in, and running the unit again would add them twice.
                answer = partial(_trained, packed, result, index, request.data)
                outcomes[job.request_id] = _attempt(job, answer)
        for job in unit:
            if outcomes[job.request_id].rejection is not None:
                self._missing_gradients.add(job.model_id or "")
        return [outcomes[job.request_id] for job in unit]

    def _sample(self, unit: Sequence[Job]) -> list[Outcome]:
        outcomes: dict[str, Outcome] = {}
        requests = []
        for job in unit:
            try:
                command = jobs.decode(job.payload, jobs.Sample)
                request = sampling_wire.to_request(command, self._backend.info)
                self._ensure_snapshot(request.snapshot_id)
                requests.append((job, command, request))
            except EngineError as error:
                outcomes[job.request_id] = _rejected(job, error)
        asked = [request for _, _, request in requests]
        results = self._backend.sample(asked) if asked else []
        for (job, command, _), result in zip(requests, results, strict=True):
            outcomes[job.request_id] = _attempt(job, partial(_sampled, command, result))
        return [outcomes[job.request_id] for job in unit]

    def _ensure_snapshot(self, snapshot_id: str | None) -> None:
        if snapshot_id is not None and not self._backend.has_snapshot(snapshot_id):
            self._backend.load_snapshot(snapshot_id, self._read(snapshot_id))

    def _read(self, file_id: str) -> AdapterState:
        return checkpoint.read(self._files.path(file_id), self._backend.info.name)

    def _create_model(self, job: Job) -> Outcome:
        config = jobs.decode(job.payload, jobs.CreateModel).config
        _check_targets(config)
        self._backend.create_adapter(job.model_id or "", config)
        self._configs[job.model_id or ""] = config
        return _created(job, {"model_id": job.model_id, "type": "create_model"})

    def _optim_step(self, job: Job) -> Outcome:
        self._config(job)
        command = jobs.decode(job.payload, jobs.OptimStep)
        if job.model_id in self._missing_gradients:
            logger.warning("%s steps although a forward_backward before it failed", job.model_id)
            self._missing_gradients.remove(job.model_id)
        metrics = self._backend.optim_step(job.model_id or "", command.params)
        # JSON has no other numbers, and a step that was taken must not be reported as failed.
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return _json(job, {"metrics": finite})

    def _save_weights(self, job: Job) -> Outcome:
        self._config(job)
        command = jobs.decode(job.payload, jobs.SaveWeights)
        training = command.kind == CheckpointKind.TRAINING
        state = self._backend.adapter_state(job.model_id or "", optimizer=training)
        name = self._backend.info.name
        if command.kind == CheckpointKind.EXTERNAL:
            members = checkpoint.peft_members(state, name)
            if command.age_recipients:
                members = checkpoint.encrypt(members, command.age_recipients)
        else:
            members = checkpoint.to_members(state, name)
        try:
            size = self._files.write(command.file_id, members)
        except OSError as error:
            raise ServerError(
                f"the checkpoint was not saved: {error.strerror or error}; earlier checkpoints are "
                "intact; free some disk and save again"
            ) from error
        if command.sampler is not None:
            body = {"sampling_session_id": command.sampler.key}
            return replace(_json(job, body), sampler=command.sampler)
        record = command.checkpoint
        if record is None:
            raise ServerError("a save names neither a checkpoint nor a sampling session")
        # Without "type", which clients check: three kinds of saves answer here.
        outcome = _json(job, {"path": record.key})
        return replace(
            outcome, checkpoint=replace(record, size_bytes=size), overwrite=command.overwrite
        )

    def _load_weights(self, job: Job) -> Outcome:
        command = jobs.decode(job.payload, jobs.LoadWeights)
        creates = command.config is not None
        state = self._read(command.file_id)
        if not creates:
            _check_same_shape(self._config(job), state, command.path)
        if command.optimizer and not state.first_moment:
            raise UserError(
                f"{command.path} has no optimizer state; load it without, or load a training "
                "checkpoint (tinker://…/weights/…)"
            )
        if not command.optimizer:
            state = replace(state, step=0, first_moment={}, second_moment={})
        self._backend.load_adapter(job.model_id or "", state)
        self._missing_gradients.discard(job.model_id or "")
        self._configs[job.model_id or ""] = state.config
        body = {"path": command.path, "model_id": job.model_id, "type": "load_weights"}
        return _created(job, body) if creates else _json(job, body)

    def _unload_model(self, job: Job) -> Outcome:
        self._missing_gradients.discard(job.model_id or "")
        if self._configs.pop(job.model_id or "", None) is not None:
            self._backend.delete_adapter(job.model_id or "")
        return _json(job, {})


def _trained(
    packed: Packed, result: TrainResult, index: int, data: TrainingData, job: Job
) -> Outcome:
    """What request ``index`` of the unit gave."""
    if not result.finite[index]:
        raise UserError(
            "the loss or its gradient is not finite; nothing was accumulated; check the learning "
            "rate, advantages and logprobs, or load an earlier checkpoint"
        )
    logprobs, loss = unpack(packed, result.outputs, index, data)
    return _protobuf(job, training_wire.encode_output(logprobs, loss))


def _sampled(command: jobs.Sample, result: SampleResult, job: Job) -> Outcome:
    if not all(np.isfinite(each.logprobs).all() for each in result.sequences):
        raise UserError(
            "the sampler's weights give logits that are not finite, so no token can be drawn; "
            "sample from a checkpoint saved before the training diverged"
        )
    return _protobuf(job, sampling_wire.encode_response(command, result))


def _attempt(job: Job, run: Callable[[Job], Outcome]) -> Outcome:
    try:
        return run(job)
    except EngineError as error:
        return _rejected(job, error)
    except Exception:
        logger.exception("%s of %s failed", job.kind, job.model_id or job.scope)
        return _rejected(job, ServerError(f"internal error while running {job.kind}; see the log"))


def _protobuf(job: Job, body: bytes) -> Outcome:
    if len(body) > MAX_BODY_BYTES:
        return _rejected(
            job,
            UserError(
                f"the result has {len(body)} bytes; the limit is {MAX_BODY_BYTES}; ask for fewer "
                "samples, tokens or top-k entries"
            ),
        )
    return Outcome(job.request_id, body, jobs.PROTOBUF)


def _json(job: Job, body: dict[str, Any]) -> Outcome:
    return Outcome(job.request_id, json.dumps(body, allow_nan=False).encode())


def _created(job: Job, body: dict[str, Any]) -> Outcome:
    return replace(_json(job, body), updates=(_status(job, ModelStatus.READY),))


def _status(job: Job, status: ModelStatus) -> Update:
    return Update("model", job.model_id or "", {"status": status.value})


def _rejected(job: Job, error: EngineError) -> Outcome:
    """The failure; a model whose first job failed has failed itself."""
    updates = (_status(job, ModelStatus.FAILED),) if job.position == 0 else ()
    return Outcome(job.request_id, rejection=Rejection.of(error), updates=updates)


def _check_targets(config: AdapterConfig) -> None:
    if not config.targets:
        raise UserError(
            "lora_config trains nothing: train_attn, train_mlp and train_unembed are all false; "
            "set at least one to true"
        )


def _check_same_shape(config: AdapterConfig, state: AdapterState, path: str) -> None:
    ours, theirs = (config.rank, config.targets), (state.config.rank, state.config.targets)
    if ours != theirs:
        raise UserError(
            f"{path} has rank {theirs[0]} on {', '.join(theirs[1])}; this model has rank {ours[0]} "
            f"on {', '.join(ours[1])}; create a new model from the checkpoint instead"
        )
