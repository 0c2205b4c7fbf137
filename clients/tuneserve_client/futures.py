"""Results that come later: requests whose place is kept, and whose answer can be fetched by anyone
who has the key and the ``request_id``, from another process, another day."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, Generic, TypeVar

from tuneserve_client.errors import Overloaded, ServerFault, TuneserveError, Unreachable
from tuneserve_client.transport import API, Answer, Transport
from tuneserve_client.types import CancelRequest

T = TypeVar("T")
P = TypeVar("P")

_JOINT = ","  # between the ids of a request that was sent in parts; ids have none


class AsyncFuture(Generic[T]):
    """A request on its way. ``await`` it for its result, as often as you like.

    It is sent at once, before those that are made after it, whether anybody awaits it or not;
    its result is asked for when somebody does.
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

    def __repr__(self) -> str:
        state = "being sent"
        if self.sending.done():
            is_here = self._polling is not None and self._polling.done()
            state = "done" if is_here else "accepted"
        return f"{type(self).__name__}({state})"

    async def accepted(self) -> str:
        """The ``request_id``, once the server has it: from then on it will run, whatever becomes
        of this process. Raises what sending it raised."""
        return _JOINT.join(await asyncio.shield(self.sending))

    async def result(self, timeout: float | None = None) -> T:
        """The result. Raises ``RequestFailed`` if it ended in an error, and ``TimeoutError`` after
        ``timeout`` seconds: then it still runs and can be awaited again."""
        return await asyncio.wait_for(asyncio.shield(self.start()), timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    def start(self) -> "asyncio.Task[T]":
        """Asks for the result from now on."""
        if self._polling is None or _is_worth_another(self._polling):
            self._polling = asyncio.create_task(self._poll())
            self._polling.add_done_callback(_noted)
        return self._polling

    def done(self) -> bool:
        """Whether the result, or the error, is here. The first question begins to ask for it."""
        return self.start().done()

    async def cancel(self) -> None:
        """Ends a sample that nobody wants any more. Other requests run in order: raises
        ``InvalidRequest`` for those."""
        for request_id in await asyncio.shield(self.sending):
            body = CancelRequest(request_id=request_id)
            await self._transport.call("POST", f"{API}/cancel_future", body=body)

    async def _poll(self) -> T:
        request_ids = await asyncio.shield(self.sending)
        return self._read(await of_all_parts(map(self._transport.result, request_ids)))


async def of_all_parts(parts: Iterable[Awaitable[P]]) -> list[P]:
    """What all parts of one call gave, once the last has ended. Raises the first error, which then
    says how many failed: what the others did stands."""
    ended = await asyncio.gather(*parts, return_exceptions=True)
    errors = [each for each in ended if isinstance(each, BaseException)]
    if not errors:
        return [each for each in ended if not isinstance(each, BaseException)]
    if len(errors) < len(ended) and isinstance(errors[0], TuneserveError):
        errors[0].args = (
            f"{errors[0]}; this call was sent in {len(ended)} parts, of which {len(errors)} failed "
            "and the others stand: if it was to add gradients, the next step applies theirs",
        )
    raise errors[0]


def _is_worth_another(polling: "asyncio.Task[Any]") -> bool:
    """Whether it ended because the server was away: the result may be there."""
    if not polling.done() or polling.cancelled():
        return False
    return isinstance(polling.exception(), (Unreachable, ServerFault, Overloaded))


def split_id(request_id: str) -> list[str]:
    """The parts of what ``accepted`` gave."""
    return request_id.split(_JOINT)


def _noted(task: "asyncio.Task[Any]") -> None:
    """Looks at how it ended, lest asyncio complain when nobody asks for it."""
    if not task.cancelled():
        task.exception()
