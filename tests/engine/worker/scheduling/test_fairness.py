"""Turns of tenants: shares by weight, returns from idleness, and a light tenant beside a flood.

The device is simulated: a batch takes the sum of its jobs' times, samples continue in turns by a
part of their size, and the first batch of a kind also has to compile. The scheduler sees sizes and
measured batches, and has to learn the rest.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count, cycle

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tuneserve_engine.core.jobs import MAX_JOBS, Job, JobKind
from tuneserve_engine.worker.scheduling.cost_model import Cost, CostModel
from tuneserve_engine.worker.scheduling.runnable import RunningSample
from tuneserve_engine.worker.scheduling.scheduler import MAX_BYTES, Scheduler

GRADIENT, SAMPLE, STEP = JobKind.FORWARD_BACKWARD, JobKind.SAMPLE, JobKind.OPTIM_STEP
SAVE = JobKind.SAVE_WEIGHTS
KINDS = (GRADIENT, SAMPLE, STEP, SAVE)
QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
"""Phases without shrinking, because a simulation is too long for it."""
ids = count()


class Sizes(CostModel):
    """A job costs its ``seq``."""

    def job_cost(self, job: Job) -> Cost:
        return Cost(float(job.seq))


@dataclass
class Device:
    """Runs the scheduler's choices, one batch after another, on its own clock."""

    scheduler: Scheduler
    rates: Mapping[JobKind, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.001))
    compile_s: float = 0.0
    now: float = 0.0
    pending: list[Job] = field(default_factory=list)
    used: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    done: dict[str, float] = field(default_factory=dict)  # times by request id
    batches: list[list[Job]] = field(default_factory=list)
    compiled: set[JobKind] = field(default_factory=set)
    largest_s: float = 0.0  # of any request so far
    step_s: float = 0.0  # of the largest step so far
    # samples, and the rest of each
    begun: dict[str, tuple[Job, float]] = field(default_factory=dict)

    def submit(self, tenant: str, kind: JobKind, size: int, model: str | None = None) -> str:
        """Submit a request of ``size``. Without a model, it waits for no other."""
        number = next(ids)
        job = Job(
            tenant, kind, "scope", seq=size, payload=b"x", model_id=model,
            request_id=f"{tenant}-{number}", release=number,
        )  # fmt: skip
        self.pending.append(job)
        return job.request_id

    def run_batch(self) -> list[Job]:
        running_samples = [RunningSample(job, 1) for job, _ in self.begun.values()]
        batch = self.scheduler.next_batch(self.pending, running_samples)
        check_batch(batch, [*self.pending, *(each.job for each in running_samples)])
        kind = batch[0].kind
        if kind == SAMPLE:
            return self.run_slice(batch)
        times = [job.seq * self.rates[kind] for job in batch]
        first_s = 0.0 if kind in self.compiled else self.compile_s
        self.compiled.add(kind)
        self.largest_s = max(self.largest_s, *(time + first_s for time in times))
        if kind == STEP:
            self.step_s = max(self.step_s, *times)
        seconds = sum(times) + first_s
        for job, time in zip(batch, times, strict=True):
            self.used[job.tenant] += seconds * time / sum(times)
        self.now += seconds
        ended = {job.request_id: self.now for job in batch}
        self.pending = [job for job in self.pending if job.request_id not in ended]
        self.done |= ended
        self.batches.append(batch)
        self.scheduler.charge(batch, seconds)
        return batch

    def run_slice(self, batch: list[Job]) -> list[Job]:
        """Continue the samples for the time of a batch."""
        assert {job.request_id for job in batch} >= self.begun.keys()
        self.begun = {
            job.request_id: self.begun.get(job.request_id, (job, float(job.seq))) for job in batch
        }
        self.pending = [job for job in self.pending if job.request_id not in self.begun]
        seconds = 0.0 if SAMPLE in self.compiled else self.compile_s
        self.compiled.add(SAMPLE)
        work = dict.fromkeys(self.begun, 0.0)
        while any(left for _, left in self.begun.values()):
            for name, (job, left) in self.begun.items():
                part = min(left, 1.0)
                self.begun[name] = (job, left - part)
                work[name] += part
                seconds += part * self.rates[SAMPLE]
            if seconds >= self.scheduler._batch_s:
                break
        self.now += seconds
        for job in batch:
            self.used[job.tenant] += seconds * work[job.request_id] / sum(work.values())
        ended = {name: self.now for name, (_, left) in self.begun.items() if not left}
        self.begun = {name: each for name, each in self.begun.items() if name not in ended}
        self.done |= ended
        self.batches.append([job for job in batch if job.request_id in ended])
        self.scheduler.charge(batch, seconds, work)
        return batch


