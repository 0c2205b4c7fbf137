"""A waiting call gets its result in whatever order the connections to Redis are read."""

import asyncio
from typing import Any, cast

from tuneserve_engine.core.jobs import Outcome
from tuneserve_engine.store.redis.connection import Server
from tuneserve_engine.store.redis.notifications import RedisNotifications

UNFINISHED = [b"ready", None, None, None, None, b"1.0", None]
DONE = [b"done", None, b"application/json", b"{}", None, b"1.0", b"2.0"]


class Slow:
    """Answers the second query late, with an outdated result."""

    def __init__(self) -> None:
        self.rows = [UNFINISHED, UNFINISHED, DONE]
        self.looks = 0
        self.is_looked_at = asyncio.Event()
        self.answer = asyncio.Event()

    async def run_script(self, _step: str, *_ids: str) -> list[Any]:
        self.looks += 1
        if self.looks == 2:
            self.is_looked_at.set()
            await self.answer.wait()
        return [self.rows[self.looks - 1]]


def test_a_notification_that_overtakes_an_older_query_is_not_lost() -> None:
    async def main() -> None:
        server = Slow()
        news = RedisNotifications(cast(Server, server))
        fetching = asyncio.create_task(news._fetch())
        waiting = asyncio.create_task(news.outcome("request", 10))
        await asyncio.sleep(0.01)
        news._look_again()
        await server.is_looked_at.wait()
        news._hear(b"0 request")
        server.answer.set()
        async with asyncio.timeout(2):
            assert await waiting == Outcome("request", b"{}")
        fetching.cancel()

    asyncio.run(main())
