"""What each kind of job does: a unit of jobs in, one outcome per job out. One bad job fails alone;
nothing escapes as an exception but ``DeviceFailed``, which is no job's fault."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tuneserve_engine import checkpoint, jobs, sampling_wire, training_wire
from tuneserve_engine.adapters import AdapterConfig
from tuneserve_engine.backend.base import (
    AdapterState,
    Backend,
    DeviceFailed,
    OutOfMemory,
    SampleResult,
    TrainResult,
)
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


MAX_HALVINGS = 3
"""How often a request's micro-batches are halved before it fails for lack of device memory."""


@dataclass
class _Resident:
    """A model on this device."""

    config: AdapterConfig
    position: int = 0  # every request before it has been executed
    missing_gradients: bool = False  # a forward_backward failed since the last step


class Operations:
    """Executes jobs on a backend. Called from one thread."""

    def __init__(self, backend: Backend, files: FileStore) -> None:
        self._backend = backend
        self._files = files
        self._residents: dict[str, _Resident] = {}
        self._single: dict[JobKind, Callable[[Job], Outcome]] = {
            JobKind.CREATE_MODEL: self._create_model,
            JobKind.OPTIM_STEP: self._optim_step,
            JobKind.SAVE_WEIGHTS: self._save_weights,
            JobKind.LOAD_WEIGHTS: self._load_weights,
            JobKind.UNLOAD_MODEL: self._unload_model,
        }

    @property
    def numerics_id(self) -> str:
        return self._backend.numerics_id

    def execute(self, unit: Sequence[Job]) -> list[Outcome]:
        """One outcome per job, in order. All jobs of a unit have one kind."""
        kind = unit[0].kind
        if kind == JobKind.FORWARD_BACKWARD:
            outcomes = self._together(unit, self._forward_backward)
        elif kind == JobKind.SAMPLE:
            outcomes = self._together(unit, self._sample)
        else:
            outcomes = [_attempt(job, self._single[kind]) for job in unit]
        for job in unit:
            if job.position is not None and job.model_id in self._residents:
                self._residents[job.model_id].position = job.position + 1
        return outcomes

    def capture(self, model_id: str) -> tuple[AdapterState, int] | None:
        """The model's whole state, and the position that it is for; None if it is not here."""
        resident = self._residents.get(model_id)
        if resident is None:
            return None
        state = self._backend.adapter_state(model_id, optimizer=True, accumulator=True)
        return state, resident.position

    def restore(self, model_id: str, state: AdapterState, position: int) -> None:
        """Brings a captured model back."""
        self._backend.load_adapter(model_id, state)
        self._residents[model_id] = _Resident(state.config, position)

    def reached(self, model_id: str, position: int) -> None:
        """Notes that the model's requests before ``position`` have been executed."""
        resident = self._residents.get(model_id)
        if resident is None:
            raise ServerError("its log does not start with its creation")
        resident.position = max(resident.position, position)

    def write(self, file_id: str, state: AdapterState) -> None:
        """Writes a captured state. Touches no model: may be called from another thread."""
        self._files.write(file_id, checkpoint.to_members(state, self._backend.info.name))

    def forget(self, model_id: str) -> None:
        """Frees what the model holds here; a no-op if it is not here."""
        if self._residents.pop(model_id, None) is not None:
            self._backend.delete_adapter(model_id)

    def _together(
        self, unit: Sequence[Job], run: Callable[[Sequence[Job], int], list[Outcome]]
    ) -> list[Outcome]:
        """Runs the unit in one pass; if the pass fails as a whole, each job alone."""
        if len(unit) > 1 and not any(job.halvings for job in unit):
            try:
                return run(unit, 0)
            except DeviceFailed:
                raise
            except OutOfMemory as error:
                logger.warning("no room for a unit of %d jobs, running each: %s", len(unit), error)
            except Exception:
                logger.exception("a unit of %d jobs failed; running them one by one", len(unit))
        return [_attempt(job, partial(self._alone, run)) for job in unit]

    def _alone(self, run: Callable[[Sequence[Job], int], list[Outcome]], job: Job) -> Outcome:
        """Runs one job, in smaller and smaller micro-batches while the device has no room."""
        most = MAX_HALVINGS if job.kind == JobKind.FORWARD_BACKWARD else 0
        for halvings in range(job.halvings, most + 1):
            try:
                return replace(run([job], halvings)[0], halvings=halvings)
            except OutOfMemory as error:
                logger.warning("no room for %s, halved %d times: %s", job.kind, halvings, error)
        too_large = UserError(
            f"the device has no memory for this {job.kind}, in micro-batches halved up to {most} "
            "times; nothing was changed; send shorter sequences, or fewer at once"
        )
        too_large.no_room = True
        raise too_large

    def _config(self, job: Job) -> AdapterConfig:
        return self._resident(job).config

    def _resident(self, job: Job) -> _Resident:
        resident = self._residents.get(job.model_id or "")
        if resident is None:
            raise UserError(
                f"model {job.model_id} is not loaded: its creation failed; create a new model"
            )
        return resident

    def _forward_backward(self, unit: Sequence[Job], halvings: int) -> list[Outcome]:
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
            asked = [request for _, request in requests]
            packed = pack(asked, self._backend.lattice, halvings=halvings)
            result = self._backend.forward_backward(packed.unit)
            for index, (job, request) in enumerate(requests):
                # One by one: the gradients are in, and running the unit again would add them twice.
                answer = partial(_trained, packed, result, index, request.data)
                outcomes[job.request_id] = _attempt(job, answer)
        for job in unit:
            failed = outcomes[job.request_id].rejection is not None
            if failed and job.model_id in self._residents:
                self._residents[job.model_id].missing_gradients = True
        return [outcomes[job.request_id] for job in unit]

    def _sample(self, unit: Sequence[Job], _halvings: int) -> list[Outcome]:
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
            self._backend.load_snapshot(snapshot_id, self.read(snapshot_id))

    def read(self, file_id: str) -> AdapterState:
        """The state in a file. Touches no model: may be called from another thread."""
        return checkpoint.read(self._files.path(file_id), self._backend.info.name)

    def _create_model(self, job: Job) -> Outcome:
        config = jobs.decode(job.payload, jobs.CreateModel).config
        _check_targets(config)
        self._backend.create_adapter(job.model_id or "", config)
        self._residents[job.model_id or ""] = _Resident(config)
        return _created(job, {"model_id": job.model_id, "type": "create_model"})

    def _optim_step(self, job: Job) -> Outcome:
        resident = self._resident(job)
        command = jobs.decode(job.payload, jobs.OptimStep)
        if resident.missing_gradients:
            logger.warning("%s steps although a forward_backward before it failed", job.model_id)
            resident.missing_gradients = False
        metrics = self._backend.optim_step(job.model_id or "", command.params)
        # JSON has no other numbers, and a step that was taken must not be reported as failed.
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return replace(_json(job, {"metrics": finite}), changed=True)

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
        state = self.read(command.file_id)
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
        self._residents[job.model_id or ""] = _Resident(state.config)
        body = {"path": command.path, "model_id": job.model_id, "type": "load_weights"}
        if creates:
            return _created(job, body)
        return replace(_json(job, body), changed=True)

    def _unload_model(self, job: Job) -> Outcome:
        self.forget(job.model_id or "")
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
    outcome = _protobuf(job, training_wire.encode_output(logprobs, loss))
    return replace(outcome, changed=not data.forward_only)


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
    except DeviceFailed:
        raise
    except EngineError as error:
        return _rejected(job, error)
    except OutOfMemory as error:
        logger.warning("no room for %s of %s: %s", job.kind, job.model_id or job.scope, error)
        full = ServerError(f"the device has no memory for {job.kind}; nothing was changed; retry")
        full.no_room = True
        return _rejected(job, full)
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
    return replace(_json(job, body), updates=(_status(job, ModelStatus.READY),), changed=True)


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
