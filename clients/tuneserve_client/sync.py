"""The synchronous client: a thread runs the asynchronous client, and each method waits for it.

No method is written twice: ``_waits`` and the functions like it turn a method of the asynchronous
class into one with the same parameters, types and documentation. ``_Sync`` gives each of them the
names of the synchronous classes.
"""

import asyncio
import collections.abc
import inspect
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import CancelledError
from concurrent.futures import Future as ThreadFuture
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack, get_args, get_origin

from tuneserve_client.arguments import checked
from tuneserve_client.client import AsyncClient, Options
from tuneserve_client.futures import AsyncFuture
from tuneserve_client.sampling import AsyncSampler
from tuneserve_client.training import AsyncModel

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
S = TypeVar("S", bound="_Sync[Any]")

_CLOSED = "this client is closed; create another"


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tuneserve-client", daemon=True
        )
        self._thread.start()
        self._scheduling = threading.Lock()
        self._is_stopping = False

    def run_coroutine(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and return its result; an interrupted wait cancels the coroutine."""
        future = self._begin(work)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError(_CLOSED) from None
        finally:
            future.cancel()

    async def join_coroutine(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine for a caller in another event loop, which goes on meanwhile."""
        future = self._begin(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self.is_stopped:
                raise RuntimeError(_CLOSED) from None
            raise

    def _begin(self, work: Coroutine[Any, Any, T]) -> ThreadFuture[T]:
        with self._scheduling:
            if self.is_stopped:
                work.close()
                raise RuntimeError(_CLOSED)
            if not self._thread.is_alive():
                work.close()
                raise RuntimeError("this client was created in another process; create one here")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def end(self, items: AsyncGenerator[Any]) -> None:
        """End the generator.

        The garbage collector may call this in the loop's own thread, or after ``stop``.
        """
        if threading.current_thread() is self._thread:
            self._loop.create_task(items.aclose())
        elif not self.is_stopped:
            with suppress(RuntimeError):  # the client was closed, or the generator is being read
                self.run_coroutine(items.aclose())

    @property
    def is_stopped(self) -> bool:
        return self._is_stopping

    def stop(self) -> None:
        """Cancel all running tasks, so that no caller waits for ever, and end the loop."""
        with self._scheduling:
            if self._is_stopping:
                return
            self._is_stopping = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_end_others(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _Sync(Generic[A]):
    """An object of the asynchronous client, and the thread in which it lives."""

    def __init__(self, inner: A, thread: LoopThread) -> None:
        self._inner = inner
        self._thread = thread

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, method in list(vars(cls).items()):
            if hasattr(method, "__wrapped__"):
                setattr(cls, name, _renamed(cls, name, method))

    def __repr__(self) -> str:
        return repr(self._inner).removeprefix("Async")


class Future(_Sync[AsyncFuture[T]]):
    """A request under way, sent before all later requests.

    In a notebook or another event loop, ``await`` it: the loop goes on meanwhile.
    """

    def __await__(self) -> Generator[Any, None, T]:
        return self._thread.join_coroutine(self._inner.result()).__await__()

    def result(self, timeout: float | None = None) -> T:
        """Return the result. You may call this as often as you like.

        Raises ``RequestFailed`` if the request ended in an error, and ``TimeoutError`` after
        ``timeout`` seconds: the request still runs then.
        """
        return self._thread.run_coroutine(self._inner.result(timeout))

    @property
    def request_id(self) -> str:
        """The id by which ``client.future`` finds the request again, from any process.

        Waits until the server has accepted the request. From then on the request will run, even if
        this process ends.
        """
        return self._thread.run_coroutine(self._inner.accepted())

    def done(self) -> bool:
        """Return whether the result, or the error, is here. The first call starts to fetch it."""

        async def done() -> bool:
            return self._inner.done()

        return self._thread.run_coroutine(done())

    def cancel(self) -> None:
        """Cancel a sample.

        Raises ``InvalidRequest`` for other requests, which run in order.
        """
        self._thread.run_coroutine(self._inner.cancel())


def _renamed(kind: type, name: str, method: Any) -> Any:
    """Return the method as one of the synchronous class, as its help and its errors show it."""
    signature = inspect.signature(method)
    returned = _synchronous(signature.return_annotation)
    method.__qualname__, method.__module__ = f"{kind.__qualname__}.{name}", kind.__module__
    method.__annotations__ = {**method.__annotations__, "return": returned}
    method.__signature__ = signature.replace(return_annotation=returned)
    del method.__wrapped__  # the asynchronous method
    return checked(method)


def _synchronous(annotation: Any) -> Any:
    """Return the synchronous class that stands for an asynchronous one, or else the annotation."""
    generic: dict[Any, Any] = {collections.abc.AsyncIterator: Iterator, AsyncFuture: Future}
    if (origin := get_origin(annotation)) in generic:
        return generic[origin][get_args(annotation)]
    if annotation in (AsyncModel, AsyncSampler):
        return globals()[annotation.__name__.removeprefix("Async")]
    return annotation


def _waits(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return a method that waits for the result of the asynchronous method."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._thread.run_coroutine(method(self._inner, *args, **kwargs))
        return result

    return call


def _opens(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]], kind: Callable[[T, LoopThread], S]
) -> Callable[Concatenate[Any, P], S]:
    """Return a method that waits for the asynchronous method, and wraps what it opened."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> S:
        return kind(self._thread.run_coroutine(method(self._inner, *args, **kwargs)), self._thread)

    return call


def _sends(
    method: Callable[Concatenate[A, P], AsyncFuture[T]],
) -> Callable[Concatenate[Any, P], Future[T]]:
    """Return a method that starts the asynchronous method and returns a ``Future``."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        async def begin() -> AsyncFuture[T]:
            return method(self._inner, *args, **kwargs)

        return Future(self._thread.run_coroutine(begin()), self._thread)

    return call


def _streams(
    method: Callable[Concatenate[A, P], AsyncIterator[T]],
) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """Return a method that yields the items of the asynchronous method."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items: Any = method(self._inner, *args, **kwargs)
        end = object()
        try:
            while (item := self._thread.run_coroutine(_next(items, end))) is not end:
                yield item
        finally:
            self._thread.end(items)

    return call


async def _next(items: Any, end: object) -> Any:
    return await anext(items, end)


class Sampler(_Sync[AsyncSampler]):
    """A sampler of weights that never change; ``path`` is that of their checkpoint, if any.

    >>> sampler = client.sampler()
    >>> sampler.sample("The sky is", max_tokens=2, temperature=0).result().text
    ' blue.'
    >>> "".join(sampler.stream("The sky is", max_tokens=2, temperature=0))
    ' blue.'
    >>> sampler.logprobs([5, 6, 7]).result().shape
    (3,)
    """

    sample = _sends(AsyncSampler.sample)
    logprobs = _sends(AsyncSampler.logprobs)
    stream = _streams(AsyncSampler.stream)
    chat = _waits(AsyncSampler.chat)

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def path(self) -> str | None:
        return self._inner.path

    @property
    def base_model(self) -> str:
        return self._inner.base_model


class Model(_Sync[AsyncModel]):
    """One adapter on a base model.

    Its methods send a request at once and return a future. The server runs the requests in this
    order, so you can send a step before you have the gradient's result.

    >>> model = client.create_model(rank=4, seed=1)
    >>> data = [next_token_datum([5, 6, 7, 8])]
    >>> losses = []
    >>> for _ in range(3):
    ...     gradient = model.forward_backward(data)
    ...     step = model.optim_step(learning_rate=1e-2)
    ...     losses.append(gradient.result().loss)
    >>> losses[0] > losses[1] > losses[2]
    True
    >>> path = model.save("first").result()
    >>> client.load_model(path).rank
    4
    """

    forward_backward = _sends(AsyncModel.forward_backward)
    forward_backward_custom = _sends(AsyncModel.forward_backward_custom)
    forward = _sends(AsyncModel.forward)
    optim_step = _sends(AsyncModel.optim_step)
    save = _sends(AsyncModel.save)
    export = _sends(AsyncModel.export)
    load = _sends(AsyncModel.load)
    save_sampler = _opens(AsyncModel.save_sampler, Sampler)

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def base_model(self) -> str:
        return self._inner.base_model

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def adapter(self) -> str:
        return self._inner.adapter


class Client(_Sync[AsyncClient]):
    """A client of a server.

    As a context manager it ends its session on exit: the session's models end, requests that were
    sent before still run, and checkpoints stay.

    ``base_url`` and ``api_key`` default to TUNESERVE_URL and TUNESERVE_API_KEY, or else to
    TINKER_BASE_URL and TINKER_API_KEY. Without either, the key is ``tml-local``.

    >>> with Client(url, "tml-local", name="an example") as client:
    ...     [each.model_name for each in client.base_models()]
    ['tuneserve/tiny']
    """

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, **options: Unpack[Options]
    ) -> None:
        super().__init__(AsyncClient(base_url, api_key, **options), LoopThread())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(errored=error is not None)

    @property
    def base_url(self) -> str:
        """The server's address."""
        return self._inner.base_url

    def close(self, *, errored: bool = False) -> None:
        """Wait until all requests are accepted (not if ``errored``), and end the session."""
        if self._thread.is_stopped:
            return
        try:
            self._thread.run_coroutine(self._inner.close(errored=errored))
        finally:
            self._thread.stop()

    create_model = _opens(AsyncClient.create_model, Model)
    load_model = _opens(AsyncClient.load_model, Model)
    sampler = _opens(AsyncClient.sampler, Sampler)
    future = _sends(AsyncClient.future)
    tokenizer = _waits(AsyncClient.tokenizer)
    health = _waits(AsyncClient.health)
    metrics = _waits(AsyncClient.metrics)
    base_models = _waits(AsyncClient.base_models)
    runs = _waits(AsyncClient.runs)
    run = _waits(AsyncClient.run)
    search_runs = _waits(AsyncClient.search_runs)
    update_run = _waits(AsyncClient.update_run)
    add_run_event = _waits(AsyncClient.add_run_event)
    run_events = _waits(AsyncClient.run_events)
    curve = _waits(AsyncClient.curve)
    usage = _waits(AsyncClient.usage)
    request = _waits(AsyncClient.request)
    sessions = _waits(AsyncClient.sessions)
    session = _waits(AsyncClient.session)
    sampler_info = _waits(AsyncClient.sampler_info)
    checkpoints = _waits(AsyncClient.checkpoints)
    checkpoint_info = _waits(AsyncClient.checkpoint_info)
    delete_checkpoint = _waits(AsyncClient.delete_checkpoint)
    set_ttl = _waits(AsyncClient.set_ttl)
    publish = _waits(AsyncClient.publish)
    download = _waits(AsyncClient.download)
    import_peft = _waits(AsyncClient.import_peft)
