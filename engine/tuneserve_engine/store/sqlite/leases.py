"""Leases in SQLite: the worker processes, and the fate of a worker's jobs when its lease ends."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import floor

import msgspec

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.jobs import Outcome
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.core.records import ModelRecord, ModelStatus
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import Lease, ServedModel
from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.store.sqlite import placement, records
from tuneserve_engine.store.sqlite import recovery_points as points
from tuneserve_engine.store.sqlite.group_commit import Transaction
from tuneserve_engine.store.sqlite.jobs import end_job, end_model
from tuneserve_engine.store.sqlite.schema import SPEEDS

_KILLS = 1000
"""The most requests whose kills are remembered."""


@dataclass
class Leases:
    """The leases' policy, and their state that is in memory only.

    ``running`` has the requests of each epoch's last ``begin``. It need not be durable: if a worker
    dies together with this process, its jobs are not known to be the cause. ``metrics`` has the
    metrics of each epoch's last ``renew``.
    """

    policy: StorePolicy
    running: dict[int, tuple[str, ...]] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    kills: dict[str, int] = field(default_factory=dict)
    """Attempts, by request, that ended because the worker was killed from outside. In memory only:
    after a restart of this process they count as other attempts do."""

    def lease(
        self, tx: Transaction, name: str, owner: str, info: BaseModelInfo, speed: float
    ) -> Lease:
        info = _of_known_revision(tx, info)
        self._forgive_silence(tx)
        self._note_served(tx, info, keeps=not speed)
        row = tx.execute("SELECT epoch, owner FROM workers WHERE name = ?", name).fetchone()
        if row is not None and row[1] == owner:
            tx.execute("UPDATE workers SET seen_s = ? WHERE epoch = ?", tx.now_s, row[0])
            return Lease(row[0], resumed=True)
        orphans = _Orphans({info.name: []})
        if row is not None:
            self._end(tx, row[0], orphans, died=True)
        epoch = records.next_of(tx, "epoch")
        tx.execute(
            "INSERT INTO workers VALUES (?, ?, ?, ?, 0, ?)", epoch, name, owner, info.name, tx.now_s
        )
        tx.execute("INSERT INTO speeds VALUES (?, ?)", epoch, speed)
        _place(tx, orphans)
        return Lease(epoch, resumed=False)

    def renew(
        self, tx: Transaction, epoch: int, metrics: dict[str, float] | None = None
    ) -> tuple[list[str], dict[str, float]]:
        """Extend the lease. Returns the models to be released, and the tenants' weights."""
        placement.check_epoch(tx, epoch)
        if metrics is not None:
            self.metrics[epoch] = metrics
        self._forgive_silence(tx)
        tx.execute("UPDATE workers SET seen_s = ? WHERE epoch = ?", tx.now_s, epoch)
        silent = tx.execute(
            "SELECT epoch FROM workers WHERE seen_s < ?", tx.now_s - self.policy.lease_ttl_s
        ).fetchall()
        orphans = _Orphans()
        for (each,) in silent:
            self._end(tx, each, orphans, died=True)
        _place(tx, orphans)
        return _to_be_given_up(tx, epoch), records.weights(tx)

    def resign(self, tx: Transaction, epoch: int) -> None:
        placement.check_epoch(tx, epoch)
        orphans = _Orphans()
        self._end(tx, epoch, orphans, died=False)
        _place(tx, orphans)

    def killed(self, tx: Transaction, name: str) -> None:
        row = tx.execute("SELECT epoch FROM workers WHERE name = ?", name).fetchone()
        if row is None:
            return
        for request_id in self.running.get(row[0], ()):
            self.kills[request_id] = self.kills.get(request_id, 0) + 1
        while len(self.kills) > _KILLS:
            del self.kills[next(iter(self.kills))]
        orphans = _Orphans()
        self._end(tx, row[0], orphans, died=True)
        _place(tx, orphans)

    def note_running(self, tx: Transaction, epoch: int, request_ids: Sequence[str]) -> None:
        placement.check_epoch(tx, epoch)
        live = {each for (each,) in tx.execute("SELECT epoch FROM workers").fetchall()}
        self.running = {each: ids for each, ids in self.running.items() if each in live}
        self.running[epoch] = tuple(request_ids)

    def base_models(self, tx: Transaction) -> list[ServedModel]:
        alive_s = tx.now_s - self.policy.lease_ttl_s
        rows = tx.execute(
            "SELECT info, MAX(served.seen_s, IFNULL(MAX(live.seen_s), 0)), "
            "COUNT(*) FILTER (WHERE live.seen_s >= ?), "
            "COUNT(*) FILTER (WHERE live.seen_s >= ? AND speed = 0) "
            f"FROM served LEFT JOIN ({SPEEDS}) AS live USING (base_model) "
            "GROUP BY base_model ORDER BY base_model",
            alive_s,
            alive_s,
        ).fetchall()
        told = self._told(tx, alive_s)
        infos = [msgspec.json.decode(info, type=BaseModelInfo) for info, *_ in rows]
        return [
            ServedModel(info, workers, seen_s, told[info.name], samplers)
            for info, (_, seen_s, workers, samplers) in zip(infos, rows, strict=True)
        ]

    def _told(
        self, tx: Transaction, alive_s: float
    ) -> defaultdict[str, dict[str, dict[str, float]]]:
        """Return the figures of the workers that are alive, by base model and name."""
        told: defaultdict[str, dict[str, dict[str, float]]] = defaultdict(dict)
        for epoch, name, base_model in tx.execute(
            "SELECT epoch, name, base_model FROM workers WHERE seen_s >= ?", alive_s
        ).fetchall():
            if epoch in self.metrics:
                told[base_model][name] = self.metrics[epoch]
        return told

    def _forgive_silence(self, tx: Transaction) -> None:
        """Restart the leases' time if the store itself was away or the clock was set back.

        If no worker was heard of for half the time to live, the store was away, and no lease has
        run out. A time stamp in the future is from before the clock was set back: its time runs
        from now.
        """
        for table in ("workers", "served"):
            tx.execute(f"UPDATE {table} SET seen_s = ? WHERE seen_s > ?", tx.now_s, tx.now_s)
        row = tx.execute(
            "SELECT MAX(seen_s) "
            "FROM (SELECT seen_s FROM workers UNION ALL SELECT seen_s FROM served)"
        ).fetchone()
        assert row is not None
        if row[0] is not None and row[0] < tx.now_s - self.policy.lease_ttl_s / 2:
            tx.execute("UPDATE workers SET seen_s = ?", tx.now_s)

    def _note_served(self, tx: Transaction, info: BaseModelInfo, *, keeps: bool) -> None:
        """Note the facts about a base model. A worker that only samples ``keeps`` known ones."""
        tx.execute(
            "INSERT INTO served (base_model, seen_s, info) VALUES (?, ?, ?) "
            "ON CONFLICT (base_model) DO UPDATE SET seen_s = excluded.seen_s, "
            "info = IIF(?, info, excluded.info)",
            *(info.name, tx.now_s, msgspec.json.encode(info).decode(), keeps),
        )

    def _end(self, tx: Transaction, epoch: int, orphans: "_Orphans", *, died: bool) -> None:
        """End the lease. Its models and jobs have no worker until ``_place`` places them again."""
        if died:
            self._count_attempts(tx, epoch)
        row = tx.execute("SELECT base_model, seen_s FROM workers WHERE epoch = ?", epoch).fetchone()
        assert row is not None
        base_model, seen_s = row
        tx.execute("DELETE FROM workers WHERE epoch = ?", epoch)
        tx.execute("DELETE FROM speeds WHERE epoch = ?", epoch)
        self.metrics.pop(epoch, None)
        tx.execute(
            "UPDATE served SET seen_s = MAX(seen_s, ?) WHERE base_model = ?", seen_s, base_model
        )
        idle = tx.execute(
            "SELECT model_id FROM lanes WHERE worker = ? AND jobs = 0 AND park = 0", epoch
        ).fetchall()
        tx.execute("UPDATE lanes SET worker = NULL, park = 0 WHERE worker = ?", epoch)
        orphans.setdefault(base_model, []).extend(model_id for (model_id,) in idle)
        tx.execute("UPDATE jobs SET worker = NULL WHERE state = 'ready' AND worker = ?", epoch)
        tx.news.take = True  # waiting takes of the epoch must learn that it is over
        tx.news.over.append(epoch)

    def _count_attempts(self, tx: Transaction, epoch: int) -> None:
        """Count an attempt for the epoch's running jobs, and end those with too many attempts."""
        for request_id in self.running.get(epoch, ()):
            row = tx.execute(
                "UPDATE jobs SET attempts = attempts + 1 "
                "WHERE request_id = ? AND state = 'ready' AND worker = ? "
                "RETURNING attempts, model_id",
                request_id,
                epoch,
            ).fetchone()
            if row is None:
                continue
            own, most = row[0] - self.kills.get(request_id, 0), refusals.MOST_DEATHS
            if own >= self.policy.job_attempts or row[0] >= max(most, self.policy.job_attempts):
                self.kills.pop(request_id, None)
                end_job(tx, Outcome(request_id, rejection=refusals.fatal(row[0])))
                _fail_if_never_created(tx, row[1])


