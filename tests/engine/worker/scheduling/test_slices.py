"""The wait of a light tenant beside one with long requests, on a simulated device that runs them in
slices and asks the scheduler between any two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.worker.execution.test_packing import BLOCK, STATIC_SHAPES, pack_requests, runs
from tests.engine.worker.scheduling.test_fairness import GRADIENT, SAVE, STEP, Sizes
from tuneserve_engine.core.jobs import Job
from tuneserve_engine.worker.execution.packing import pack
from tuneserve_engine.worker.scheduling.runnable import Running
from tuneserve_engine.worker.scheduling.scheduler import Scheduler

SLICE_S, TOKEN_S = 0.1, 0.0002
ids = count()


@dataclass
class Device:
    """A device on which a request of ``seq`` tokens takes ``seq`` times ``TOKEN_S``, in slices."""

    scheduler: Scheduler = field(default_factory=lambda: Scheduler(slice_s=SLICE_S, costs=Sizes()))
    now: float = 0.0
    pending: list[Job] = field(default_factory=list)
    coming: list[tuple[float, list[Job]]] = field(default_factory=list)
    done: dict[str, float] = field(default_factory=dict)
    stack: list[tuple[list[Job], list[float], float]] = field(default_factory=list)
    deepest: int = 0

    def at(self, now: float, *jobs: Job) -> None:
        self.coming.append((now, list(jobs)))

    def run_until(self, end: float) -> None:
        while self.now < end:
            self._arrive()
            batch = self.scheduler.next_batch(self.pending)
            if batch:
                self._run(batch)
            else:
                self.now = min([end, *(at for at, _ in self.coming)])

    def _arrive(self) -> None:
        due = [each for each in self.coming if each[0] <= self.now]
        self.coming = [each for each in self.coming if each[0] > self.now]
        self.pending += [job for _, jobs in due for job in jobs]

    def _run(self, batch: Sequence[Job]) -> None:
        names = {job.request_id for job in batch}
        self.pending = [job for job in self.pending if job.request_id not in names]
        left, used, began = sum(job.seq for job in batch) * TOKEN_S, [0.0], self.now
        self.stack.append((list(batch), used, began))
        self.deepest = max(self.deepest, len(self.stack))
        while left > 0:
            seconds = min(left, SLICE_S)
            left -= seconds
            used[0] += seconds
            self.now += seconds
            self._arrive()
            while left > 0 and (between := self._between()):
                self._run(between)
        self.stack.pop()
        self.scheduler.charge(batch, used[0])
        self.done |= dict.fromkeys(names, self.now)

    def _between(self) -> list[Job]:
        running = [
            Running(batch, used[0], self.now - began - used[0]) for batch, used, began in self.stack
        ]
        return self.scheduler.interrupting_batch(running, self.pending, [])


def job(tenant: str, tokens: int, model: str | None = None, kind: object = GRADIENT) -> Job:
    number = next(ids)
    return Job(
        tenant, kind, "scope", seq=tokens, payload=b"x", model_id=model,  # type: ignore[arg-type]
        request_id=f"{tenant}-{number}", release=number,
    )  # fmt: skip


def warm() -> Device:
    """A device that knows the time of gradients and steps."""
    device = Device()
    device.at(0.0, job("before", 100), job("before", 1, kind=STEP))
    device.run_until(1.0)
    return device


def waits(device: Device, steps: int, every_s: float) -> list[float]:
    """The duration of each step of a light tenant: a gradient of 0.06 s, and the optimizer step."""
    asked = []
    for number in range(steps):
        mine = [job("light", 300, f"m{number}"), job("light", 1, f"m{number}", STEP)]
        began = device.now + 0.31 + number * every_s
        device.at(began, *mine)
        asked.append((began, mine[1].request_id))
    device.run_until(device.now + steps * every_s + 1)
    return sorted(device.done[name] - began for began, name in asked)


IDLE_S = 301 * TOKEN_S


@pytest.mark.parametrize("tokens", [5_000, 500_000])
def test_a_small_step_waits_for_one_slice_of_anothers_requests(tokens: int) -> None:
    device = warm()
    device.at(1.0, *(job("heavy", tokens) for _ in range(500_000 // tokens)))
    waited = waits(device, 60, 1.57)
    assert device.deepest == 2
    assert waited[-1] <= 3 * IDLE_S + SLICE_S
    assert waited[len(waited) // 2] <= IDLE_S + SLICE_S


def test_two_giants_and_a_light_tenant_all_make_progress() -> None:
    """The second giant waits for the first, which has less left. The light tenant does not wait."""
    device = warm()
    first, second = job("a", 500_000), job("b", 500_000)
    device.at(1.0, first)
    device.at(11.0, second)
    waited = waits(device, 150, 1.57)
    assert waited[-1] <= 3 * IDLE_S + SLICE_S
    assert device.deepest == 2
    assert device.done[first.request_id] < 120 < device.done[second.request_id] < 220


def test_a_giant_does_not_interrupt_a_request_that_is_nearly_done() -> None:
    """It would hold up that request for its whole time, and then the light tenant for the debt."""
    device = warm()
    flood = [job("flood", 5_000) for _ in range(40)]
    giant = job("heavy", 500_000)
    device.at(1.0, *flood)
    device.at(1.5, giant)
    waited = waits(device, 110, 1.57)
    assert waited[-1] <= 3 * IDLE_S + SLICE_S
    assert device.done[flood[0].request_id] < 2.5
    assert device.done[flood[-1].request_id] < 90 < device.done[giant.request_id] < 160


def test_a_tenant_that_had_as_much_time_as_the_giant_waits() -> None:
    """An interruption gets no more of the device than its share."""
    device = warm()
    giant = job("heavy", 100_000)
    device.at(1.0, giant)
    device.at(2.0, *(job("flood", 1_000) for _ in range(400)))
    device.run_until(45.0)
    assert device.done[giant.request_id] <= 1.0 + 2 * 20.0 + 1.0


@pytest.mark.parametrize("seconds", [0.06, 0.1])
def test_short_requests_get_their_weights_share_beside_long_ones(seconds: float) -> None:
    """With weights of 9 and 1 the share is a tenth, plus one request. It was a fifth before."""
    device = Device(Scheduler({"heavy": 9.0}, slice_s=SLICE_S, costs=Sizes()))
    short = round(seconds / TOKEN_S)
    device.at(0.0, job("before", 100))
    device.at(1.0, *(job("heavy", 20_000) for _ in range(60)))
    asked = [job("short", short) for _ in range(1000)]
    device.at(1.0, *asked)
    device.run_until(201.0)
    used = sum(seconds for each in asked if each.request_id in device.done)
    assert 200 / 10 - 1 <= used <= 200 / 10 + 4 + 1


def test_a_tenants_own_work_never_interrupts_it() -> None:
    device = warm()
    device.at(1.0, job("heavy", 50_000, "m"))
    device.at(2.0, job("heavy", 1, "m", STEP), job("heavy", 1, "other", SAVE))
    device.run_until(15.0)
    assert device.deepest == 1


@given(st.lists(pack_requests(), min_size=1, max_size=6), st.integers(1, 100))
@settings(deadline=None, max_examples=40)
def test_short_slices_hold_the_same_blocks_in_the_same_order(requests, tokens) -> None:  # type: ignore[no-untyped-def]
    """A request's gradient is then the same sum, because its blocks keep their order."""

    def blocks(most: int | None) -> list[list[bytes]]:
        found: list[list[bytes]] = [[] for _ in requests]
        for batch in pack(requests, STATIC_SHAPES, 0, lambda *_: most):
            for micro_batch in batch.batch.micro_batches:
                if most is not None:
                    owners = set(micro_batch.block_request[: micro_batch.blocks].tolist())
                    whole = (
                        -(-most // STATIC_SHAPES.chunk) * STATIC_SHAPES.chunk
                    )  # a slice costs as much
                    assert micro_batch.blocks * BLOCK <= whole or len(owners) == 1
                for block in range(micro_batch.blocks):
                    part = slice(block * BLOCK, (block + 1) * BLOCK)
                    inside = (
                        micro_batch.tokens,
                        micro_batch.targets,
                        micro_batch.positions,
                        micro_batch.weights,
                    )
                    member = batch.members[micro_batch.block_request[block]]
                    found[member].append(b"".join(each[part].tobytes() for each in inside))
        return found

    assert blocks(tokens) == blocks(None)
    assert len(runs(pack(requests, STATIC_SHAPES, 0, lambda *_: tokens))) == sum(
        len(each.data.data) for each in requests
    )
