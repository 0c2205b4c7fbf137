"""The wait for the results of requests whose clients keep the connection open."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from tuneserve_engine.core.jobs import Outcome, Rejection
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_engine.store.pubsub import Subscription, TokenEvents
from tuneserve_engine.telemetry.log_throttle import ThrottledLog
from tuneserve_server.dependencies import Caller
from tuneserve_server.errors import ApiError, BadRequest, StoreUnavailable, TooManyRequests

logger = logging.getLogger(__name__)
_faults = ThrottledLog(logger)

LONGEST_S = 3600.0
"""The longest wait for a result; clients and proxies give up much earlier."""
_AWAY_S = 1.0


def check_crowd(caller: Caller) -> None:
    """Raise ``TooManyRequests`` if the caller has as many waiting requests as it may have."""
    most = caller.settings.max_polls_per_tenant
    with caller.polls.counted(caller.tenant) as held:
        if held > most:
            raise TooManyRequests(
                f"your key has {held - 1} requests waiting here, and the limit is {most}; nothing "
                "was accepted; send this request again when some have ended",
                1,
            )


async def results(
    caller: Caller, request_ids: Sequence[str], heard: Subscription | None = None
) -> AsyncGenerator[bytes | TokenEvents | None]:
    """Yield each result in order, and before it the token events that ``heard`` delivers.

    Yields None whenever ``poll_s`` passes without a result. Raises the ``ApiError`` with which a
    request failed, and ``StoreUnavailable`` if the process stops or ``LONGEST_S`` has passed.
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
                        f"no result within {LONGEST_S:g} s; the server is too busy, or has no "
                        "worker; send the request again later"
                    )
                yield None
            if outcome.rejection is not None:
                raise _failure(outcome.rejection)
            yield outcome.body


async def _before(waiting: asyncio.Future[Outcome | None], heard: Subscription) -> TokenEvents:
    """Return the token events heard before ``waiting`` ends, or none once it has ended."""
    listening = asyncio.ensure_future(heard.take_deltas())
    try:
        await asyncio.wait((waiting, listening), return_when=asyncio.FIRST_COMPLETED)
        return listening.result() if listening.done() else []
    finally:
        listening.cancel()


async def give_up(caller: Caller, request_ids: Sequence[str]) -> None:
    """Cancel requests whose results are no longer wanted."""
    for request_id in request_ids:
        with suppress(StoreFailed, ConnectionError, KeyError):
            await caller.store.cancel(request_id)


async def _outcome(caller: Caller, request_id: str) -> Outcome | None:
    """Return the outcome, or None if there is none yet or the store is unreachable."""
    pause_s = caller.settings.poll_s

    async def waiting() -> tuple[Outcome | None]:
        return (await caller.store.wait(request_id, pause_s),)

    try:
        held = await caller.polls.hold(waiting(), LONGEST_S)
    except (StoreFailed, ConnectionError) as error:
        _faults.warn(
            "away", f"the store did not answer a request that waits for its result: {error}"
        )
        await caller.polls.pause(_AWAY_S)
        return None
    if held is None:
        raise StoreUnavailable("the server is stopping; send the request again")
    return held[0]


def _failure(rejection: Rejection) -> ApiError:
    if rejection.category == "user":
        return BadRequest(rejection.message)
    return ApiError(rejection.message)
