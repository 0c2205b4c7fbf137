"""The futures of requests. The key and the ``request_id`` are enough to fetch a result, also from
another process or on another day."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, Generic, TypeVar

from tuneserve_client.errors import (
    Overloaded,
    RequestFailed,
    ServerFault,
    TuneserveError,
    Unreachable,
)
from tuneserve_client.transport import API, Answer, Transport
from tuneserve_client.wire.types import CancelRequest

T = TypeVar("T")
P = TypeVar("P")

_JOINT = ","  # joins the ids of a request that was sent in parts; an id has no comma


class AsyncFuture(Generic[T]):
    """A request under way. ``await`` it for its result, as often as you like.

    The request is sent at once, before later requests, even if it is never awaited. The result is
    fetched from the first ``await`` on.
    """

    def __init__(
        self,
        transport: Transport,
        sending: Coroutine[Any, Any, list[str]],
        read: Callable[[Sequence[Answer]], T],
    ) -> None:
        self._transport = transport
        self._read = read
        self.sending = asyncio.create_task(sending)
        self.sending.add_done_callback(_noted)
        self._polling: asyncio.Task[T] | None = None
        self.on_failure: Callable[[RequestFailed], Awaitable[None]] | None = None
        """A function that may raise a more exact error than the one that the request ended in."""

    def __repr__(self) -> str:
        state = "being sent"
        if self.sending.done():
            is_here = self._polling is not None and self._polling.done()
            state = "done" if is_here else "accepted"
        return f"{type(self).__name__}({state})"

    async def accepted(self) -> str:
        """Return the ``request_id``, once the server has accepted the request.

        From then on the request will run, even if this process ends. If the request could not be
        sent, raises the reason.
        """
        return _JOINT.join(await asyncio.shield(self.sending))

    async def result(self, timeout: float | None = None) -> T:
        """Return the result.

        Raises ``RequestFailed`` if the request ended in an error, and ``TimeoutError`` after
        ``timeout`` seconds: the request still runs then, and can be awaited again.
        """
        return await asyncio.wait_for(asyncio.shield(self.start()), timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    def start(self) -> "asyncio.Task[T]":
        """Start to fetch the result."""
        if self._polling is None or _is_worth_another(self._polling):
            self._polling = asyncio.create_task(self._poll())
            self._polling.add_done_callback(_noted)
        return self._polling

    def done(self) -> bool:
        """Return whether the result, or the error, is here. The first call starts to fetch it."""
        return self.start().done()

    async def cancel(self) -> None:
        """Cancel a sample.

        Raises ``InvalidRequest`` for other requests, which run in order.
        """
        for request_id in await asyncio.shield(self.sending):
            body = CancelRequest(request_id=request_id)
            await self._transport.call("POST", f"{API}/cancel_future", body=body)

    async def _poll(self) -> T:
        request_ids = await asyncio.shield(self.sending)
        try:
            return self._read(await of_all_parts(map(self._transport.result, request_ids)))
        except RequestFailed as error:
            if self.on_failure is not None:
                await self.on_failure(error)
            raise


async def of_all_parts(parts: Iterable[Awaitable[P]]) -> list[P]:
    """Return the results of all parts of one call, once the last part has ended.

    Raises the first error, with the number of failed parts in its message. The other parts keep
    their effect.
    """
    ended = await asyncio.gather(*parts, return_exceptions=True)
    errors = [each for each in ended if isinstance(each, BaseException)]
    if not errors:
        return [each for each in ended if not isinstance(each, BaseException)]
    if len(errors) < len(ended) and isinstance(errors[0], TuneserveError):
        errors[0].args = (
            f"{errors[0]}; this call was sent in {len(ended)} parts, of which {len(errors)} failed "
            "while the others took effect; the next step applies any gradients that they added",
        )
    raise errors[0]


def _is_worth_another(polling: "asyncio.Task[Any]") -> bool:
    """Return whether polling ended because the server was away: the result may exist."""
    if not polling.done() or polling.cancelled():
        return False
    return isinstance(polling.exception(), (Unreachable, ServerFault, Overloaded))


def split_id(request_id: str) -> list[str]:
    """Return the request ids in an id from ``accepted``, one for each part."""
    return request_id.split(_JOINT)


def _noted(task: "asyncio.Task[Any]") -> None:
    """Read the task's exception, or asyncio would complain if the task is never awaited."""
    if not task.cancelled():
        task.exception()
