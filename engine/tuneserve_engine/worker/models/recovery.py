"""The restoring of a model: its newest readable recovery point, and a replay of the log after it.

Device memory is a cache of the log: the two restore a model's state, bit for bit.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from tuneserve_engine.backend.base import OutOfMemory
from tuneserve_engine.core.errors import EngineError, FileDamaged, FilesAway, ServerError
from tuneserve_engine.core.records import Update
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import LogEntry, RecoveryPoint
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.execution.preparation import run_preparation
from tuneserve_engine.worker.models.hosted import HostedModel, log_extra
from tuneserve_engine.worker.services import WorkerServices

logger = logging.getLogger(__name__)

_AWAY_S = 5.0  # the pause before files that could not be reached are read again


class Recovery:
    """The recovery of models on this worker. Call it on the event loop."""

    def __init__(self, executor: JobExecutor, services: WorkerServices) -> None:
        self._executor = executor
        self._services = services
        self.points_unreadable = 0  # recovery points that could not be used

    async def restore(self, model_id: str, model: HostedModel) -> int:
        """Bring the model's state onto the device; return the number of replayed requests.

        Waits for as long as its files cannot be reached. If it fails, nothing of the model is left
        on the device. Raises ``OutOfMemory`` if this worker has no room for a sound model, and
        ``EngineError`` if the model cannot be restored anywhere.
        """
        while True:
            try:
                return await self._restore(model_id, model)
            except FilesAway as error:
                message = "%s waits for its files, trying again in %g s: %s"
                logger.warning(message, model_id, _AWAY_S, error, extra=log_extra(model_id))
                await asyncio.sleep(_AWAY_S)

    async def _restore(self, model_id: str, model: HostedModel) -> int:
        try:
            points = await self._services.session.call(
                lambda queue, epoch: queue.recovery_points(epoch, model_id)
            )
            start = await self._load_point(model_id, model, points)
            count = await self._replay(model_id, model, start)
            if points:  # the newest may cover requests that changed nothing and are in no log
                position = points[0].position
                mark = partial(self._executor.mark_executed, model_id, position)
                await self._services.on_device(mark)
        except (EngineError, OutOfMemory):
            await self._services.on_device(partial(self._executor.forget_model, model_id))
            raise
        return count

    async def _load_point(
        self, model_id: str, model: HostedModel, points: Sequence[RecoveryPoint]
    ) -> int:
        """Load the newest readable point and return the position to continue from.

        Raises ``OutOfMemory`` if this worker has read a point and cannot load it: the model is
        sound, and another worker may be able to. Raises ``ServerError`` if no point can be read.
        """
        for point in points:
            if point.numerics_id != self._executor.numerics_id:
                logger.warning(
                    "%s was saved under %s, this is %s: its numbers may differ in the last bits",
                    model_id,
                    point.numerics_id,
                    self._executor.numerics_id,
                    extra=log_extra(model_id),
                )
            try:
                state = await self._services.on_disk(
                    partial(self._executor.read_state, point.file_id)
                )
            except FilesAway:
                raise
            except EngineError as error:
                self._note_bad_point(model, point, error)
                continue
            try:
                await run_preparation(self._executor.pending_preparation(state.config))
                restore = partial(self._executor.restore_model, model_id, state, point.position)
                await self._services.on_device(restore)
            except EngineError as error:
                raise OutOfMemory(str(error)) from error
            return point.position
        if len(points) > 1:  # with fewer points, the log still starts with the model's creation
            raise ServerError("none of its recovery points can be read")
        return 0

    def _note_bad_point(self, model: HostedModel, point: RecoveryPoint, error: EngineError) -> None:
        self.points_unreadable += 1
        model.has_bad_point, model.changed_s = True, self._services.clock()  # a save is due soon
        logger.error(
            "the recovery point of %s at request %d (file %s) is damaged or missing: %s; an older "
            "one and the log take its place",
            point.model_id,
            point.position,
            point.file_id,
            error.reason if isinstance(error, FileDamaged) else error,
            extra=log_extra(point.model_id),
        )

    async def _replay(self, model_id: str, model: HostedModel, start: int) -> int:
        """Replay the log from position ``start`` on; return the number of replayed requests.

        Raises ``OutOfMemory`` if a request lacks room here, ``FilesAway`` if one cannot reach its
        file, and ``ServerError`` if one fails.
        """
        count = 0
        while entries := await self._log_page(model_id, start):
            if start == 0:
                await run_preparation(self._executor.pending_preparation(entries[0].job))
            outcomes = await self._services.pending.replay(entries, model.held[0].attempts)
            for entry, outcome in zip(entries, outcomes, strict=True):
                if outcome.rejection is not None and outcome.rejection.no_room:
                    raise OutOfMemory(outcome.rejection.message)
                if outcome.rejection is not None and outcome.rejection.files_away:
                    raise FilesAway(outcome.rejection.message)
                if outcome.rejection is not None:
                    raise ServerError(
                        f"request {entry.job.position} fails now: {outcome.rejection.message}"
                    )
                if refusals.digest(outcome.body) != entry.digest and not model.updates:
                    logger.error(
                        "%s gives other results from request %s on",
                        model_id,
                        entry.job.position,
                        extra=log_extra(model_id),
                    )
                    model.updates = (Update("model", model_id, {"diverged": True}),)
            assert entries[-1].job.position is not None
            start = entries[-1].job.position + 1
            count += len(entries)
        return count

    async def _log_page(self, model_id: str, start: int) -> list[LogEntry]:
        return await self._services.session.call(
            lambda queue, epoch: queue.read_log(epoch, model_id, start=start)
        )
