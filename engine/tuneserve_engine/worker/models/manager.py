"""The models on this worker: their jobs routed, their states restored and handed over."""

import logging
from dataclasses import replace
from functools import partial

from tuneserve_engine.backend.base import OutOfMemory
from tuneserve_engine.core.errors import EngineError
from tuneserve_engine.core.jobs import Job, JobKind, Outcome
from tuneserve_engine.core.records import ModelStatus, Update
from tuneserve_engine.store import refusals
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.execution.preparation import Preparation, run_preparation
from tuneserve_engine.worker.models.hosted import HostedModel, log_extra
from tuneserve_engine.worker.models.recovery import Recovery
from tuneserve_engine.worker.models.recovery_points import PointPolicy, RecoveryPoints
from tuneserve_engine.worker.services import WorkerServices

logger = logging.getLogger(__name__)


class ModelManager:
    """The manager of this worker's models. Call it on the event loop."""

    def __init__(
        self, executor: JobExecutor, policy: PointPolicy, services: WorkerServices
    ) -> None:
        self._executor = executor
        self._services = services
        self._models: dict[str, HostedModel] = {}
        self._recovery = Recovery(executor, services)
        self.points = RecoveryPoints(executor, policy, services, self._models)
        self._to_hand_over: list[str] = []
        self._is_handing_over = False

    @property
    def points_unreadable(self) -> int:
        """The number of recovery points that could not be used."""
        return self._recovery.points_unreadable

    # --- jobs in, outcomes out ------------------------------------------------------------------

    def route(self, job: Job) -> None:
        """Pass a model's job on: at once, or when the model is here."""
        model_id = job.model_id
        assert model_id is not None
        model = self._models.get(model_id)
        if model is None and job.kind == JobKind.UNLOAD_MODEL:
            self._services.pending.add_jobs([job])  # an unload needs no restore first
        elif model is None and job.position == 0:
            self._create(model_id, job)
        elif model is None:
            self._models[model_id] = model = HostedModel(is_ready=False, held=[job])
            self._services.spawn(self._restore(model_id, model))
        elif model.is_ready and not model.is_leaving:
            self._services.pending.add_jobs([job])
        else:
            model.held.append(job)

    def _create(self, model_id: str, job: Job) -> None:
        """Pass the model's first job on, once the state shared by adapters of its kind is made."""
        preparation = self._executor.pending_preparation(job)
        self._models[model_id] = model = HostedModel(is_ready=preparation is None)
        if preparation is None:
            self._services.pending.add_jobs([job])
        else:
            model.held.append(job)
            self._services.spawn(self._prepare(model, preparation))

    async def _prepare(self, model: HostedModel, preparation: Preparation) -> None:
        await run_preparation(preparation)
        self._make_ready(model)

    def _make_ready(self, model: HostedModel) -> None:
        model.is_ready = True
        self._services.pending.add_jobs(model.take_held())

    def restored_for(self, replayed: Job) -> str:
        """Return the id of the request for which a logged job is replayed."""
        return self._models[replayed.model_id or ""].held[0].request_id

    def record_outcome(self, job: Job, outcome: Outcome) -> Outcome:
        """Note what a job did to its model, and return the outcome to store."""
        model = self._models.get(job.model_id or "")
        if model is None or job.model_id is None:
            return outcome
        is_replay = job.request_id in self._services.pending.replays
        never_created = outcome.rejection is not None and job.position == 0 and not is_replay
        if job.kind == JobKind.UNLOAD_MODEL or never_created:
            del self._models[job.model_id]
            return outcome
        if outcome.changed and not outcome.rejection:
            model.is_accumulating = job.kind == JobKind.FORWARD_BACKWARD
            model.steps += job.kind == JobKind.OPTIM_STEP
            if model.changed_s is None:
                model.changed_s = self._services.clock()
            self.points.changed.set()
        if is_replay:
            return outcome
        updates, model.updates = model.updates, ()
        return replace(outcome, updates=outcome.updates + updates)

    # --- restoring ------------------------------------------------------------------------------

    async def _restore(self, model_id: str, model: HostedModel) -> None:
        started_s = self._services.clock()
        try:
            count = await self._recovery.restore(model_id, model)
        except EngineError as error:
            message = "%s cannot be restored: %s"
            logger.error(message, model_id, error, extra=log_extra(model_id))
            self._mark_lost(model_id, model)
            return
        except OutOfMemory as error:
            message = "%s cannot be restored on this worker: %s"
            logger.error(message, model_id, error, extra=log_extra(model_id))
            self._refuse_for_now(model_id, model, str(error))
            return
        seconds = self._services.clock() - started_s
        message = "%s is restored: %d requests replayed, %.3f s"
        logger.info(message, model_id, count, seconds, extra=log_extra(model_id))
        self._make_ready(model)

    def _mark_lost(self, model_id: str, model: HostedModel) -> None:
        """Mark the model lost; the store ends its other requests."""
        self._models.pop(model_id, None)
        status = Update("model", model_id, {"status": ModelStatus.LOST.value})
        first = model.held[0].request_id
        lost = Outcome(first, rejection=refusals.lost(model_id), updates=(status,))
        self._services.unstored.offer([lost])

    def _refuse_for_now(self, model_id: str, model: HostedModel, why: str) -> None:
        """Reject the jobs that wait for the model; only its unloads still run.

        The model's record in the store does not change: the next request tries the restore again.
        """
        self._models.pop(model_id, None)
        no_room = refusals.no_room(model_id)
        no_room = replace(no_room, message=f"{no_room.message} (it said: {why})")
        unloads = [job for job in model.held if job.kind == JobKind.UNLOAD_MODEL]
        others = [job for job in model.held if job.kind != JobKind.UNLOAD_MODEL]
        self._services.pending.add_jobs(unloads)
        refused = [Outcome(job.request_id, rejection=no_room) for job in others]
        self._services.unstored.offer(refused)

    # --- handing over ---------------------------------------------------------------------------

    def hand_over(self, model_ids: list[str]) -> None:
        """Release these models, one after the other, each after its running jobs have ended.

        They take the place of those of an earlier call that still wait for their turn. A model
        whose turn has not come works as before.
        """
        self._to_hand_over = list(model_ids)
        if self._to_hand_over and not self._is_handing_over:
            self._is_handing_over = True
            self._services.spawn(self._hand_over())

    async def _hand_over(self) -> None:
        try:
            while self._to_hand_over:
                model_id = self._to_hand_over.pop(0)
                model = self._models.get(model_id)
                if model is None:
                    await self._release(model_id, None)
                elif model.is_ready:
                    await self._save_and_release(model_id, model)
        finally:
            self._is_handing_over = False

    async def _save_and_release(self, model_id: str, model: HostedModel) -> None:
        model.is_leaving = True
        model.held = self._services.pending.withdraw(model_id) + model.held
        await self._services.unstored.wait(model_id, None)
        try:
            await self.points.save(model_id)
        except OSError as error:
            message = "%s stays here: its state was not written: %s"
            logger.error(message, model_id, error, extra=log_extra(model_id))
            model.is_leaving = False
            self._services.pending.add_jobs(model.take_held())
            return
        await self._services.on_device(partial(self._executor.forget_model, model_id))
        await self._release(model_id, model)
        logger.info("%s is saved and handed over", model_id, extra=log_extra(model_id))

    async def _release(self, model_id: str, model: HostedModel | None) -> None:
        async def release() -> None:
            if self._models.get(model_id) is not model:
                return  # a request came meanwhile
            await self._services.session.call(lambda queue, epoch: queue.unassign(epoch, model_id))
            self._models.pop(model_id, None)  # the store delivers its held jobs again

        # A take in flight could deliver jobs from before the release after jobs from after it.
        await self._services.without_takes(release)
