"""The shared part of an adapter kind is prepared before the first adapter, beside other work."""

import threading
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tests.support.worker_bench import CONFIG, TIMEOUT_S, Bench, Counting, run, until
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import ServerError
from tuneserve_engine.core.grammar import Grammar
from tuneserve_engine.core.jobs import CreateModel, Job, JobKind, SampleCommand, encode
from tuneserve_engine.worker.execution.preparation import SamplePreparer

A = Grammar("regex", "a")


class Slow(Counting):
    """The shared part of its adapters takes as long to prepare as the test likes, or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end, self.begun, self.is_made = threading.Event(), threading.Event(), False
        self.times, self.fails = 0, False

    def is_prepared(self, config: AdapterConfig) -> bool:
        return self.is_made or config.seed == CONFIG.seed

    def prepare(self, config: AdapterConfig) -> str:
        self.times += 1
        self.begun.set()
        assert self.may_end.wait(TIMEOUT_S)
        if self.fails:
            raise ServerError("the disk is full; make room, and ask again")
        self.is_made = True
        return ""

    def create_adapter(self, adapter_id: str, config: AdapterConfig) -> None:
        if not self.is_prepared(config):
            raise ServerError("the disk is full; make room, and ask again")
        super().create_adapter(adapter_id, config)


OTHER = replace(CONFIG, seed=CONFIG.seed + 1, kind="osft", options={"form": "factors"})


async def create(bench: Bench, model: str) -> str:
    """Request an adapter of the kind that shares something."""
    payload = encode(CreateModel("tuneserve/fake", OTHER))
    return await bench.submit(JobKind.CREATE_MODEL, payload, model)


async def begun(bench: Bench) -> Slow:
    """Return once the worker has started to prepare."""
    backend = bench.backend
    assert isinstance(backend, Slow)
    await until(backend.begun.is_set)
    return backend


async def with_slow(bench: Bench) -> None:
    await bench.kill()
    bench.start(Slow(), name="another")


async def trained(bench: Bench) -> None:
    """A model "a" of the kind, with a gradient."""
    await with_slow(bench)
    request = await create(bench, "a")
    (await begun(bench)).may_end.set()
    await bench.ok(request)
    await bench.ok(await bench.gradient("a"))


def test_others_are_served_while_the_first_of_a_kind_waits(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await with_slow(bench)
        waiting = [await create(bench, "a"), await create(bench, "b")]
        behind = await bench.gradient("a")
        backend = await begun(bench)
        await bench.ok(await bench.create("c"))
        await bench.ok(await bench.gradient("c"))
        assert all([await bench.store.wait(each, 0) is None for each in (*waiting, behind)])
        backend.may_end.set()
        for each in (*waiting, behind):
            await bench.ok(each)

    run(tmp_path, scenario)


def test_a_failed_preparation_ends_the_request_with_the_reason(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await with_slow(bench)
        request = await create(bench, "a")
        backend = await begun(bench)
        backend.fails = True
        backend.may_end.set()
        outcome = await bench.outcome(request)
        assert outcome.rejection is not None
        assert "the disk is full; make room" in outcome.rejection.message
        backend.fails = False
        await bench.ok(await create(bench, "b"))
        assert backend.times == 2

    run(tmp_path, scenario)


def test_a_worker_that_dies_while_preparing_leaves_the_request_to_the_next(
    tmp_path: Path,
) -> None:
    async def scenario(bench: Bench) -> None:
        await with_slow(bench)
        request = await create(bench, "a")
        (await begun(bench)).may_end.set()
        await bench.kill()
        bench.start(Slow(), name="another")
        (await begun(bench)).may_end.set()
        await bench.ok(request)
        await bench.ok(await bench.gradient("a"))

    run(tmp_path, scenario)


def test_a_model_of_the_kind_is_restored_after_the_preparation(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await trained(bench)
        bench.worker.stop()
        await bench.task
        bench.start(Slow(), name="another")
        step = await bench.step("a")
        await bench.ok(await bench.create("c"))
        assert await bench.store.wait(step, 0) is None
        (await begun(bench)).may_end.set()
        await bench.ok(step)

    run(tmp_path, scenario)


def test_a_model_without_a_point_is_created_again_after_the_preparation(
    tmp_path: Path,
) -> None:
    async def scenario(bench: Bench) -> None:
        await trained(bench)
        await bench.kill()
        bench.start(Slow(), name="another")
        step = await bench.step("a")
        backend = await begun(bench)
        await bench.ok(await bench.create("c"))
        assert await bench.store.wait(step, 0) is None
        backend.may_end.set()
        await bench.ok(step)
        assert backend.times == 1

    run(tmp_path, scenario)


def test_a_payload_that_cannot_be_decoded_needs_no_preparation(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        request = await bench.submit(JobKind.CREATE_MODEL, b"no command", "a")
        assert (await bench.outcome(request)).rejection is not None
        await bench.ok(await bench.create("b"))

    run(tmp_path, scenario)


class Grammars(Counting):
    """Its grammars take as long to compile as the test likes."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end: dict[str, threading.Event] = defaultdict(threading.Event)
        self.begun: list[str] = []
        self.compiled: list[str] = []

    def pending_grammar(self, grammar: Grammar) -> Any:
        return None if grammar.text in self.compiled else partial(self._compile, grammar.text)

    def _compile(self, text: str) -> None:
        self.begun.append(text)
        assert self.may_end[text].wait(TIMEOUT_S)
        self.compiled.append(text)


