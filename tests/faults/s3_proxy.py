"""A proxy before an S3 server that fails some requests, as networks and object stores do."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Literal

from tests.faults.fault_proxy import FaultProxy, Message

Fault = Literal["500", "503", "403", "reset", "unanswered", "cut", "slow", ""]
"""``reset``: the request does not arrive. ``unanswered``: it does, and its answer is lost. ``cut``:
half of the answer arrives. The numbers are statuses of the answer."""
KINDS: tuple[Fault, ...] = ("500", "503", "reset", "unanswered", "cut", "slow")
Plan = Callable[[str, str, int], Fault]
"""Returns the fault of a request from its method, its path, and how often that came before."""


def some(share: float, seed: int) -> Plan:
    """A plan with this share of faults, of all kinds in turn."""
    draw = random.Random(seed)
    kinds = itertools.cycle(KINDS)
    return lambda *_: next(kinds) if draw.random() < share else ""


class S3Proxy(FaultProxy):
    """A proxy to the S3 server at ``port``; ``counts`` has the number of each fault."""

    def __init__(self, port: int, plan: Plan, slow_s: float = 0.3) -> None:
        super().__init__(port, seed=0)
        self.plan = plan
        self.port = int(self.url.rpartition(":")[2])
        self.requests: list[str] = []
        self._slow_s = slow_s
        self._before: Counter[str] = Counter()

    async def _carry(self, request: Message) -> tuple[bytes, bool]:
        method, path, _ = request.start.split(" ")
        asked = f"{method} {path}"
        self.requests.append(asked)
        fault = self.plan(method, path, self._before[asked])
        self._before[asked] += 1
        if fault:
            self.counts[fault] += 1
        if fault == "reset":
            return b"", False
        if fault.isdecimal():
            body = b"<Error><Code>Injected</Code><Message>no</Message></Error>"
            head = {"content-length": str(len(body)), "content-type": "application/xml"}
            return Message(f"HTTP/1.1 {fault} Injected", head, body).encode(), True
        if fault == "slow":
            await asyncio.sleep(self._slow_s)
        answer = await self._ask(request)
        if fault == "unanswered":
            return b"", False
        return (answer[: len(answer) // 2], False) if fault == "cut" else (answer, True)

    async def _ask(self, request: Message) -> bytes:
        """The server's whole answer, over a new connection; to HEAD it has no body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(request.encode(connection="close"))
            answer = await reader.read()
        finally:
            writer.transport.abort()
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection")]
        return b"\r\n".join(lines) + b"\r\n\r\n" + body