def check_batch(batch: list[Job], pending: list[Job]) -> None:
    assert batch
    assert len({job.kind for job in batch}) == 1
    if batch[0].kind == SAMPLE:
        assert len({job.attempts for job in batch}) == 1
    else:
        assert len(batch) <= MAX_JOBS
        assert len(batch) == 1 or sum(len(job.payload) for job in batch) <= MAX_BYTES
        assert len(batch) == 1 or not any(job.attempts for job in batch)
    assert [job.release for job in batch] == sorted({job.release for job in batch})
    assert {job.request_id for job in batch} <= {job.request_id for job in pending}
    for job in batch[:1] if batch[0].model_id is None else batch:
        # No earlier request of its model may be left behind.
        earlier = [w for w in pending if w.model_id == job.model_id and w.release < job.release]
        if job.model_id is not None:
            assert all(w in batch and w.kind == GRADIENT for w in earlier)


tenant_weights = st.dictionaries(
    st.sampled_from("abcde"), st.sampled_from([0.25, 1.0, 1.5, 4.0]), min_size=2
)
job_sizes = st.sampled_from([1, 3, 10, 30, 100, 1000])


@given(
    weights=tenant_weights,
    batch_s=st.sampled_from([0.0, 0.05, 0.5]),
    compile_s=st.sampled_from([0.0, 2.0]),
    rates=st.tuples(*[st.sampled_from([0.0001, 0.001, 0.01])] * 4),
    kinds=st.sets(st.sampled_from((GRADIENT, STEP, SAVE)), min_size=1),
    data=st.data(),
)
@settings(deadline=None, max_examples=100)
def test_service_of_backlogged_tenants_differs_by_at_most_one_request_and_step(
    weights: dict[str, float],
    batch_s: float,
    compile_s: float,
    rates: tuple[float, ...],
    kinds: set[JobKind],
    data: st.DataObject,
) -> None:
    """This holds for all requests and sizes, and before anything is known about their times."""
    scheduler = Scheduler(weights, batch_s=batch_s, costs=Sizes())
    device = Device(scheduler, dict(zip(KINDS, rates, strict=True)), compile_s)
    jobs = st.tuples(st.sampled_from(sorted(kinds, key=str)), job_sizes)
    backlogs = {tenant: data.draw(st.lists(jobs, min_size=1, max_size=8)) for tenant in weights}
    models = {tenant: data.draw(st.booleans()) for tenant in weights}
    turns = {tenant: cycle(backlog) for tenant, backlog in backlogs.items()}
    wanting = [tenant for tenant in weights for _ in range(MAX_JOBS + 1)]  # more than a batch takes
    for _ in range(40):
        for tenant in wanting:  # each tenant always has work
            kind, size = next(turns[tenant])
            model = f"{tenant}-model" if models[tenant] else None
            device.submit(tenant, kind, size, model)
        wanting = [job.tenant for job in device.run_batch()]
        ahead_s = max(batch_s, device.largest_s) + min(batch_s, device.step_s) + 1e-9
        service = {tenant: device.used[tenant] / weight for tenant, weight in weights.items()}
        for tenant, served in service.items():
            assert served - min(service.values()) <= ahead_s / weights[tenant]


