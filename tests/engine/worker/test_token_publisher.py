"""Tokens travel from the device to subscribers while the sample continues."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.fake_backend import FAKE_INFO
from tests.support.worker_bench import TIMEOUT_S, Bench, Counting, run, until
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.backend.base import SampleProgress, SampleResult, SamplingRequest
from tuneserve_engine.core.jobs import Job, JobKind, SampleCommand, encode
from tuneserve_engine.store.pubsub import Subscription
from tuneserve_engine.worker import token_publisher as live_module
from tuneserve_engine.worker.device_loop import _TimeSlice

TOKENS = 12
SEED = 5
WHOLE = [[(SEED + n + 2 + place) % 64 for place in range(TOKENS)] for n in range(2)]


class Stepwise(Counting):
    """A backend that decodes one token of each streamed sequence per permit."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)

    def draw(self, count: int) -> None:
        self.permits.release(count)

    def sample_until(
        self, asked: Mapping[str, SamplingRequest], should_yield: Callable[[], bool]
    ) -> SampleProgress:
        assert self.permits.acquire(timeout=TIMEOUT_S)
        return super().sample_until(asked, lambda: True)


async def begun(bench: Bench, backend: Stepwise | None = None) -> Stepwise:
    """Start a new worker in place of the bench's."""
    if isinstance(bench.backend, Stepwise):
        bench.backend.draw(1000)
    await bench.kill()
    backend = backend or Stepwise()
    bench.start(backend)
    return backend


async def asked(bench: Bench, stream: str, seed: int = SEED) -> str:
    command = SampleCommand(
        prompt=[1, 2], seed=seed, num_samples=2, max_tokens=TOKENS, stream=stream
    )
    payload = encode(command)
    job = Job("a", JobKind.SAMPLE, f"a:{stream}", 0, payload, base_model=FAKE_INFO.name)
    return (await bench.store.submit(job)).request_id


class Listener:
    """The tokens that were received, by sequence."""

    def __init__(self, heard: Subscription) -> None:
        self._heard = heard
        self.tokens: list[list[int]] = [[], []]
        self.starts: list[int] = []

    async def until(self, count: int) -> None:
        """Return when ``count`` tokens of every sequence have been received."""
        async with asyncio.timeout(TIMEOUT_S):
            while min(map(len, self.tokens)) < count:
                for _, part in await self._heard.take_deltas():
                    message = wire.SampledSequence.FromString(part.drawn)
                    tokens = np.frombuffer(message.tokens, "<i4").tolist()
                    assert len(message.logprobs or b"") == len(message.tokens)
                    known = self.tokens[part.sequence]
                    assert tokens == WHOLE[part.sequence][part.start :][: len(tokens)]
                    assert part.start <= len(known)
                    known += tokens[len(known) - part.start :]
                    self.starts.append(part.start)


def test_tokens_arrive_before_the_last_is_decoded(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        backend = await begun(bench)
        listener = Listener(bench.store.subscribe(["one"]))
        request_id = await asked(bench, "one")
        for count in range(1, TOKENS):
            backend.draw(1)
            await listener.until(count)
            assert listener.tokens == [each[:count] for each in WHOLE]
        assert await bench.store.wait(request_id, 0) is None
        backend.draw(1)
        message = wire.SampleResponse.FromString(await bench.ok(request_id))
        found = [np.frombuffer(each.tokens, "<i4").tolist() for each in message.sequences]
        assert found == WHOLE

    run(tmp_path, scenario)


def test_a_worker_that_takes_over_a_sample_streams_it_from_the_start(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        backend = await begun(bench)
        listener = Listener(bench.store.subscribe(["one"]))
        request_id = await asked(bench, "one")
        backend.draw(3)
        await listener.until(3)
        backend = await begun(bench)
        backend.draw(5)
        await listener.until(5)
        assert listener.starts.count(0) == 4
        backend.draw(TOKENS)
        await bench.ok(request_id)

    run(tmp_path, scenario)


def test_tokens_that_the_store_misses_are_lost_and_the_worker_continues(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        backend = await begun(bench)
        bench.line.breaks = {"publish_tokens": ["before"]}
        heard = bench.store.subscribe(["one"])
        request_id = await asked(bench, "one")
        backend.draw(1)
        await until(lambda: "publish_tokens" in bench.line.calls)
        backend.draw(1)
        async with asyncio.timeout(TIMEOUT_S):
            told = await heard.take_deltas()
        assert [part.start for _, part in told] == [1, 1]
        backend.draw(TOKENS)
        await bench.ok(request_id)

    run(tmp_path, scenario)


def test_one_message_at_a_time_carries_all_tokens_of_the_meantime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "_PUBLISH_S", 1.0)

    async def scenario(bench: Bench) -> None:
        backend = await begun(bench)
        listener = Listener(bench.store.subscribe(["one"]))
        request_id = await asked(bench, "one")
        backend.draw(1)
        await listener.until(1)
        backend.draw(TOKENS - 2)
        await listener.until(TOKENS - 1)
        assert bench.line.calls.count("publish_tokens") == 2
        backend.draw(1)
        await bench.ok(request_id)

    run(tmp_path, scenario)


def test_samples_without_subscribers_are_not_published(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        backend = await begun(bench)
        backend.draw(TOKENS)
        await bench.ok(await bench.sample("b", 1))
        assert "publish_tokens" not in bench.line.calls

    run(tmp_path, scenario)


def test_numbers_that_will_fail_the_sample_are_not_published(tmp_path: Path) -> None:
    class Broken(Stepwise):
        def sample(self, requests: Sequence[SamplingRequest]) -> list[SampleResult]:
            (result,) = super().sample(requests)
            first = result.sequences[0]
            broken = replace(first, logprobs=first.logprobs * np.float32(np.nan))
            return [replace(result, sequences=(broken, *result.sequences[1:]))]

    async def scenario(bench: Bench) -> None:
        backend = await begun(bench, Broken())
        request_id = await asked(bench, "one")
        backend.draw(TOKENS)
        rejection = (await bench.outcome(request_id)).rejection
        assert rejection is not None and "not finite" in rejection.message
        assert "publish_tokens" not in bench.line.calls

    run(tmp_path, scenario)


def test_slices_are_short_while_a_client_streams(tmp_path: Path) -> None:
    """This holds although no other work waits for the device."""

    async def scenario(bench: Bench) -> None:
        await begun(bench)
        batches = bench.worker._device_loop
        executor = batches._executor
        assert not executor.has_streams

        turn = _TimeSlice([], {}, batches._clock() - 0.1)
        assert not batches._should_yield(turn)
        await asked(bench, "one")
        assert isinstance(bench.backend, Stepwise)
        bench.backend.draw(1)
        await until(lambda: executor.has_streams)
        turn.started_s = batches._clock() - 0.1
        assert batches._should_yield(turn)
        bench.backend.draw(TOKENS)

    run(tmp_path, scenario)
