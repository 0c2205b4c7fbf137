"""The contents of a server: base models and their tokenizers, training runs, checkpoints."""

import asyncio
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from tuneserve_client.arguments import checks_arguments
from tuneserve_client.errors import NotFound, RequestFailed, TuneserveError
from tuneserve_client.futures import split_id
from tuneserve_client.paths import split_path
from tuneserve_client.peft_archive import AdapterArchive, unpack
from tuneserve_client.runs import RunOrder, RunState
from tuneserve_client.transport import API, Transport
from tuneserve_client.wire import run_types, types

if TYPE_CHECKING:
    from tuneserve_client.wire.tokenizer import Tokenizer

T = TypeVar("T")

_PAGE = 500


@checks_arguments
class Catalog:
    """The base models, runs and checkpoints of a tenant on a server. Needs no session."""

    def __init__(self, transport: Transport, base_url: str, cache_dir: Path | None) -> None:
        self.transport = transport
        self.base_url = base_url
        self._cache = (cache_dir or _user_cache()) / "tokenizers"
        self._tokenizers: dict[str, asyncio.Task[Tokenizer]] = {}

    # --- the server -------------------------------------------------------------------------------

    async def health(self) -> types.HealthResponse:
        """Return the server's state: workers, their compilation, and the store's durability."""
        return await self.transport.ask(types.HealthResponse, "GET", "/healthz")

    async def metrics(self) -> str:
        """Return the metrics of workers, store and API process, in Prometheus' text format."""
        return (await self.transport.call("GET", "/metrics")).text

    async def base_models(self) -> list[types.SupportedModel]:
        """Return the base models that can be trained and sampled on this server."""
        found = await self.transport.ask(
            types.ServerCapabilitiesResponse, "GET", "/get_server_capabilities"
        )
        return found.supported_models

    async def only_base_model(self) -> str:
        """Return the name of the server's only base model.

        Raises ``ValueError`` if the server does not have exactly one.
        """
        names = [each.model_name for each in await self.base_models()]
        if len(names) != 1:
            raise ValueError(f"name a base model; this server has {', '.join(names)}")
        return names[0]

    # --- runs -------------------------------------------------------------------------------------

    async def runs(self) -> list[run_types.TrainingRunResponse]:
        """Return all training runs (models) of the tenant, newest first."""
        return await self._pages(
            run_types.TrainingRunsResponse, "/training_runs", lambda page: page.training_runs
        )

    async def run(self, model_id: str) -> run_types.TrainingRunResponse:
        """Return one training run."""
        path = f"/training_runs/{quote(model_id, safe='')}"
        return await self.transport.ask(run_types.TrainingRunResponse, "GET", path)

    async def search_runs(  # noqa: PLR0913 - parameters of the query
        self,
        text: str = "",
        *,
        state: RunState | None = None,
        tag: str | None = None,
        archived: bool | None = False,
        sort: RunOrder = "created",
        descending: bool = True,
        limit: int = 50,
        offset: int = 0,
    ) -> run_types.TrainingRunsResponse:
        """Return a page of the tenant's runs.

        ``text`` is part of a name, an id, a base model, a note or a tag; ``state`` is running,
        finished, stopped, failed or diverged. ``archived`` None asks for archived runs and others.
        ``sort`` is created, last_request, name, state, step, loss, held_out_loss, duration, tokens
        or device. Raises ``InvalidRequest`` for another one.
        """
        params: dict[str, str | int] = {
            "q": text,
            "archived": "all" if archived is None else str(archived).lower(),
            "sort": sort,
            "order": "desc" if descending else "asc",
            "limit": limit,
            "offset": offset,
        }
        params |= {name: of for name, of in (("state", state), ("tag", tag)) if of is not None}
        path = "/training_runs/search"
        return await self.transport.ask(run_types.TrainingRunsResponse, "GET", path, params=params)

    async def update_run(
        self, model_id: str, metadata: Mapping[str, str | None]
    ) -> run_types.TrainingRunResponse:
        """Set entries of a run's metadata, or remove those that are None; return the run.

        Entries with a meaning are name, notes, tags (with commas between them), archived ("true"),
        outcome (finished, stopped or diverged) and config (the JSON of what was asked).
        """
        path = f"/training_runs/{quote(model_id, safe='')}"
        body = run_types.UpdateRunRequest(user_metadata=dict(metadata))
        return await self.transport.ask(run_types.TrainingRunResponse, "PATCH", path, body=body)

    async def add_run_event(
        self, model_id: str, kind: run_types.EventKind, step: int, data: Mapping[str, Any]
    ) -> run_types.RunEvent:
        """Keep an event of a run: samples, a verdict or a note, of at most 16 KiB of JSON."""
        path = f"/training_runs/{quote(model_id, safe='')}/events"
        body = run_types.RunEventRequest(
            kind=kind, step=step, data=dict(data), event_id=uuid.uuid4().hex
        )
        return await self.transport.ask(run_types.RunEvent, "POST", path, body=body)

    async def run_events(self, model_id: str) -> list[run_types.RunEvent]:
        """Return the events of a run, oldest first."""
        path = f"/training_runs/{quote(model_id, safe='')}/events"
        return (await self.transport.ask(run_types.RunEventsResponse, "GET", path)).events

    async def curve(self, model_id: str, after: int = 0) -> list[run_types.CurvePointResponse]:
        """Return a model's losses and optimizer steps, in the order of its requests."""
        path = f"/training_runs/{quote(model_id, safe='')}/curve"
        params = {"after": after}
        return (
            await self.transport.ask(run_types.CurveResponse, "GET", path, params=params)
        ).points

    async def usage(self, since_s: int = 0) -> types.UsageResponse:
        """Return the usage of the tenant's requests, by model, since the day of ``since_s``.

        ``since_s`` is in Unix time.
        """
        params = {"since": since_s}
        return await self.transport.ask(types.UsageResponse, "GET", "/usage", params=params)

    async def request(self, request_id: str) -> list[types.RequestResponse]:
        """Return the status, the timings and the cost of a request.

        The list has one entry for each part in which the request was sent.
        """
        paths = [f"/requests/{quote(part, safe='')}" for part in split_id(request_id)]
        return [await self.transport.ask(types.RequestResponse, "GET", path) for path in paths]

    async def sessions(self) -> list[str]:
        """Return the ids of the tenant's sessions, newest first: one for each opened client."""
        found: list[str] = []
        while True:
            params = {"limit": _PAGE, "offset": len(found)}
            page = await self.transport.ask(
                types.SessionsResponse, "GET", "/sessions", params=params
            )
            found += page.sessions
            if not page.sessions:
                return found

    async def session(self, session_id: str) -> types.SessionResponse:
        """Return the models and samplers of a session."""
        path = f"/sessions/{quote(session_id, safe='')}"
        return await self.transport.ask(types.SessionResponse, "GET", path)

    async def sampler_info(self, sampler_id: str) -> types.SamplerResponse:
        """Return the base model and the checkpoint of a sampler."""
        path = f"/samplers/{quote(sampler_id, safe='')}"
        return await self.transport.ask(types.SamplerResponse, "GET", path)

    # --- checkpoints ------------------------------------------------------------------------------

    async def checkpoints(self, model_id: str | None = None) -> list[types.CheckpointResponse]:
        """Return the checkpoints of a model, or all of the tenant, newest first."""
        if model_id is not None:
            path = f"/training_runs/{quote(model_id, safe='')}/checkpoints"
            return (await self.transport.ask(types.CheckpointsResponse, "GET", path)).checkpoints
        return await self._pages(
            types.CheckpointsResponse, "/checkpoints", lambda page: page.checkpoints
        )

    async def checkpoint_info(self, path: str) -> types.WeightsInfoResponse:
        """Return the base model, rank and targets of a checkpoint."""
        body = types.WeightsInfoRequest(tinker_path=path)
        return await self.transport.ask(
            types.WeightsInfoResponse, "POST", "/weights_info", body=body
        )

    async def check_found(self, path: str, error: RequestFailed) -> None:
        """Raise ``NotFound`` from the error of a load if its checkpoint is missing.

        The answer to a load has no code for this reason.
        """
        try:
            await self.checkpoint_info(path)
        except NotFound as missing:
            raise missing from error
        except TuneserveError:
            return  # the error of the load says more

    async def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint; samplers that use it still work.

        If a first attempt of this call has already deleted the checkpoint, the retry succeeds.
        """
        await self.transport.call("DELETE", _route(path))

    async def set_ttl(self, path: str, ttl_s: int | None) -> None:
        """Have a checkpoint deleted after ``ttl_s`` seconds, an hour or more; with None, never."""
        body = json.dumps({"ttl_seconds": ttl_s}).encode()  # other bodies leave out a null
        await self.transport.call("PUT", f"{_route(path)}/ttl", body=body, headers=_JSON)

    async def publish(self, path: str, *, public: bool = True) -> None:
        """Let every tenant of the server that knows the path read a checkpoint, or end that."""
        await self.transport.call("POST" if public else "DELETE", f"{_route(path)}/publish")

    async def import_peft(
        self,
        folder: str | Path,
        *,
        name: str = "imported",
        base_model: str | None = None,
        ttl_s: int | None = None,
    ) -> str:
        """Import an adapter that PEFT has saved, and return the path of the new checkpoint.

        The checkpoint can be trained further and sampled from. ``base_model`` is needed if the
        adapter's name for the base model differs from the server's. Raises ``InvalidRequest`` with
        the reason if the adapter cannot be imported.
        """
        params = {"name": name, "base_model": base_model, "ttl_seconds": ttl_s}
        kept = await self.transport.ask(
            types.ImportResponse,
            "POST",
            "/checkpoints/import",
            body=AdapterArchive(folder),
            params={field: value for field, value in params.items() if value is not None},
            headers={"X-Idempotency-Key": uuid.uuid4().hex},
            patient=True,
        )
        return kept.path

    async def fetch(self, path: str, folder: Path) -> Path:
        """Write a checkpoint in PEFT's layout into the folder, all of it or nothing.

        Raises ``InvalidRequest`` with the code ``export_needed`` if the checkpoint has to be
        exported first.
        """
        route = f"{_route(path).removeprefix(API)}/archive"
        found = await self.transport.ask(types.ArchiveUrlResponse, "GET", route, patient=True)
        async with self.transport.download(found.url) as pieces:
            await unpack(pieces, folder)
        return folder

    # --- tokenizers -------------------------------------------------------------------------------

    async def tokenizer(self, base_model: str | None = None) -> "Tokenizer":
        """Return the base model's tokenizer, downloaded from the server without a hub.

        It is cached in memory, and on disk for as long as the server has the same files.
        """
        base_model = base_model or await self.only_base_model()
        task = self._tokenizers.get(base_model)
        if task is None or has_failed(task):
            task = asyncio.create_task(self._load_tokenizer(base_model))
            self._tokenizers[base_model] = task
        return await asyncio.shield(task)

    async def _load_tokenizer(self, base_model: str) -> "Tokenizer":
        from tuneserve_client.wire.tokenizer import FILES, Tokenizer  # not for token ids

        first, *others = FILES
        tokenizer = await self._tokenizer_file(base_model, first)
        assert tokenizer is not None
        config, template = [
            await self._tokenizer_file(base_model, file, optional=True) for file in others
        ]
        return await asyncio.to_thread(Tokenizer, tokenizer, config, template, base_model)

    async def _tokenizer_file(
        self, base_model: str, file: str, *, optional: bool = False
    ) -> str | None:
        """Return the text of a tokenizer file; None if it is ``optional`` and missing.

        The file is downloaded only if the server's differs from the cached one.
        """
        kept = _Kept(self._cache, f"{self.base_url}|{base_model}|{file}")
        tag = kept.tag()
        try:
            response = await self.transport.call(
                "GET",
                f"{API}/tokenizer",
                params={"base_model": base_model, "file": file},
                headers={"If-None-Match": tag} if tag else None,
            )
        except NotFound:
            if optional:
                return None
            raise
        if response.status_code == 304:
            return kept.text()
        kept.keep(response.content, response.headers.get("etag"))
        return response.content.decode()

    async def _pages(self, kind: type[Any], path: str, items: Callable[[Any], list[T]]) -> list[T]:
        found: list[T] = []
        while True:
            params = {"limit": _PAGE, "offset": len(found)}
            page = await self.transport.ask(kind, "GET", path, params=params)
            found += items(page)
            if not items(page) or len(found) >= page.cursor.total_count:
                return found


_JSON = {"Content-Type": "application/json"}


class _Kept:
    """A file of the server, cached on disk with its tag. If the disk fails, the cache is empty."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / hashlib.sha256(name.encode()).hexdigest()[:32]

    def tag(self) -> str | None:
        with suppress(OSError, ValueError):
            return self._read()[0]
        return None

    def text(self) -> str:
        return self._read()[1]

    def keep(self, content: bytes, tag: str | None) -> None:
        if tag is None:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._path.parent, delete=False) as file:
                file.write(tag.encode() + b"\n" + content)
            os.replace(file.name, self._path)

    def _read(self) -> tuple[str, str]:
        """Return the tag and the text, which always belong together: they are one file on disk."""
        tag, _, text = self._path.read_bytes().decode().partition("\n")
        return tag, text


def has_failed(task: "asyncio.Task[Any]") -> bool:
    """Return whether the task has ended without a result, and should be tried again."""
    return task.done() and (task.cancelled() or task.exception() is not None)


def _route(path: str) -> str:
    model_id, kind, name = (quote(part, safe="") for part in split_path(path))
    return f"{API}/training_runs/{model_id}/checkpoints/{kind}/{name}"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tuneserve"