def test_changed_weights_hold_from_the_next_batch_on() -> None:
    device = Device(Scheduler({"a": 2.0}, costs=Sizes()))

    def shares(batches: int) -> list[float]:
        """The device seconds of two tenants that always have work, over the next batches."""
        before = dict(device.used)
        for _ in range(batches):
            for tenant in "ab":
                device.submit(tenant, GRADIENT, 100)
            device.run_batch()
        return [device.used[each] - before.get(each, 0.0) for each in "ab"]

    request_s = 0.1
    assert shares(60) == pytest.approx([4.0, 2.0], abs=request_s)
    device.scheduler.set_weights({"b": 4.0})  # the other's weight stays that of the settings
    assert shares(60) == pytest.approx([2.0, 4.0], abs=request_s)
    device.scheduler.set_weights({"a": 0.5})
    assert shares(60) == pytest.approx([2.0, 4.0], abs=request_s)
    device.scheduler.set_weights({})
    assert shares(60) == pytest.approx([4.0, 2.0], abs=request_s)


class Blocks(Sizes):
    """A gradient has ``seq`` blocks of 64 tokens, and a batch computes whole chunks of four."""

    def job_cost(self, job: Job) -> Cost:
        if job.kind != GRADIENT:
            return super().job_cost(job)
        return Cost(work=16.0 + 64 * job.seq, tokens=64 * job.seq)


@given(
    weights=tenant_weights,
    batch_s=st.sampled_from([0.0, 0.05, 0.5]),
    chunk_s=st.sampled_from([0.001, 0.3]),
    data=st.data(),
)
@settings(deadline=None, max_examples=60, phases=QUICK)
def test_training_tenants_get_their_shares_despite_joining_and_reordering(
    weights: dict[str, float], batch_s: float, chunk_s: float, data: st.DataObject
) -> None:
    """Each repeats its own sequence of gradients and steps on its own models, always ahead."""
    costs = Blocks()
    scheduler = Scheduler(weights, batch_s=batch_s, costs=costs)
    part = st.tuples(st.sampled_from([GRADIENT, GRADIENT, STEP]), st.integers(1, 20))
    plans = {
        (tenant, model): cycle(data.draw(st.lists(part, min_size=1, max_size=6)))
        for tenant in weights
        for model in range(data.draw(st.integers(1, 3)))
    }
    device = Device(scheduler)
    used = dict.fromkeys(weights, 0.0)
    largest_s = step_s = 0.0
    for _ in range(60):
        for (tenant, model), plan in plans.items():
            mine = [job for job in device.pending if job.model_id == f"{tenant}-{model}"]
            for _ in range(4 - len(mine)):
                device.submit(tenant, *next(plan), f"{tenant}-{model}")
        batch = scheduler.next_batch(device.pending)
        check_batch(batch, device.pending)
        device.pending = [job for job in device.pending if job not in batch]
        each = [costs.job_cost(job) for job in batch]
        rate = chunk_s / 272 if batch[0].kind == GRADIENT else 1e-5
        seconds = rate * costs.batch_cost(each)
        scheduler.charge(batch, seconds)
        for job, cost in zip(batch, each, strict=True):
            used[job.tenant] += seconds * cost.work / sum(one.work for one in each)
            largest_s = max(largest_s, rate * costs.batch_cost([cost]))
            if job.kind == STEP:
                step_s = max(step_s, rate * cost.work)
        service = {tenant: spent / weights[tenant] for tenant, spent in used.items()}
        for tenant, served in service.items():
            ahead_s = max(batch_s, largest_s) + min(batch_s, step_s) + 1e-9
            assert served - min(service.values()) <= ahead_s / weights[tenant]


