"""The asynchronous client: its session, and the models and samplers that it opens."""

import logging
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack

import httpx

from tuneserve_client.adapter import Adapter
from tuneserve_client.arguments import checks_arguments
from tuneserve_client.catalog import Catalog
from tuneserve_client.defaults import DEFAULT_URL, OPEN_KEY, RANK
from tuneserve_client.errors import InvalidRequest, RequestFailed, TuneserveError
from tuneserve_client.futures import AsyncFuture, split_id
from tuneserve_client.hints import hint
from tuneserve_client.paths import PATH_PREFIX, split_path
from tuneserve_client.sampling import (
    AsyncSampler,
    join_sampler,
    open_sampler,
    read_logprobs,
    read_samples,
)
from tuneserve_client.session import Session
from tuneserve_client.training import (
    AsyncModel,
    read_model_id,
    read_nothing,
    read_output,
    read_path,
    read_step,
)
from tuneserve_client.transport import Answer, Transport
from tuneserve_client.wire import types

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MADE_TO_EXPORT = {"name": "export", "archived": "true"}
_EXPORT_NEEDED = "export_needed"
_SAMPLER_ID = re.compile(r"s-\w+:sample:\d+")

Kind = Literal[
    "forward_backward", "optim_step", "save", "load", "create_model", "sample", "logprobs"
]
_READERS: dict[Kind, Callable[[Sequence[Answer]], Any]] = {
    "forward_backward": read_output,
    "optim_step": read_step,
    "save": read_path,
    "load": read_nothing,
    "create_model": read_model_id,
    "sample": read_samples,
    "logprobs": read_logprobs,
}


class Options(TypedDict, total=False):
    """The options of a client."""

    name: str
    """The display name of the session."""
    user_metadata: Mapping[str, str]
    deadline_s: float
    """Seconds for which an unanswered or temporarily refused request is retried. Default: 300."""
    heartbeat_s: float
    """Seconds between heartbeats. Default: 10."""
    cache_dir: Path
    """The folder of cached tokenizers. Default: ``~/.cache/tuneserve``."""
    transport: httpx.AsyncBaseTransport
    """The transport to use instead of the network."""


