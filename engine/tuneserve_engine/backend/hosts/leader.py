"""The leader: a backend whose every call is also made by the worker's other processes."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any, TypeVar

from tuneserve_engine.adapters.kinds import kind_of
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import (
    Backend,
    DeviceFailed,
    OutOfMemory,
    SampleProgress,
    SampleResult,
    SamplingRequest,
    TrainBatch,
    TrainResult,
    nothing,
)
from tuneserve_engine.backend.hosts.link import ANSWER_S, Link, MemberLost, packed
from tuneserve_engine.backend.hosts.messages import (
    Agreed,
    BackendCall,
    CompileGrammar,
    End,
    Prefetch,
    Prepare,
    Prepared,
    Resumed,
    StopAsked,
    Yielded,
    agreement,
    ends_all,
)
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig, BaseModelInfo
from tuneserve_engine.core.errors import EngineError, ServerError
from tuneserve_engine.core.grammar import Grammar
from tuneserve_engine.core.shapes import StaticShapes

R = TypeVar("R")


class Answers:
    """The messages of one follower that are not ends of calls. ``on_stop`` is called when an
    operator has asked the follower to stop.
    """

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self.preparing: dict[int, Future[Prepared]] = {}

    def on_message(self, message: Any) -> bool:
        """Deal with a message that is not the end of a call; return whether it was one."""
        if isinstance(message, Prepared):
            self.preparing.pop(message.number).set_result(message)
        elif isinstance(message, StopAsked):
            self._on_stop()
        else:
            return False
        return True

    def lose(self, reason: str) -> None:
        """Fail what the follower was to prepare."""
        while self.preparing:
            _, answer = self.preparing.popitem()
            answer.set_exception(MemberLost(reason))


class LeaderBackend:
    """Implements ``backend.base.Backend`` on the devices of several processes.

    ``backend`` is the leader's; every follower has one on the same mesh, and makes the same calls
    in the same order with the same decisions inside them. A process that is lost, or that ends a
    call otherwise than the others, is the end of all: ``DeviceFailed``. So is a device without
    room in a call that exchanges anything, since devices of other processes may wait for it.
    """

    def __init__(self, backend: Backend, followers: Mapping[Link, Answers]) -> None:
        self._backend = backend
        self._followers = followers
        self._numbers = count()
        self._prepared: set[str] = set()  # kinds of adapters that every process is prepared for
        self._unprepared: dict[str, str] = {}  # kinds that some process is not, and why
        self._preparing = threading.Lock()
        self._asked: Mapping[str, SamplingRequest] = {}
        self._failure: DeviceFailed | None = None

    # --- what only the leader is asked ----------------------------------------------------------

    @property
    def info(self) -> BaseModelInfo:
        return self._backend.info

    @property
    def static_shapes(self) -> StaticShapes:
        return self._backend.static_shapes

    @property
    def micro_batches_at_once(self) -> int:
        return self._backend.micro_batches_at_once

    @property
    def numerics_id(self) -> str:
        return self._backend.numerics_id

    @property
    def load_wait_s(self) -> float:
        return self._backend.load_wait_s

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._backend.metrics

    def adapter_state(
        self, adapter_id: str, *, optimizer: bool, accumulator: bool = False
    ) -> AdapterState:
        return self._backend.adapter_state(adapter_id, optimizer=optimizer, accumulator=accumulator)

    def end(self) -> None:
        """Tell the followers that the worker has stopped, and wait for their ends."""
        for link in self._followers:
            link.send_last(End())
        for link in self._followers:
            link.wait_for_end()

    # --- calls beside the others ----------------------------------------------------------------

    def prefetch(self, adapter_ids: Sequence[str]) -> None:
        if self._failure is None:
            self._tell(Prefetch(tuple(adapter_ids)))
            self._backend.prefetch(adapter_ids)

    def is_prepared(self, config: AdapterConfig) -> bool:
        return config.kind in self._prepared and self._backend.is_prepared(config)

    def prepare(self, config: AdapterConfig) -> str:
        with self._preparing:
            try:
                shared_id = self._prepare(config)
            except Exception as error:
                self._unprepared[config.kind] = str(error)
                raise
            self._prepared.add(config.kind)
            self._unprepared.pop(config.kind, None)
        return shared_id

    def _prepare(self, config: AdapterConfig) -> str:
        """Prepare in every process at the same time."""
        number = next(self._numbers)
        answers: dict[str, Future[Prepared]] = {}
        for link, each in self._followers.items():
            answers[link.name] = each.preparing[number] = Future()
            link.send(Prepare(number, config))
        shared_id = self._backend.prepare(config)
        for name, answer in answers.items():
            prepared = answer.result()
            if prepared.error:
                raise ServerError(f"{name}, a host of this worker: {prepared.error}")
            if prepared.shared_id != shared_id:
                raise ServerError(
                    f"{name} has another decomposition of the base model ({prepared.shared_id}) "
                    f"than the leader ({shared_id}); ask the operator to give all hosts of the "
                    "worker one decompositions directory"
                )
        return shared_id

    def pending_grammar(self, grammar: Grammar) -> Callable[[], object] | None:
        compile_here = self._backend.pending_grammar(grammar)
        if compile_here is None:
            return None

        def compile_everywhere() -> None:
            if self._failure is None:
                self._tell(CompileGrammar(grammar))
            compile_here()

        return compile_everywhere

    # --- calls that every process makes ---------------------------------------------------------

    def create_adapter(self, adapter_id: str, config: AdapterConfig) -> None:
        self._check_prepared(config)
        self._add("create_adapter", adapter_id, config)

    def delete_adapter(self, adapter_id: str) -> None:
        self._mirror("delete_adapter", adapter_id)

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        self._check_prepared(state.config)
        self._add("load_adapter", adapter_id, state)

    def exported_adapter(self, adapter_id: str) -> AdapterState:
        exported: AdapterState = self._mirror("exported_adapter", adapter_id)
        return exported

    def exported(self, state: AdapterState) -> AdapterState:
        kind = state.config.kind
        if kind_of(state.config).needs_decomposition and kind not in self._prepared:
            self._check_prepared(state.config)
            raise ServerError(
                f"what adapters of kind {kind} share is not there on every host of this worker; "
                f"create a model of kind {kind} first, and ask again"
            )
        exported: AdapterState = self._mirror("exported", state)
        return exported

    def has_snapshot(self, snapshot_id: str) -> bool:
        return bool(self._mirror("has_snapshot", snapshot_id))

    def load_snapshot(self, snapshot_id: str, state: AdapterState) -> None:
        self._mirror("load_snapshot", snapshot_id, state)

    def optim_steps(
        self, steps: Sequence[tuple[str, AdamwParams]]
    ) -> list[Mapping[str, float] | Exception]:
        results: list[Mapping[str, float] | Exception] = self._mirror("optim_steps", list(steps))
        return results

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SampleResult]:
        self._asked = {}
        results: list[SampleResult] = self._mirror("sample", list(requests))
        return results

    def forward_backward(
        self, batch: TrainBatch, on_micro_batch_done: Callable[[], None] = nothing, /
    ) -> TrainResult:
        def between() -> None:
            on_micro_batch_done()
            self._tell(Resumed())

        self._tell(BackendCall("forward_backward", (batch,)))
        return self._run("forward_backward", lambda: self._backend.forward_backward(batch, between))

    def sample_until(
        self, asked: Mapping[str, SamplingRequest], should_yield: Callable[[], bool]
    ) -> SampleProgress:
        def decided() -> bool:
            value = should_yield()
            self._tell(Yielded(value))
            return value

        # Followers have the requests that the last call asked for.
        known, self._asked = self._asked, dict(asked)
        sent = {name: None if known.get(name) is each else each for name, each in asked.items()}
        self._tell(BackendCall("sample_until", (sent,)))
        return self._run("sample_until", lambda: self._backend.sample_until(asked, decided))

    def _check_prepared(self, config: AdapterConfig) -> None:
        if reason := self._unprepared.get(config.kind):
            raise ServerError(reason)

    def _add(self, method: str, adapter_id: str, given: object) -> None:
        """Mirror a call that adds an adapter. If any host has no room for it, none keeps it.

        Hosts write adapters to their own disks when it suits them, so they may differ in this.
        """
        self._tell(BackendCall(method, (adapter_id, given)))
        call = getattr(self._backend, method)
        try:
            mine = self._part(method, lambda: call(adapter_id, given))
        except (EngineError, OutOfMemory) as error:
            mine = error
        ends = [agreement(mine), *(self._end(method, link) for link in self._followers)]
        full = [end == OutOfMemory.__name__ for end in ends]
        if any(full) and set(ends) <= {None, OutOfMemory.__name__}:
            self._delete_where([not each for each in full], adapter_id)
            raise OutOfMemory(f"a host of this worker has no room for {adapter_id}")
        self._check(method, ends[0], dict(zip(self._followers, ends[1:], strict=True)))
        if isinstance(mine, Exception):
            raise mine

    def _delete_where(self, has_it: Sequence[bool], adapter_id: str) -> None:
        """Delete the adapter in the processes that have it: the leader's flag comes first."""
        if has_it[0]:
            self._part("delete_adapter", lambda: self._backend.delete_adapter(adapter_id))
        for link, has_one in zip(self._followers, has_it[1:], strict=True):
            if has_one:
                link.send(BackendCall("delete_adapter", (adapter_id,)))
                self._check("delete_adapter", None, {link: self._end("delete_adapter", link)})

    def _mirror(self, method: str, *arguments: Any) -> Any:
        self._tell(BackendCall(method, arguments))
        return self._run(method, lambda: getattr(self._backend, method)(*arguments))

    def _run(self, method: str, call: Callable[[], R]) -> R:
        """Return the result of the leader's part, once every follower has made its own."""
        mine: R | Exception
        try:
            mine = self._part(method, call)
        except (EngineError, OutOfMemory) as error:
            mine = error
        ends = {link: self._end(method, link) for link in self._followers}
        self._check(method, agreement(mine), ends)
        if isinstance(mine, Exception):
            raise mine
        return mine

    def _part(self, method: str, call: Callable[[], R]) -> R:
        """Make the leader's part of a call."""
        try:
            return call()
        except DeviceFailed as error:
            self._failed(error)
            raise
        except (EngineError, OutOfMemory) as error:
            if not ends_all(method, error):
                raise
            raise self._failed(
                DeviceFailed(f"{error}; other processes of this worker may wait")
            ) from error
        except Exception as error:
            raise self._failed(
                DeviceFailed(f"{method} failed in one of several processes: {error!r}")
            ) from error

    def _end(self, method: str, link: Link) -> Any:
        """Wait for a follower's part of a call."""
        answer = link.receive(ANSWER_S)
        if not isinstance(answer, Agreed):
            raise self._failed(DeviceFailed(f"{link.name} is out of step: {answer} in {method}"))
        return answer.result

    def _check(self, method: str, mine: Any, ends: Mapping[Link, Any]) -> None:
        """Require that these followers have ended the call as the leader has."""
        for link, end in ends.items():
            if end != mine:
                raise self._failed(
                    DeviceFailed(f"{method} ended here with {mine}, on {link.name} with {end}")
                )

    def _failed(self, error: DeviceFailed) -> DeviceFailed:
        """Note a failure: from now on no call goes out, because followers may not answer it."""
        self._failure = self._failure or error
        return error

    def _tell(self, message: object) -> None:
        """Send a message to all followers, or to none if it cannot be packed."""
        if self._failure is not None:
            raise DeviceFailed(f"this worker is about to end: {self._failure}")
        try:
            body = packed(message)
            for link in self._followers:
                link.send_packed(body)
        except DeviceFailed as error:
            self._failed(error)
            raise
        except Exception as error:
            raise self._failed(
                DeviceFailed(f"a call cannot be sent to other hosts: {error!r}")
            ) from error