@given(weights=tenant_weights, data=st.data())
@settings(deadline=None, max_examples=20)
def test_equal_requests_are_served_in_proportion_to_the_weights(
    weights: dict[str, float], data: st.DataObject
) -> None:
    """All requests have one kind, as in a flood, so batches do not disturb the order."""
    device = Device(Scheduler(weights, batch_s=1.0, costs=Sizes()))
    size = data.draw(st.integers(1, 400))
    for tenant in [*weights] * 101:
        device.submit(tenant, GRADIENT, size)
    while len(device.done) < 70:
        device.run_batch()
        done = {t: sum(name.startswith(t) for name in device.done) for t in weights}
        per_weight = {tenant: done[tenant] / weight for tenant, weight in weights.items()}
        for tenant, weight in weights.items():
            assert per_weight[tenant] - min(per_weight.values()) <= 1 / weight + 1e-9


@given(
    weights=tenant_weights,
    batch_s=st.sampled_from([0.0, 0.05, 0.5]),
    data=st.data(),
)
@settings(deadline=None, max_examples=50, phases=QUICK)
def test_samplers_and_trainers_get_their_shares(
    weights: dict[str, float], batch_s: float, data: st.DataObject
) -> None:
    """Some tenants only sample, some only train, some do both. All have more work than there is
    time.

    Running samples continue with any others, so a tenant may be ahead by its running samples: up to
    one request in each of the 16 places, and one for the place that it is entitled to.
    """
    device = Device(Scheduler(weights, batch_s=batch_s, costs=Sizes()))
    plans = {
        tenant: cycle(
            data.draw(
                st.lists(
                    st.tuples(st.sampled_from([SAMPLE, GRADIENT]), job_sizes),
                    min_size=1,
                    max_size=6,
                )
            )
        )
        for tenant in weights
    }
    for _ in range(400):
        for tenant, plan in plans.items():
            kinds = [job.kind for job in device.pending if job.tenant == tenant]
            while len(kinds) < 34:
                kind, size = next(plan)
                kinds.append(kind)
                device.submit(tenant, kind, size)
        device.run_batch()
    service = {tenant: device.used[tenant] / weight for tenant, weight in weights.items()}
    ahead_s = max(batch_s, 1.0) * 17 + 1e-9
    for tenant, served in service.items():
        assert served - min(service.values()) <= ahead_s / weights[tenant]


models = st.sampled_from(["a1", "a2", "b1", "c1", "c2", "d1"])
arrivals = st.lists(
    st.tuples(models, st.sampled_from(list(JobKind)), job_sizes, st.sampled_from([0, 0, 0, 1])),
    max_size=60,
)


@given(arrivals, st.sampled_from([0.0, 0.1, 10.0]), st.data())
@settings(deadline=None, max_examples=150)
def test_a_backlog_drains_with_every_model_in_order(
    described: list[tuple[str, JobKind, int, int]], batch_s: float, data: st.DataObject
) -> None:
    """Jobs also arrive while batches run, in random groups. Some have killed a worker."""
    arriving = [
        Job(
            model[0], kind, "scope", seq=size, payload=b"x", attempts=attempts,
            model_id=None if kind == SAMPLE else model, request_id=str(number), release=number,
        )
        for number, (model, kind, size, attempts) in enumerate(described)
    ]  # fmt: skip
    device = Device(Scheduler(batch_s=batch_s, costs=Sizes()), dict.fromkeys(JobKind, 0.001))
    while arriving or device.pending or device.begun:
        number = data.draw(st.integers(0 if device.pending or device.begun else 1, 20))
        device.pending += arriving[:number]
        del arriving[:number]
        device.run_batch()
    done = [job for batch in device.batches for job in batch]
    assert sorted(job.release for job in done) == list(range(len(described)))
    for model in {job.model_id for job in done if job.model_id is not None}:
        order = [job.release for job in done if job.model_id == model]
        assert order == sorted(order)


def test_an_idle_tenant_gets_no_credit() -> None:
    device = Device(Scheduler(batch_s=0.05, costs=Sizes()))
    for _ in range(1000):
        device.submit("a", GRADIENT, 20)
    while device.now < 10:
        device.run_batch()
    before = dict(device.used)
    for _ in range(1000):
        device.submit("b", GRADIENT, 20)
    while device.now < 15:
        device.run_batch()
        since = device.used["a"] - before["a"]
        # the batch at its arrival counts as one
        assert abs(device.used["b"] - since) <= 0.05 + 0.02