class _Orphans(dict[str, list[str]]):
    """The base models of workers whose leases ended, with the idle models of these workers."""


def _place(tx: Transaction, orphans: _Orphans) -> None:
    """Place the idle models, and all jobs that wait, with the workers that are there."""
    for base_model, idle in sorted(orphans.items()):
        placement.place_models(tx, sorted(idle), base_model)
        placement.place_waiting(tx, base_model)


def _of_known_revision(tx: Transaction, info: BaseModelInfo) -> BaseModelInfo:
    """Return the info with the revision by which the store knows the base model's name.

    Raises ``StoreUnusable`` if the info has another revision.
    """
    row = tx.execute("SELECT info FROM served WHERE base_model = ?", info.name).fetchone()
    known = "" if row is None else msgspec.json.decode(row[0], type=BaseModelInfo).revision
    if known and info.revision and known != info.revision:
        raise StoreUnusable(refusals.other_revision(info.name, known, info.revision))
    return replace(info, revision=info.revision or known)


def _fail_if_never_created(tx: Transaction, model_id: str | None) -> None:
    """Mark the model as failed if its creation has ended for good without success."""
    model = None if model_id is None else records.get_record(tx, ModelRecord, model_id)
    if model is not None and model.status is ModelStatus.CREATING:
        records.put_record(tx, replace(model, status=ModelStatus.FAILED))
        end_model(tx, model.key, refusals.failed(model.key))
        points.forget(tx, model.key)


