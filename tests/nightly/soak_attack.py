"""Many attacks for a given time: ``soak_attack.py <port> <base model> <seconds>``.

It says ``ready`` when its bodies are made, starts when its standard input ends, and prints as JSON
the number of requests of each kind by status (0: the connection ended). Two tenants occupy the
device all the time: one with requests of half a million tokens, one with a flood of five thousand
each. Eight others send rounds of everything else, one kind after the other. The process yields the
processor to all others, because real attackers have their own machines.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import httpx

from tests.faults.body_attacks import MISFITS, NUMBERS, TENANTS, Attacker, prompt
from tests.nightly.test_giants import FLOOD, GIANT, data
from tests.server.conftest import PROTOBUF, asample
from tuneserve_client.codec import encode_data, encode_gradient

Round = Callable[[], Awaitable[list[Awaitable[int]]]]

BOMBS, SLOW, PROMPTS, REFUSED, SESSIONS = 200, 200, 50, 400, 400
MISFITTING, POLLS = 120, 1200
"""Requests of one round."""
FLOODING = 50
"""Requests of five thousand tokens that wait at any time."""
PAUSE_S = 2.0
AGAIN_S = 1.0
METADATA = {"about": "x" * 16_000}


class Soak(Attacker):
    """An attacker: ``statuses`` of its requests by kind, and the number of finished ``rounds``."""

    def __init__(self, port: int, http: httpx.AsyncClient, base_model: str) -> None:
        super().__init__(port, http, base_model)
        self.statuses: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.rounds: Counter[str] = Counter()
        self._seqs = iter(range(1, 2**31))

    async def prepare(self) -> None:
        self._bombs = await self.bomb_bodies(BOMBS, b"", declared=True)
        self._undeclared = await self.bomb_bodies(BOMBS, os.urandom(70_000), declared=False)
        self._prompt = prompt(self.base_model)
        self._samplers = [await self.sampler(number) for number in range(TENANTS)]
        self._heavy = {
            number: await self.model(number, rank=8) for number in (TENANTS, TENANTS + 1)
        }

    # --- rounds ---------------------------------------------------------------------------------

    async def sent_in_rounds(self) -> None:
        """Send rounds for ever."""
        kinds: dict[str, Round] = {
            "bombs": self._of(lambda: self.frames(self._bombs)),
            "bombs without a size": self._of(lambda: self.frames(self._undeclared)),
            "slow bodies": lambda: self.slow(SLOW),
            "prompts": lambda: self.texts(PROMPTS, "/v1/completions", self._prompt),
            "numbers": lambda: self.texts(PROMPTS, "/api/v1/asample", NUMBERS),
            "wrong elements": lambda: self.mixed(MISFITTING, MISFITS),
            "polls": self._of(lambda: self.polls_of(self._samplers, POLLS)),
            "sessions": self._of(lambda: [self._opened(n % TENANTS) for n in range(SESSIONS)]),
            "refused samples": self._of(lambda: self._wrong_samples({"seed": -1})),
            "failing samples": self._of(lambda: self._wrong_samples({"stop": [10**6]})),
        }
        while True:
            for kind, begin in kinds.items():
                self.statuses[kind].update(await asyncio.gather(*await begin()))
                self.rounds[kind] += 1
                await asyncio.sleep(PAUSE_S)

    def _of(self, begin: Callable[[], list[Awaitable[int]]]) -> Round:
        async def round_() -> list[Awaitable[int]]:
            return begin()

        return round_

    def _opened(self, number: int) -> Awaitable[int]:
        body = {"tags": [], "user_metadata": METADATA, "sdk_version": "0.38.0"}
        return self.status(self.post("/api/v1/create_session", number, json=body))

    def _wrong_samples(self, wrong: dict[str, object]) -> list[Awaitable[int]]:
        return [self._wrong_sample(number % TENANTS, wrong) for number in range(REFUSED)]

    def _wrong_sample(self, number: int, wrong: dict[str, object]) -> Awaitable[int]:
        body = asample(self._samplers[number], next(self._seqs), sampling_params=wrong)
        return self.status(self.post("/api/v1/asample", number, json=body))

    # --- work for the device --------------------------------------------------------------------

    async def giants(self) -> None:
        """Send giant requests for ever, one after the other."""
        for seq, body in self._gradients(TENANTS, GIANT):
            await self._trained("giant requests", TENANTS, seq, body)

    async def flood(self) -> None:
        """Keep a constant number of requests waiting, for ever."""
        places = asyncio.Semaphore(FLOODING)
        async with asyncio.TaskGroup() as waiting:
            for seq, body in self._gradients(TENANTS + 1, FLOOD):
                await places.acquire()
                ending = self._trained("requests of 5,000 tokens", TENANTS + 1, seq, body)
                waiting.create_task(ending).add_done_callback(lambda _: places.release())

    def _gradients(self, number: int, size: tuple[int, int]) -> Iterator[tuple[int, bytes]]:
        model, encoded = self._heavy[number], encode_data(data(*size))
        for seq in range(1, 2**31):
            yield (
                seq,
                encode_gradient(model, seq, encoded, "cross_entropy", {}, forward_only=False),
            )

    async def _trained(self, kind: str, number: int, seq: int, body: bytes) -> None:
        """Send the request until it is accepted, and poll until it has ended."""
        request_id = None
        while request_id is None:
            with suppress(httpx.TransportError):
                sent = await self.post("/api/v1/forward_backward", number, content=body)
                self.statuses[kind][sent.status_code] += 1
                if sent.status_code == 200:
                    request_id = sent.json()["request_id"]
                    break
            await asyncio.sleep(AGAIN_S)
        while True:
            with suppress(httpx.TransportError):
                asked = {"request_id": request_id}
                answer = await self.post("/api/v1/retrieve_future", number, json=asked)
                if answer.status_code == 200:
                    assert PROTOBUF in answer.headers["content-type"], answer.text
                    self.rounds[kind] += 1
                    return
            await asyncio.sleep(AGAIN_S * random.random())


async def main(port: int, base_model: str, seconds: float) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=120, trust_env=False) as http:
        soak = Soak(port, http, base_model)
        await soak.prepare()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        started_s = time.monotonic()
        running = [
            asyncio.create_task(each)
            for each in (soak.sent_in_rounds(), soak.giants(), soak.flood())
        ]
        ended, _ = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task in ended:
            task.result()  # tasks end only by an error
    found = {"statuses": soak.statuses, "rounds": soak.rounds}
    print(json.dumps({**found, "seconds": time.monotonic() - started_s}))


if __name__ == "__main__":
    os.nice(19)
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