@checks_arguments
class AsyncClient(Catalog):
    """A client of a server, for asyncio.

    As a context manager it ends its session on exit: the session's models end, requests that were
    sent before still run, and checkpoints stay.

    ``base_url`` and ``api_key`` default to TUNESERVE_URL and TUNESERVE_API_KEY, or else to
    TINKER_BASE_URL and TINKER_API_KEY. Without either, the key is ``tml-local``, as on the command
    line and in the dashboard. Raises ``TypeError`` for an unknown option.
    """

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, **options: Unpack[Options]
    ) -> None:
        base_url = base_url or _setting("TUNESERVE_URL", "TINKER_BASE_URL") or DEFAULT_URL
        api_key = api_key or _setting("TUNESERVE_API_KEY", "TINKER_API_KEY") or OPEN_KEY
        _check_options(options)
        transport = Transport(
            base_url,
            api_key,
            deadline_s=options.get("deadline_s", 300.0),
            inner=options.get("transport"),
        )
        super().__init__(transport, base_url, options.get("cache_dir"))
        self._session = Session(
            self,
            name=options.get("name"),
            user_metadata=options.get("user_metadata"),
            heartbeat_s=options.get("heartbeat_s", 10.0),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(errored=error is not None)

    async def close(self, *, errored: bool = False) -> None:
        """Wait until all requests are accepted (not if ``errored``), and end the session."""
        await self._session.close(errored=errored)
        await self.transport.close()

    # --- opening ----------------------------------------------------------------------------------

    async def session_id(self) -> str:
        """Return the id of this client's session; the first call opens the session."""
        return await self._session.id()

    async def create_model(  # noqa: PLR0913 - an adapter's shape
        self,
        base_model: str | None = None,
        *,
        rank: int = RANK,
        seed: int | None = None,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = True,
        adapter: Adapter | None = None,
        name: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> AsyncModel:
        """Create a model: a new adapter on a base model.

        The adapter is LoRA, unless ``adapter`` names another kind; ``adapter`` may also set the
        rank. You may leave out ``base_model`` if the server has only one. Lists and the dashboard
        show ``name``, which is stored as ``name`` in the metadata.
        """
        base_model = base_model or await self.only_base_model()
        lora = types.LoraConfig(
            rank=rank,
            seed=seed,
            train_attn=train_attn,
            train_mlp=train_mlp,
            train_unembed=train_unembed,
        )
        kind = adapter.to_wire() if adapter else None
        body = types.CreateModelRequest(
            session_id=await self._session.id(),
            model_seq_id=self._session.next_model(),
            base_model=base_model,
            user_metadata=_named(name, user_metadata),
            lora_config=lora,
            adapter=kind,
        )
        return await self._created("create_model", body)

    async def load_model(
        self,
        path: str,
        *,
        optimizer: bool = True,
        name: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> AsyncModel:
        """Create a model that continues from a checkpoint.

        With ``optimizer=False`` it takes only the weights, and the optimizer starts anew. ``name``
        is that of the new model, as in ``create_model``. Raises ``NotFound`` if there is no such
        checkpoint.
        """
        body = types.LoadNewRequest(
            session_id=await self._session.id(),
            model_seq_id=self._session.next_model(),
            path=path,
            optimizer=optimizer,
            user_metadata=_named(name, user_metadata),
        )
        try:
            return await self._created("load_weights", body)
        except RequestFailed as error:
            await self.check_found(path, error)
            raise

    async def _created(self, route: str, body: types.SessionKey) -> AsyncModel:
        ask = self.transport.ask
        accepted = await ask(types.FutureResponse, "POST", f"/{route}", body=body)
        await self.transport.result(accepted.request_id)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        info = await ask(
            types.GetInfoResponse, "POST", "/get_info", body=types.GetInfoRequest(model_id=model_id)
        )
        return AsyncModel(self._session, model_id, info.model_name, info.lora_rank, info.adapter)

    async def sampler(self, what: str | None = None) -> AsyncSampler:
        """Open a sampler of a base model, by its name, or of a checkpoint, by its path.

        You may leave out the name if the server has only one base model. The ``id`` of another
        process's sampler opens a sampler of the same weights, also of unnamed ones. It works for as
        long as that sampler's session lives.
        """
        what = what or await self.only_base_model()
        if _SAMPLER_ID.fullmatch(what):
            return await join_sampler(self._session, what)
        if what.startswith(PATH_PREFIX):
            return await open_sampler(self._session, model_path=what)
        return await open_sampler(self._session, base_model=what)

    async def download(self, path: str, folder: str | Path) -> Path:
        """Write an adapter in PEFT's layout into the folder, and return the folder.

        The folder is created if it is missing. A download creates no training run, with one
        exception: only a worker can convert a training checkpoint of kind ``osft``. This method
        then loads a model from it, exports the model, deletes the export again, and leaves the
        model's run in the archive.
        """
        folder = Path(folder)
        try:
            return await self.fetch(path, folder)
        except InvalidRequest as error:
            if error.code != _EXPORT_NEEDED:
                raise
        model = await self.load_model(path, optimizer=False, user_metadata=_MADE_TO_EXPORT)
        name = f"{split_path(path)[2][:100]}-{uuid.uuid4().hex[:8]}"
        exported = await model.export(name, ttl_s=3600)
        try:
            return await self.fetch(exported, folder)
        finally:
            await self.delete_checkpoint(exported)

    def future(self, request_id: str, kind: Kind) -> AsyncFuture[Any]:
        """Return the future of an earlier request, of this process or another.

        Results are stored for a day, or for the server's ``result_ttl_s``. After that, the future
        raises ``ResultExpired``. It raises ``ValueError`` if the request is of another kind.
        """
        if kind not in _READERS:
            raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(_READERS)}")

        async def sent() -> list[str]:
            return split_id(request_id)

        def read(answers: Sequence[Answer]) -> Any:
            try:
                return _READERS[kind](answers)
            except TuneserveError:
                raise
            except Exception as error:
                raise ValueError(f"{request_id} is not a request of kind {kind!r}") from error

        return self._session.submit(sent(), read)


def _check_options(options: Options) -> None:
    """Raise ``TypeError`` for an unknown option, which would otherwise have no effect."""
    known = ["base_url", "api_key", *Options.__annotations__]
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(f"a client has no option {name!r}; {hint(name, known)}")


def _named(name: str | None, metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return the metadata of a model with its name; None if there is neither."""
    if name is None and metadata is None:
        return None
    return {**(metadata or {}), **({} if name is None else {"name": name})}


def _setting(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)