def _to_be_given_up(tx: Transaction, epoch: int) -> list[str]:
    """Return the models that the worker should release, idle ones first.

    These are the models to be parked, and at least as many as the worker has above its part of all
    models, which is in proportion to its speed, as long as another worker would get them. The parts
    add up to all models. A model that is no whole part goes to the worker with the most above its
    own, so that it need not move.
    """
    models = tx.execute(
        "SELECT model_id, park FROM lanes WHERE worker = ? ORDER BY park DESC, jobs > 0, model_id",
        epoch,
    ).fetchall()
    (base_model,) = tx.execute("SELECT base_model FROM workers WHERE epoch = ?", epoch).fetchone()
    trainers = placement.trainers(tx, base_model)
    surplus = _surplus(trainers, epoch)
    parked = sum(park for _, park in models)
    return [model_id for model_id, _ in models[: max(parked, surplus)]]


def _surplus(trainers: Sequence[tuple[int, float, int]], epoch: int) -> int:
    """Return how many models the worker should give up, from (epoch, speed, models) of all."""
    speeds, total = sum(speed for _, speed, _ in trainers), sum(count for *_, count in trainers)
    above = [count - floor(total * speed / speeds) for _, speed, count in trainers]
    for place in sorted(range(len(above)), key=lambda at: (-above[at], at))[: max(sum(above), 0)]:
        above[place] -= 1
    own = next((at for at, each in enumerate(trainers) if each[0] == epoch), None)
    if own is None:
        return 0
    _, speed, count = trainers[own]
    others = [[each[1], each[2]] for at, each in enumerate(trainers) if at != own]
    for given in range(above[own]):
        best = min(others, key=lambda other: (1 + other[1]) / other[0], default=None)
        if best is None or (1 + best[1]) / best[0] >= (count - given) / speed:
            return given  # ``place_models`` would choose this worker again
        best[1] += 1
    return max(above[own], 0)


def unassign(tx: Transaction, epoch: int, model_id: str) -> None:
    placement.check_epoch(tx, epoch)
    placed = tx.execute("SELECT worker FROM lanes WHERE model_id = ?", model_id).fetchone()
    if placed != (epoch,):
        return
    row = tx.execute(
        "SELECT base_model, park, jobs FROM lanes WHERE model_id = ?", model_id
    ).fetchone()
    assert row is not None
    base_model, park, jobs = row
    placement.unplace(tx, model_id)
    if not park and not jobs:  # it counts for its next worker from now on
        placement.place_models(tx, [model_id], base_model)
    placement.place_waiting(tx, base_model)
