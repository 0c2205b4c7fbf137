"""Waits for the results of requests whose clients hold the line."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from tuneserve_engine.jobs import Outcome, Rejection
from tuneserve_engine.queue.base import StoreFailed
from tuneserve_engine.queue.streams import Heard, Told
from tuneserve_engine.repeats import Repeats
from tuneserve_server.deps import Caller
from tuneserve_server.errors import ApiError, Crowded, InvalidRequest, StoreUnavailable

logger = logging.getLogger(__name__)
_faults = Repeats(logger)

LONGEST_S = 3600.0
"""Clients give up long before; their proxies too."""
_AWAY_S = 1.0


def check_crowd(caller: Caller) -> None:
    """Raises ``Crowded`` if the caller waits for as much as it may."""
    most = caller.settings.max_polls_per_tenant
    with caller.polls.counted(caller.tenant) as held:
        if held > most:
            raise Crowded(
                f"your key has {held - 1} requests waiting here, and this server holds {most} of "
                "one client; nothing was accepted; send it again when some have ended",
                1,
            )


async def results(
    caller: Caller, request_ids: Sequence[str], heard: Heard | None = None
) -> AsyncGenerator[bytes | Told | None]:
    """Each result in order, and what is heard before it; None whenever ``poll_s`` goes by without
    a result.

    Raises ``ApiError``: what the request failed with, or that the process stops.
    """
    until_s = time.monotonic() + LONGEST_S
    with caller.polls.counted(caller.tenant):
        for request_id in request_ids:
            while True:
                waiting = asyncio.ensure_future(_outcome(caller, request_id))
                try:
                    while heard is not None and (told := await _before(waiting, heard)):
                        yield told
                    outcome = await waiting
                finally:
                    waiting.cancel()
                if outcome is not None:
                    break
                if time.monotonic() > until_s:
                    raise StoreUnavailable(
                        f"no result within {LONGEST_S:g} s; the service is too busy, or has no "
                        "worker; send it again when it is back"
                    )
                yield None
            if outcome.rejection is not None:
                raise _failure(outcome.rejection)
            yield outcome.body


async def _before(waiting: asyncio.Future[Outcome | None], heard: Heard) -> Told:
    """What is heard before that has ended; nothing once it has."""
    listening = asyncio.ensure_future(heard.take())
    try:
        await asyncio.wait((waiting, listening), return_when=asyncio.FIRST_COMPLETED)
        return listening.result() if listening.done() else []
    finally:
        listening.cancel()


async def give_up(caller: Caller, request_ids: Sequence[str]) -> None:
    """Nobody waits for these any more."""
    for request_id in request_ids:
        with suppress(StoreFailed, ConnectionError, KeyError):
            await caller.store.cancel(request_id)


async def _outcome(caller: Caller, request_id: str) -> Outcome | None:
    """The outcome; None if there is none yet, or the store is away."""
    pause_s = caller.settings.poll_s

    async def waiting() -> tuple[Outcome | None]:
        return (await caller.store.wait(request_id, pause_s),)

    try:
        held = await caller.polls.hold(waiting(), LONGEST_S)
    except (StoreFailed, ConnectionError) as error:
        _faults.warn("away", f"the store did not answer who waits for a result: {error}")
        await caller.polls.pause(_AWAY_S)
        return None
    if held is None:
        raise StoreUnavailable("the service is stopping; send the request again")
    return held[0]


def _failure(rejection: Rejection) -> ApiError:
    if rejection.category == "user":
        return InvalidRequest(rejection.message)
    return ApiError(rejection.message)