def test_a_tenant_that_was_alone_owes_nothing() -> None:
    """It used the device while no other tenant wanted it."""
    device = Device(Scheduler(batch_s=0.05, costs=Sizes()))
    for _ in range(100):
        device.submit("a", GRADIENT, 100)
        device.run_batch()
        assert device.scheduler.next_batch(device.pending) == []
    before = device.used["a"]
    for _ in range(100):
        device.submit("a", GRADIENT, 20)
        device.submit("b", GRADIENT, 20)
    for _ in range(40):
        device.run_batch()
        assert abs(device.used["b"] - (device.used["a"] - before)) <= 0.05


def test_a_tenant_cannot_dodge_its_debt_by_leaving_and_returning() -> None:
    device = Device(Scheduler(batch_s=0.05, costs=Sizes()))
    for _ in range(1000):
        device.submit("a", GRADIENT, 10)
    for _ in range(9):
        name = device.submit("dodger", GRADIENT, 1000)
        while name not in device.done:
            device.run_batch()
    assert device.used["dodger"] == 9
    assert 8 - 0.1 <= device.used["a"] < 10


@pytest.mark.parametrize("floods", [1, 2, 5])
@pytest.mark.parametrize("kind", [GRADIENT, SAMPLE])
def test_a_light_tenant_waits_for_the_running_batch_and_its_own(floods: int, kind: JobKind) -> None:
    """Five times more work arrives than the device can do: requests of 2 to 40 ms, for 10 s.

    The light tenant sometimes sends one of 5 ms, which may arrive at any moment of a batch.
    """
    batch_s = 0.1
    device = Device(Scheduler(batch_s=batch_s, costs=Sizes()))
    sizes = (2, 7, 20, 40)
    arrived = next_light = 0.0
    sent: dict[str, float] = {}
    while device.now < 10:
        while arrived < 5 * device.now + 1:
            number = len(device.done) + len(device.pending)
            size = sizes[number % len(sizes)]
            device.submit(f"flood-{number % floods}", GRADIENT, size)
            arrived += size * 0.001
        if device.now >= next_light:
            name = device.submit("light", kind, 5)
            sent[name] = next_light  # while the last batch ran
            next_light = device.now + 0.17 * (floods + 1)
        device.run_batch()
    waits = [device.done[name] - at for name, at in sent.items() if name in device.done]
    assert len(waits) > 8
    longest_batch_s = max(sum(job.seq for job in batch) * 0.001 for batch in device.batches)
    assert longest_batch_s <= batch_s + 1e-9
    assert max(waits) <= 2 * batch_s + 1e-9
    for batch in device.batches:  # one kind of job per batch
        assert len({job.kind for job in batch}) == 1


def test_an_overloaded_device_serves_by_weight_and_remembers_only_tenants_with_work() -> None:
    weights = {"gold": 3.0, "plain": 1.0, "cheap": 0.5}
    device = Device(Scheduler(weights, batch_s=0.05, costs=Sizes()), compile_s=3.0)
    for number in range(3000):
        device.submit(list(weights)[number % 3], (GRADIENT, SAMPLE)[number % 2], 5 + number % 20)
    for number in range(200):
        device.submit(f"once-{number}", GRADIENT, 5)
    while device.now < 20:
        device.run_batch()
    service = {tenant: device.used[tenant] / weight for tenant, weight in weights.items()}
    assert max(service.values()) - min(service.values()) <= 3.03 / 0.5
    device.pending = [job for job in device.pending if job.tenant in weights]
    while device.pending or device.begun:
        device.run_batch()
    device.scheduler.next_batch([])
    assert not device.scheduler._shares._counters and not device.scheduler._shares._last_batch
