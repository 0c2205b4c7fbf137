"""A follower: it makes every call that the leader makes, on its own devices."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tuneserve_engine.backend.base import Backend, DeviceFailed, OutOfMemory, SamplingRequest
from tuneserve_engine.backend.hosts.link import Link, MemberLost
from tuneserve_engine.backend.hosts.messages import (
    EXCHANGING,
    Agreed,
    BackendCall,
    End,
    Prefetch,
    Prepare,
    Prepared,
    Resumed,
    Yielded,
    agreement,
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
        elif isinstance(message, Prepare) and self._following:
            prepare = self._following.prepare  # it may take minutes
            threading.Thread(target=prepare, args=(message,), daemon=True).start()
        else:
            return False
        return True

    def follow(self, backend: Backend, link: Link) -> None:
        """Make calls until the process ends.

        Raises ``MemberLost`` if the leader is lost, and whatever a call raises that only the end
        of this process can mend: the leader then loses it, and the worker starts again.
        """
        self._following = _Following(backend, link)
        while True:
            self._following.make_call(link.receive())


class _Following:
    """The leader's calls on one backend."""

    def __init__(self, backend: Backend, link: Link) -> None:
        self.backend = backend
        self._link = link
        self._asked: dict[str, SamplingRequest] = {}

    def make_call(self, call: BackendCall) -> None:
        arguments = call.arguments
        if call.method == "sample_until":
            (asked,) = arguments
            self._asked = {name: each or self._asked[name] for name, each in asked.items()}
            arguments = self._asked, self._should_yield
        elif call.method == "forward_backward":
            arguments = *arguments, self._between
        try:
            result = getattr(self.backend, call.method)(*arguments)
        except EngineError as error:
            result = error
        except OutOfMemory as error:
            if call.method in EXCHANGING:
                raise  # devices of other processes may wait for this one's
            result = error
        except DeviceFailed:
            raise
        except Exception as error:
            raise DeviceFailed(f"{call.method} failed in one of several processes") from error
        self._link.send(Agreed(agreement(call.method, result)))

    def _should_yield(self) -> bool:
        message = self._link.receive()
        if not isinstance(message, Yielded):
            raise MemberLost(f"the leader is out of step: {type(message).__name__} in a sample")
        return message.value

    def _between(self) -> None:
        while not isinstance(message := self._link.receive(), Resumed):
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
            self._link.send(prepared)