async def with_grammars(bench: Bench) -> Grammars:
    await bench.kill()
    backend = Grammars()
    bench.start(backend, name="another")
    return backend


SEQ = count()


async def sample(bench: Bench, text: str | None, tenant: str = "t") -> str:
    grammar = None if text is None else Grammar("regex", text)
    return await bench.sample(tenant, next(SEQ), grammar)


def test_samples_wait_for_their_grammar_and_others_do_not(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        backend = await with_grammars(bench)
        waiting = [await sample(bench, "a"), await sample(bench, "a")]
        await until(lambda: backend.begun == ["a"])
        await bench.ok(await sample(bench, None))
        assert all([await bench.store.wait(each, 0) is None for each in waiting])
        backend.may_end["a"].set()
        for each in waiting:
            await bench.ok(each)
        await bench.ok(await sample(bench, "a"))
        assert backend.begun == ["a"]

    run(tmp_path, scenario)


def test_a_tenant_has_one_compilation_at_a_time(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        backend = await with_grammars(bench)
        mine = [await sample(bench, text) for text in ("a", "b")]
        await until(lambda: backend.begun == ["a"])
        backend.may_end["c"].set()
        await bench.ok(await sample(bench, "c", tenant="u"))
        assert backend.begun == ["a", "c"]
        backend.may_end["a"].set()
        await bench.ok(mine[0])
        await until(lambda: backend.begun == ["a", "c", "b"])
        backend.may_end["b"].set()
        await bench.ok(mine[1])

    run(tmp_path, scenario)


def test_a_cancelled_sample_is_not_passed_on(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        passed: list[str] = []
        waiting: list[Any] = []
        job = Job("t", JobKind.SAMPLE, "s", 0, encode(SampleCommand([1], 1, grammar=A)))
        jobs = [replace(job, request_id=name) for name in "pq"]
        may_end = threading.Event()
        preparer = SamplePreparer(
            lambda _: partial(may_end.wait, TIMEOUT_S),
            lambda each: passed.append(each.request_id),
            waiting.append,
        )
        for each in jobs:
            preparer.route(each)
        preparer.drop_requests(["p"])
        may_end.set()
        await waiting[0]
        assert (passed, len(waiting)) == (["q"], 1)

    run(tmp_path, scenario)
