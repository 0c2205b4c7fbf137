"""A follower: it makes every call that the leader makes, on its own devices."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tuneserve_engine.backend.base import Backend, DeviceFailed, OutOfMemory, SamplingRequest
from tuneserve_engine.backend.hosts.link import Link, MemberLost
from tuneserve_engine.backend.hosts.messages import (
    Agreed,
    BackendCall,
    CompileGrammar,
    End,
    Prefetch,
    Prepare,
    Prepared,
    Resumed,
    Yielded,
    agreement,
    ends_all,
)
from tuneserve_engine.core.errors import EngineError

logger = logging.getLogger(__name__)


class Follower:
    """A process that makes the leader's calls. ``on_end`` is called when the leader has stopped."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._following: _Following | None = None

    def on_message(self, message: Any) -> bool:
        """Deal with a message that does not wait for calls; return whether it was one."""
        if isinstance(message, End):
            self._on_end()
        elif isinstance(message, Prefetch) and self._following:
            self._following.backend.prefetch(message.adapter_ids)
        elif isinstance(message, CompileGrammar) and self._following:
            if compile_it := self._following.backend.pending_grammar(message.grammar):
                threading.Thread(target=compile_it, daemon=True).start()
        elif isinstance(message, Prepare) and self._following:
            prepare = self._following.prepare  # it may take minutes
            threading.Thread(target=prepare, args=(message,), daemon=True).start()
        else:
            return False
        return True

    def take(self, backend: Backend, link: Link) -> None:
        """Take the backend to make calls on. The leader must not call before."""
        self._following = _Following(backend, link)

    def follow(self) -> None:
        """Make calls until the process ends.

        Raises ``MemberLost`` if the leader is lost or out of step, and ``DeviceFailed`` or
        ``OutOfMemory`` if only the end of this process can mend a failure: the leader then loses
        it, and the worker starts again.
        """
        assert self._following is not None
        while True:
            self._following.make_call(self._following.link.receive())


class _Following:
    """The leader's calls on one backend."""

    def __init__(self, backend: Backend, link: Link) -> None:
        self.backend = backend
        self.link = link
        self._asked: dict[str, SamplingRequest] = {}

    def make_call(self, call: Any) -> None:
        if not isinstance(call, BackendCall):
            raise MemberLost(f"the leader is out of step: {type(call).__name__} between calls")
        arguments = call.arguments
        if call.method == "sample_until":
            (asked,) = arguments
            self._asked = {name: each or self._asked[name] for name, each in asked.items()}
            arguments = self._asked, self._should_yield
        elif call.method == "forward_backward":
            arguments = *arguments, self._between
        try:
            result = getattr(self.backend, call.method)(*arguments)
        except DeviceFailed:
            raise
        except (EngineError, OutOfMemory) as error:
            if ends_all(call.method, error):
                raise DeviceFailed(f"{call.method} failed in one of several processes") from error
            result = error
        except Exception as error:
            raise DeviceFailed(f"{call.method} failed in one of several processes") from error
        self.link.send(Agreed(agreement(result)))

    def _should_yield(self) -> bool:
        message = self.link.receive()
        if not isinstance(message, Yielded):
            raise MemberLost(f"the leader is out of step: {type(message).__name__} in a sample")
        return message.value

    def _between(self) -> None:
        while not isinstance(message := self.link.receive(), Resumed):
            self.make_call(message)

    def prepare(self, asked: Prepare) -> None:
        try:
            prepared = Prepared(asked.number, self.backend.prepare(asked.config))
        except EngineError as error:
            prepared = Prepared(asked.number, "", str(error))
        except Exception as error:
            logger.exception("what adapters share cannot be made")
            prepared = Prepared(asked.number, "", f"{error!r}; the log of that host says more")
        with suppress(MemberLost):
            self.link.send(prepared)
