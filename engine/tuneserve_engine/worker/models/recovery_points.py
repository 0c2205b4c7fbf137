"""Recovery points: the states of changed models, saved as files that the store names."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.process.failpoints import failpoint
from tuneserve_engine.store.base import RecoveryPoint
from tuneserve_engine.store.files import new_file_id
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.models.hosted import HostedModel, log_extra
from tuneserve_engine.worker.services import WorkerServices

logger = logging.getLogger(__name__)

_TICK_S = 0.25


@dataclass(frozen=True)
class PointPolicy:
    """The policy for recovery points.

    A changed model is saved after ``interval_s`` or ``steps`` optimizer steps, whichever comes
    first. Writing takes at most the share ``busy`` of the time; due models wait for that.
    """

    interval_s: float = 60.0
    steps: int = 50
    busy: float = 0.25


class RecoveryPoints:
    """The writer of recovery points for ``models``, by id. Call it on the event loop."""

    def __init__(
        self,
        executor: JobExecutor,
        policy: PointPolicy,
        services: WorkerServices,
        models: Mapping[str, HostedModel],
    ) -> None:
        self._executor = executor
        self._policy = policy
        self._services = services
        self._models = models
        self.changed = asyncio.Event()
        """Set when a model has begun to differ from its newest point."""
        self._writing = asyncio.Lock()
        self._writing_s = 0.0  # disk time of the last point, without the time spent waiting

    async def save_forever(self) -> None:
        """Save changed models as the policy says. Never returns."""
        while True:
            self.changed.clear()
            if not any(model.changed_s is not None for model in self._models.values()):
                await self.changed.wait()
            await asyncio.sleep(_TICK_S)

            due, now_s = [], self._services.clock()
            for model_id, model in self._models.items():
                # A point right after a step has no gradient to write, so a model that accumulates
                # waits, but at most twice as long: not every training loop steps often.
                late = 2 if model.is_accumulating else 1
                if (
                    model.is_ready
                    and model.changed_s is not None
                    and (
                        now_s - model.changed_s >= late * self._policy.interval_s
                        or model.steps >= late * self._policy.steps
                    )
                ):
                    due.append(model_id)

            for model_id in due:
                self._writing_s = 0.0
                await self._save_or_retry(model_id)
                await asyncio.sleep(self._writing_s * (1 / self._policy.busy - 1))

    async def save_all(self) -> None:
        """Save every changed model now."""
        for model_id, model in list(self._models.items()):
            if model.is_ready:
                await self._save_or_retry(model_id)

    async def save(self, model_id: str) -> None:
        """Save the model's present state as its newest recovery point.

        Raises ``OSError`` if the file cannot be written.
        """
        async with self._writing:
            model = self._models.get(model_id)
            if model is None or model.changed_s is None:
                return
            captured = await self._services.on_device(
                partial(self._executor.capture_model, model_id)
            )
            if captured is None:
                return
            state, position = captured
            model.changed_s, model.steps = None, 0
            try:
                # The store keeps two points: two new ones leave none that is damaged.
                for _ in range(2 if model.has_bad_point else 1):
                    await self._write(model_id, state, position)
                model.has_bad_point = False
            except OSError:
                model.changed_s = model.changed_s or self._services.clock()
                raise

    async def _save_or_retry(self, model_id: str) -> None:
        try:
            await self.save(model_id)
        except OSError as error:
            message = "the recovery point of %s was not written: %s"
            logger.error(message, model_id, error, extra=log_extra(model_id))

    async def _write(self, model_id: str, state: AdapterState, position: int) -> None:
        # A result that is not stored would be computed again, on a state that already includes it.
        await self._services.unstored.wait(model_id, position)
        failpoint("point-before-file")
        file_id = new_file_id()
        started_s = self._services.clock()
        await self._services.on_disk(partial(self._executor.write_state, file_id, state))
        self._writing_s = self._services.clock() - started_s
        failpoint("point-after-file")
        point = RecoveryPoint(model_id, position, file_id, self._executor.numerics_id)
        await self._services.session.call(lambda queue, epoch: queue.save_point(epoch, point))
        failpoint("point-saved")
