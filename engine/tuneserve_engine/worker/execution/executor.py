"""The executor of each kind of job: a unit (batch of jobs) in, one answer per job out.

One bad job fails alone. The only exception that escapes is ``DeviceFailed``, the fault of none of
the jobs.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from tuneserve_engine.adapters import checkpoint
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import (
    Backend,
    DeviceFailed,
    OutOfMemory,
    SampleProgress,
    SamplingRequest,
    TrainBatch,
    TrainResult,
    nothing,
)
from tuneserve_engine.core import jobs
from tuneserve_engine.core.adapter import (
    AdamwParams,
    AdapterConfig,
    check_same_shape,
    check_targets,
)
from tuneserve_engine.core.errors import ServerError, UserError
from tuneserve_engine.core.jobs import Job, JobKind, Outcome
from tuneserve_engine.core.policies import SLICE_S
from tuneserve_engine.core.records import CheckpointKind
from tuneserve_engine.store.files import FileStore
from tuneserve_engine.telemetry import logs
from tuneserve_engine.worker.codecs import training as training_wire
from tuneserve_engine.worker.codecs.training import TrainingData
from tuneserve_engine.worker.execution.device_timer import DeviceTime, DeviceTimer
from tuneserve_engine.worker.execution.gradients import GradientRequest, GradientRunner, Results
from tuneserve_engine.worker.execution.outcomes import (
    BatchResult,
    DeferredOutcome,
    attempt,
    created,
    failed_together,
    failure,
    in_json,
    stepped,
)
from tuneserve_engine.worker.execution.packing import PackingRequest
from tuneserve_engine.worker.execution.preparation import Preparation, preparation_of
from tuneserve_engine.worker.execution.rescoring import Rescoring
from tuneserve_engine.worker.execution.sampling import RunningSamples, never
from tuneserve_engine.worker.scheduling.pace import Pace

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class _DeviceModel:
    """A model on this device."""

    config: AdapterConfig
    position: int = 0  # every request before it has been executed
    step: int = 0  # optimizer steps
    missing_gradients: bool = False  # a forward_backward failed since the last step


class JobExecutor:
    """An executor of jobs on a backend. Call it from one thread, unless a method says otherwise."""

    def __init__(
        self,
        backend: Backend,
        files: FileStore,
        *,
        rescore_samples: bool = False,
        slice_s: float = SLICE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._files = files
        self._meter = DeviceTimer(clock, lambda: backend.page_wait_s)
        self._pace = Pace(slice_s)
        self._residents: dict[str, _DeviceModel] = {}
        run = partial(self._run, nothing)
        self._rescoring = Rescoring(backend, run, self._sampled_from) if rescore_samples else None
        self._samples = RunningSamples(backend.info, self._sample_for, self._ensure_snapshot)
        self._single: dict[JobKind, Callable[[Job], Outcome]] = {
            JobKind.CREATE_MODEL: self._create_model,
            JobKind.LOAD_WEIGHTS: self._load_weights,
            JobKind.UNLOAD_MODEL: self._unload_model,
        }

    @property
    def numerics_id(self) -> str:
        return self._backend.numerics_id

    @property
    def have_listeners(self) -> bool:
        return self._samples.have_listeners

    def decode(self, job: Job) -> TrainingData:
        """Return the checked data of a ``forward_backward``.

        Touches no model, so any thread may call it.
        """
        return training_wire.decode_request(job.payload, self._backend.info)

    def preparation(self, of: Job | AdapterConfig) -> Preparation | None:
        """Return the work to do before a job can create a model, or an adapter of this
        configuration; None if there is none."""
        return preparation_of(self._backend, of)

    def look_ahead(self, model_ids: Sequence[str]) -> None:
        """Announce the models that the next batches need. Any thread may call it."""
        self._backend.look_ahead([each for each in model_ids if each in self._residents])

    def execute(
        self,
        unit: Sequence[Job],
        decoded: Mapping[str, "Future[TrainingData]"] | None = None,
        is_over: Callable[[], bool] = never,
        between: Callable[[], None] = nothing,
    ) -> BatchResult:
        """Run jobs of one kind; the device has finished all work for them on return.

        ``decoded`` has the results of ``decode`` for some of the jobs, by request id.

        Samples run only until ``is_over``. Samples that have not ended must be in the next batch of
        samples, where they continue; a sample that is missing there is given up.

        ``between`` is called after every micro-batch but the last, and may execute other batches,
        of other models; its device time is charged to none of these jobs.
        """
        with self._meter.unit() as reading:
            if unit[0].kind == JobKind.SAMPLE:
                return self._sample(unit, is_over, reading)
            answers = self._execute(unit, decoded or {}, partial(self._apart, between))
            shares, began_s = reading.shares, reading.began_s
            return BatchResult(unit, answers, reading.device_s, shares=shares, began_s=began_s)

    def _execute(
        self,
        unit: Sequence[Job],
        decoded: Mapping[str, "Future[TrainingData]"],
        between: Callable[[], None],
    ) -> list[DeferredOutcome]:
        kind = unit[0].kind
        if kind == JobKind.FORWARD_BACKWARD:
            answers = self._forward_backward(unit, decoded, between)
        elif kind == JobKind.OPTIM_STEP:
            answers = self._together(unit, self._optim_steps)
        elif kind == JobKind.SAVE_WEIGHTS:
            answers = [self._save_weights(job) for job in unit]
        else:
            answers = [_ready(attempt(job, self._single[kind])) for job in unit]
        for job in unit:
            if job.position is not None and job.model_id in self._residents:
                self._residents[job.model_id].position = job.position + 1
        return answers

    def _apart(self, between: Callable[[], None]) -> None:
        with self._meter.unit():
            between()

    def capture(self, model_id: str) -> tuple[AdapterState, int] | None:
        """Return the model's whole state and its log position; None if the model is not here."""
        resident = self._residents.get(model_id)
        if resident is None:
            return None
        state = self._backend.adapter_state(model_id, optimizer=True, accumulator=True)
        return state, resident.position

    def restore(self, model_id: str, state: AdapterState, position: int) -> None:
        """Load a captured model onto the device."""
        self._backend.load_adapter(model_id, state)
        self._residents[model_id] = _DeviceModel(state.config, position, state.step)

    def reached(self, model_id: str, position: int) -> None:
        """Note that the model's requests before ``position`` have been executed.

        Raises ``ServerError`` if the model is not here.
        """
        resident = self._residents.get(model_id)
        if resident is None:
            raise ServerError("its log does not start with its creation")
        resident.position = max(resident.position, position)

    def write(self, file_id: str, state: AdapterState) -> None:
        """Write a captured state to a file. Touches no model, so any thread may call it."""
        self._files.write(file_id, self._members(state))

    def forget(self, model_id: str) -> None:
        """Free everything that the model holds here; a no-op if the model is not here."""
        if self._residents.pop(model_id, None) is not None:
            self._backend.delete_adapter(model_id)

    def _together(
        self, unit: Sequence[Job], run: Callable[[Sequence[Job]], list[DeferredOutcome]]
    ) -> list[DeferredOutcome]:
        """Run the batch in one pass; if the pass fails as a whole, run each job alone."""
        try:
            return run(unit)
        except DeviceFailed:
            raise
        except Exception as error:
            if len(unit) == 1:
                return [_ready(failure(unit[0], error))]
            failed_together(unit, error)
        return [answer for job in unit for answer in self._together([job], run)]

    def _timed(self, request_id: str, call: Callable[[], T]) -> T:
        """Return the result of a backend call, and charge its time to one request."""
        return self._meter.timed(call, lambda _: {request_id: 1.0})

    def _config(self, job: Job) -> AdapterConfig:
        return self._resident(job).config

    def _resident(self, job: Job) -> _DeviceModel:
        resident = self._residents.get(job.model_id or "")
        if resident is None:
            raise UserError(
                f"model {job.model_id} is not loaded: its creation failed; create a new model"
            )
        return resident

    def _forward_backward(
        self,
        unit: Sequence[Job],
        decoded: Mapping[str, "Future[TrainingData]"],
        between: Callable[[], None],
    ) -> list[DeferredOutcome]:
        results: Results = {}
        asked = []
        for job in unit:
            try:
                config = self._config(job)
                data = self._data(job, decoded.get(job.request_id))
                asked.append(
                    GradientRequest(job, PackingRequest(job.model_id or "", config.rank, data))
                )
            except Exception as error:
                results[job.request_id] = error
        if asked:
            halvings = max(job.halvings for job in unit)  # above 0 only for a job that runs alone
            run = partial(self._run_paced, between)
            parameters = self._backend.info.parameters
            passes = GradientRunner(run, self._backend.lattice, parameters, self._pace)
            results |= passes.of(asked, halvings)
        return [self._gradient(job, results[job.request_id]) for job in unit]

    def _run_paced(
        self, between: Callable[[], None], unit: TrainBatch, computed: Mapping[str, float]
    ) -> TrainResult:
        started_s = self._meter.now_s()
        result = self._run(between, unit, computed)
        seconds = self._meter.now_s() - started_s
        self._pace.learn(unit.forward_only, sum(computed.values()), seconds)
        return result

    def _run(
        self, between: Callable[[], None], unit: TrainBatch, parts: Mapping[str, float]
    ) -> TrainResult:
        run = partial(self._backend.forward_backward, unit, between)
        return self._meter.timed(run, lambda _: parts)

    def _data(self, job: Job, decoded: "Future[TrainingData] | None") -> TrainingData:
        if decoded is None or decoded.cancel():  # not begun: decode here rather than wait
            return self.decode(job)
        return decoded.result()

    def _gradient(self, job: Job, result: DeferredOutcome | Exception) -> DeferredOutcome:
        if not isinstance(result, Exception):
            return result
        if job.model_id in self._residents:
            self._residents[job.model_id].missing_gradients = True
        return _ready(failure(job, result))

    def _optim_steps(self, unit: Sequence[Job]) -> list[DeferredOutcome]:
        answers: dict[str, DeferredOutcome] = {}
        asked = []
        for job in unit:
            try:
                resident = self._resident(job)
                params = jobs.decode(job.payload, jobs.OptimStep).params
            except Exception as error:
                answers[job.request_id] = _ready(failure(job, error))
                continue
            if resident.missing_gradients:
                logger.warning(
                    "%s steps although a forward_backward before it failed",
                    job.model_id,
                    extra=logs.of(job),
                )
                resident.missing_gradients = False
            asked.append((job, params))
        steps = [(job.model_id or "", params) for job, params in asked]
        assert len({model_id for model_id, _ in steps}) == len(steps)
        ids = [job.request_id for job, _ in asked]
        results = self._steps(dict(zip(ids, steps, strict=True)))
        for (job, params), result in zip(asked, results, strict=True):
            if isinstance(result, OutOfMemory) and len(steps) > 1:
                message = "no room for %s's step, taking it alone: %s"
                logger.warning(message, job.model_id, result, extra=logs.of(job))
                (answers[job.request_id],) = self._together([job], self._optim_steps)
            else:
                resident = self._resident(job)
                resident.step += not isinstance(result, Exception)
                step = partial(stepped, result, resident.step, params.learning_rate)
                answers[job.request_id] = _ready(attempt(job, step))
        return [answers[job.request_id] for job in unit]

    def _steps(
        self, asked: Mapping[str, tuple[str, AdamwParams]]
    ) -> list[Mapping[str, float] | Exception]:
        """Run the steps of ``asked``, by request id, and return the backend's results in order.

        The device time is split in proportion to the adapters' ranks.
        """
        ranks = [self._residents[model_id].config.rank for model_id, _ in asked.values()]

        def parts(results: Sequence[object]) -> dict[str, float]:
            told = zip(asked, ranks, results, strict=True)
            return {name: rank for name, rank, each in told if not isinstance(each, Exception)}

        run = partial(self._backend.optim_steps, list(asked.values()))
        return self._meter.timed(run, parts) if asked else []

    def _sample(
        self, unit: Sequence[Job], is_over: Callable[[], bool], reading: DeviceTime
    ) -> BatchResult:
        answers, left, work, parts = self._samples.go_on(unit, is_over)
        ended = [job for job in unit if job.request_id in answers]
        ready = [answers[job.request_id] for job in ended]
        if self._rescoring is not None:  # the tokens so far have other logprobs than the result
            parts = {}
        shares, began_s = reading.shares, reading.began_s
        return BatchResult(ended, ready, reading.device_s, left, work, parts, shares, began_s)

    def _sample_for(
        self, asked: Mapping[str, SamplingRequest], is_over: Callable[[], bool]
    ) -> SampleProgress:
        run = partial(self._backend.sample_for, asked, is_over)
        given = self._meter.timed(run, lambda given: given.work)
        if self._rescoring is None:
            return given
        return replace(given, ended=self._rescoring.of(asked, given.ended))

    def _ensure_snapshot(self, request_id: str, snapshot_id: str | None) -> None:
        if snapshot_id is not None and not self._backend.has_snapshot(snapshot_id):
            state = self._sampled_from(snapshot_id)
            self._timed(request_id, partial(self._backend.load_snapshot, snapshot_id, state))

    def _sampled_from(self, file_id: str) -> AdapterState:
        """Return the state to sample from, in exported form.

        The arrays of a training checkpoint are those of its own adapter kind.
        """
        return self._backend.exported(self.read(file_id))

    def read(self, file_id: str, name: str = "") -> AdapterState:
        """Return the state in a file; errors about a damaged file call it ``name``.

        Touches no model, so any thread may call it.
        """
        info = self._backend.info
        return checkpoint.read(self._files.path(file_id), info.name, info.revision, name=name)

    def _members(self, state: AdapterState, name: str = "") -> dict[str, bytes]:
        info = self._backend.info
        return checkpoint.to_members(state, info.name, info.revision, name=name)

    def _create_model(self, job: Job) -> Outcome:
        config = jobs.decode(job.payload, jobs.CreateModel).config
        check_targets(config)
        create = partial(self._backend.create_adapter, job.model_id or "", config)
        self._timed(job.request_id, create)
        self._residents[job.model_id or ""] = _DeviceModel(config)
        return created(job, {"model_id": job.model_id, "type": "create_model"})

    def _save_weights(self, job: Job) -> DeferredOutcome:
        """Copy the state now; the answer writes the copy to the file.

        So the device need not wait for a disk, and no client can ask for the file before the answer
        is stored.
        """
        try:
            self._config(job)
            command = jobs.decode(job.payload, jobs.SaveWeights)
            training = command.kind == CheckpointKind.TRAINING
            copy = partial(self._backend.adapter_state, job.model_id or "", optimizer=training)
            state = self._timed(job.request_id, copy)
        except Exception as error:
            return _ready(failure(job, error))
        return partial(attempt, job, partial(self._saved, command, state))

    def _saved(self, command: jobs.SaveWeights, state: AdapterState, job: Job) -> Outcome:
        info = self._backend.info
        if command.kind != CheckpointKind.TRAINING:
            state = self._backend.exported(state)
        if command.kind == CheckpointKind.EXTERNAL:
            members = checkpoint.peft_members(state, info.name, info.revision)
            if command.age_recipients:
                members = checkpoint.encrypt(members, command.age_recipients)
        else:
            members = self._members(state, command.checkpoint.key if command.checkpoint else "")
        try:
            size = self._files.write(command.file_id, members, spares_disk=True)
        except OSError as error:
            raise ServerError(
                f"the checkpoint was not saved: {error.strerror or error}; earlier checkpoints are "
                "intact; free some disk and save again"
            ) from error
        if command.sampler is not None:
            body = {"sampling_session_id": command.sampler.key}
            return replace(in_json(job, body), sampler=replace(command.sampler, size_bytes=size))
        record = command.checkpoint
        if record is None:
            raise ServerError("a save names neither a checkpoint nor a sampling session")
        # The body has no "type", which clients would check: three kinds of saves answer here.
        outcome = in_json(job, {"path": record.key})
        return replace(
            outcome, checkpoint=replace(record, size_bytes=size), overwrite=command.overwrite
        )

    def _load_weights(self, job: Job) -> Outcome:
        command = jobs.decode(job.payload, jobs.LoadWeights)
        creates = command.config is not None
        state = self.read(command.file_id, command.path)
        if not creates:
            check_same_shape(self._config(job), state.config, command.path)
        if command.optimizer and not state.first_moment:
            raise UserError(
                f"{command.path} has no optimizer state; load it without, or load a training "
                "checkpoint (tinker://…/weights/…)"
            )
        if not command.optimizer:
            state = replace(state, step=0, first_moment={}, second_moment={})
        self._timed(job.request_id, partial(self._backend.load_adapter, job.model_id or "", state))
        self._residents[job.model_id or ""] = _DeviceModel(state.config, step=state.step)
        body = {"path": command.path, "model_id": job.model_id, "type": "load_weights"}
        if creates:
            return created(job, body)
        return replace(in_json(job, body), changed=True)

    def _unload_model(self, job: Job) -> Outcome:
        self.forget(job.model_id or "")
        return in_json(job, {})


def _ready(outcome: Outcome) -> DeferredOutcome:
    return lambda: outcome
