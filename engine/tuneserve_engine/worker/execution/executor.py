"""The executor of each kind of job: a batch of jobs in, one deferred outcome per job out.

One bad job fails alone. The only exception that escapes is ``DeviceFailed``, the fault of none of
the jobs.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from tuneserve_engine.adapters import checkpoint
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import (
    Backend,
    DeviceFailed,
    OutOfMemory,
    nothing,
)
from tuneserve_engine.core import jobs
from tuneserve_engine.core.adapter import (
    AdamwParams,
    AdapterConfig,
    check_same_shape,
    check_targets,
)
from tuneserve_engine.core.errors import FilesAway, ServerError, UserError
from tuneserve_engine.core.jobs import Job, JobKind, Outcome
from tuneserve_engine.core.policies import SLICE_S
from tuneserve_engine.core.records import CheckpointKind
from tuneserve_engine.store.files_base import Files
from tuneserve_engine.telemetry import logs
from tuneserve_engine.worker.codecs import training as training_wire
from tuneserve_engine.worker.codecs.training import TrainingData
from tuneserve_engine.worker.execution.custom_losses import run_requests
from tuneserve_engine.worker.execution.device_timer import DeviceTimer
from tuneserve_engine.worker.execution.gradients import GradientRequest, GradientRunner, Results
from tuneserve_engine.worker.execution.outcomes import (
    BatchResult,
    DeferredOutcome,
    attempt,
    created,
    failed_together,
    failure,
    in_json,
    loaded_body,
    stepped,
)
from tuneserve_engine.worker.execution.packing import PackingRequest
from tuneserve_engine.worker.execution.preparation import Preparation, pending_preparation
from tuneserve_engine.worker.execution.read_ahead import ReadSnapshots
from tuneserve_engine.worker.execution.rescoring import Rescoring
from tuneserve_engine.worker.execution.sampling import RunningSamples, never
from tuneserve_engine.worker.scheduling.pace import Pace

logger = logging.getLogger(__name__)


@dataclass
class DeviceModel:
    """A model on this device."""

    config: AdapterConfig
    position: int = 0  # every request before it has been executed
    step: int = 0  # optimizer steps
    missing_gradients: bool = False  # a forward_backward failed since the last step


class _Models(dict[str, DeviceModel]):
    """The models on this device, by id; ``models[model_id]`` refuses one that is not here."""

    def __missing__(self, model_id: str) -> DeviceModel:
        raise UserError(f"model {model_id} is not loaded: its creation failed; create a new model")


class JobExecutor:
    """An executor of jobs on a backend. Call it from one thread, unless a method says otherwise."""

    def __init__(
        self,
        backend: Backend,
        files: Files,
        *,
        rescore_samples: bool = False,
        slice_s: float = SLICE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._files = files
        self._timer = DeviceTimer(clock, lambda: backend.load_wait_s)
        self._gradients = GradientRunner(backend, self._timer, Pace(slice_s))
        self._models = _Models()
        rescoring = Rescoring(backend, self._timer, self.read_state)
        self.snapshots = ReadSnapshots(self.read_state)
        """The snapshots that were read before their samples began."""
        self._samples = RunningSamples(
            backend, self._timer, self.snapshots, rescoring if rescore_samples else None
        )
        self._single: dict[JobKind, Callable[[Job], Outcome]] = {
            JobKind.CREATE_MODEL: self._create_model,
            JobKind.LOAD_WEIGHTS: self._load_weights,
            JobKind.UNLOAD_MODEL: self._unload_model,
        }

    @property
    def numerics_id(self) -> str:
        return self._backend.numerics_id

    @property
    def has_streams(self) -> bool:
        return self._samples.has_streams

    def decode_payload(self, job: Job) -> TrainingData:
        """Return the checked data of a ``forward_backward``.

        Touches no model, so any thread may call it.
        """
        return training_wire.decode_request(job.payload, self._backend.info)

    def pending_preparation(self, of: Job | AdapterConfig) -> Preparation | None:
        """Return the work to do before a job, or an adapter of this configuration; see there."""
        return pending_preparation(self._backend, of)

    def prefetch(self, model_ids: Sequence[str]) -> None:
        """Announce the models that the next batches need. Any thread may call it."""
        self._backend.prefetch([each for each in model_ids if each in self._models])

    def execute_batch(
        self,
        batch: Sequence[Job],
        decoded: Mapping[str, "Future[TrainingData]"] | None = None,
        should_yield: Callable[[], bool] = never,
        on_micro_batch_done: Callable[[], None] = nothing,
    ) -> BatchResult:
        """Run jobs of one kind; the device has finished all work for them on return.

        ``decoded`` has the results of ``decode`` for some of the jobs, by request id.

        Samples run only until ``should_yield``. Samples that have not ended must be in the next
        batch of samples, where they continue; a sample that is missing there is given up.

        ``on_micro_batch_done`` is called after every round but the last, and may execute
        other batches, of other models; its device time is charged to none of these jobs.
        """
        kind = batch[0].kind
        with self._timer.time_batch() as time:
            if kind == JobKind.SAMPLE:
                result = self._samples.advance(batch, should_yield)
            elif kind == JobKind.FORWARD_BACKWARD:
                interrupt = partial(self._run_interruption, on_micro_batch_done)
                result = self.forward_backward(batch, decoded or {}, interrupt)
            elif kind == JobKind.OPTIM_STEP:
                result = BatchResult(batch, self._run_together_or_alone(batch, self._optim_steps))
            elif kind == JobKind.SAVE_WEIGHTS:
                result = BatchResult(batch, [self._save_weights(job) for job in batch])
            else:
                result = BatchResult(batch, [_ready(attempt(j, self._single[kind])) for j in batch])
        for job in batch:
            model = self._models.get(job.model_id or "")
            if model is not None and job.position is not None:
                model.position = job.position + 1
        return replace(result, device_s=time.device_s, shares=time.shares, began_s=time.began_s)

    def _run_interruption(self, on_micro_batch_done: Callable[[], None]) -> None:
        with self._timer.time_batch():
            on_micro_batch_done()

    def capture_model(self, model_id: str) -> tuple[AdapterState, int] | None:
        """Return the model's whole state and its log position; None if the model is not here."""
        model = self._models.get(model_id)
        if model is None:
            return None
        state = self._backend.adapter_state(model_id, optimizer=True, accumulator=True)
        return state, model.position

    def restore_model(self, model_id: str, state: AdapterState, position: int) -> None:
        """Load a captured model onto the device."""
        self._backend.load_adapter(model_id, state)
        self._models[model_id] = DeviceModel(state.config, position, state.step)

    def mark_executed(self, model_id: str, position: int) -> None:
        """Note that the model's requests before ``position`` have been executed.

        Raises ``ServerError`` if the model is not here.
        """
        model = self._models.get(model_id)
        if model is None:
            raise ServerError("its log does not start with its creation")
        model.position = max(model.position, position)

    def write_state(self, file_id: str, state: AdapterState) -> None:
        """Write a captured state to a file. Touches no model, so any thread may call it."""
        self._files.write(file_id, self._members(state))

    def forget_model(self, model_id: str) -> None:
        """Free everything that the model holds here; a no-op if the model is not here."""
        if self._models.pop(model_id, None) is not None:
            self._backend.delete_adapter(model_id)

    def _run_together_or_alone(
        self, batch: Sequence[Job], run: Callable[[Sequence[Job]], list[DeferredOutcome]]
    ) -> list[DeferredOutcome]:
        """Run the batch in one pass; if the pass fails as a whole, run each job alone."""
        try:
            return run(batch)
        except DeviceFailed:
            raise
        except Exception as error:
            if len(batch) == 1:
                return [_ready(failure(batch[0], error))]
            failed_together(batch, error)
        return [answer for job in batch for answer in self._run_together_or_alone([job], run)]

    def forward_backward(
        self,
        batch: Sequence[Job],
        decoded: Mapping[str, "Future[TrainingData]"],
        on_micro_batch_done: Callable[[], None],
    ) -> BatchResult:
        """Run ``forward_backward`` jobs in as few passes as possible; see ``execute_batch``."""
        results: Results = {}
        requests = []
        for job in batch:
            try:
                model_id = job.model_id or ""
                rank = self._models[model_id].config.rank
                ahead = decoded.get(job.request_id)
                if ahead is None or ahead.cancel():  # not begun: decode here rather than wait
                    data = self.decode_payload(job)
                else:
                    data = ahead.result()
                requests.append(GradientRequest(job, PackingRequest(model_id, rank, data)))
            except Exception as error:
                results[job.request_id] = error
        if requests:
            halvings = max(job.halvings for job in batch)  # above 0 only for a job that runs alone
            results |= run_requests(self._gradients, requests, on_micro_batch_done, halvings)
        answers = []
        for job in batch:
            result = results[job.request_id]
            if isinstance(result, Exception):
                model = self._models.get(job.model_id or "")
                if model is not None:
                    model.missing_gradients = True
                result = _ready(failure(job, result))
            answers.append(result)
        return BatchResult(batch, answers)

    def _optim_steps(self, batch: Sequence[Job]) -> list[DeferredOutcome]:
        answers: dict[str, DeferredOutcome] = {}
        steps: dict[str, tuple[Job, AdamwParams]] = {}
        for job in batch:
            try:
                model = self._models[job.model_id or ""]
                params = jobs.decode(job.payload, jobs.OptimStep).params
            except Exception as error:
                answers[job.request_id] = _ready(failure(job, error))
                continue
            if model.missing_gradients:
                logger.warning(
                    "%s steps although a forward_backward before it failed",
                    job.model_id,
                    extra=logs.job_fields(job),
                )
                model.missing_gradients = False
            steps[job.request_id] = job, params
        results = self._step_adapters(list(steps.values())) if steps else []
        for (job, params), result in zip(steps.values(), results, strict=True):
            if isinstance(result, OutOfMemory) and len(steps) > 1:
                message = "no room for %s's step, taking it alone: %s"
                logger.warning(message, job.model_id, result, extra=logs.job_fields(job))
                (answers[job.request_id],) = self._run_together_or_alone([job], self._optim_steps)
            else:
                model = self._models[job.model_id or ""]
                model.step += not isinstance(result, Exception)
                step = partial(stepped, result, model.step, params.learning_rate)
                answers[job.request_id] = _ready(attempt(job, step))
        return [answers[job.request_id] for job in batch]

    def _step_adapters(
        self, steps: Sequence[tuple[Job, AdamwParams]]
    ) -> list[Mapping[str, float] | Exception]:
        """Return the backend's result of each step, in order.

        The device time is split in proportion to the adapters' ranks.
        """
        asked = [(job.model_id or "", params) for job, params in steps]
        assert len({model_id for model_id, _ in asked}) == len(asked)
        with self._timer.charge() as parts:
            results = self._backend.optim_steps(asked)
            for (job, _), result in zip(steps, results, strict=True):
                if not isinstance(result, Exception):
                    parts[job.request_id] = self._models[job.model_id or ""].config.rank
        return results

    def read_state(self, file_id: str, name: str = "") -> AdapterState:
        """Return the state in a file; errors about a damaged file call it ``name``.

        Touches no model, so any thread may call it. Raises ``FilesAway`` if the files cannot be
        read now.
        """
        info = self._backend.info
        try:
            folder = self._files.path(file_id)
        except OSError as error:
            raise FilesAway(
                f"the checkpoint's file cannot be read now: {error.strerror or error}; nothing was "
                "changed; send the request again"
            ) from error
        return checkpoint.read_checkpoint(folder, info.name, info.revision, name=name)

    def _members(self, state: AdapterState, name: str = "") -> dict[str, bytes]:
        info = self._backend.info
        return checkpoint.to_members(state, info.name, info.revision, name=name)

    def _create_model(self, job: Job) -> Outcome:
        config = jobs.decode(job.payload, jobs.CreateModel).config
        check_targets(config)
        with self._timer.charge({job.request_id: 1.0}):
            self._backend.create_adapter(job.model_id or "", config)
        self._models[job.model_id or ""] = DeviceModel(config)
        return created(job, {"model_id": job.model_id, "type": "create_model"})

    def _save_weights(self, job: Job) -> DeferredOutcome:
        """Copy the state now; the answer writes the copy to the file.

        So the device need not wait for a disk, and no client can ask for the file before the answer
        is stored.
        """
        try:
            _ = self._models[job.model_id or ""]  # refuse a model that is not here
            command = jobs.decode(job.payload, jobs.SaveWeights)
            with self._timer.charge({job.request_id: 1.0}):
                state = self._state_to_save(command.kind, job.model_id or "")
        except Exception as error:
            return _ready(failure(job, error))
        return partial(self._saved, command, state, job)

    def _state_to_save(self, kind: CheckpointKind, model_id: str) -> AdapterState:
        if kind == CheckpointKind.TRAINING:
            return self._backend.adapter_state(model_id, optimizer=True)
        return self._backend.exported_adapter(model_id)

    def _saved(self, command: jobs.SaveWeights, state: AdapterState, job: Job) -> Outcome:
        info = self._backend.info
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
                f"intact; {self._files.remedy}"
            ) from error
        if command.sampler is not None:
            body = {"sampling_session_id": command.session_key or command.sampler.key}
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
        state = self.read_state(command.file_id, command.path)
        if not creates:
            check_same_shape(self._models[job.model_id or ""].config, state.config, command.path)
        if command.optimizer and not state.first_moment:
            raise UserError(
                f"{command.path} has no optimizer state; load it without, or load a training "
                "checkpoint (tinker://…/weights/…)"
            )
        body = loaded_body(job, command.path, has_optimizer=bool(state.first_moment))
        if not command.optimizer:
            state = replace(state, step=0, first_moment={}, second_moment={})
        with self._timer.charge({job.request_id: 1.0}):
            self._backend.load_adapter(job.model_id or "", state)
        self._models[job.model_id or ""] = DeviceModel(state.config, step=state.step)
        if creates:
            return created(job, body)
        return replace(in_json(job, body), changed=True)

    def _unload_model(self, job: Job) -> Outcome:
        self.forget_model(job.model_id or "")
        return in_json(job, {})


def _ready(outcome: Outcome) -> DeferredOutcome:
    return lambda: outcome
