"""``tuneserve up``: starts the API process and the worker, and keeps both running.

The supervisor restarts a child that dies. Each early death makes the wait before the restart
longer. A child that cannot start ends the whole service. Children end with the supervisor, however
the supervisor ends.
"""

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tuneserve_engine.core.errors import REFUSED

Say = Callable[[str], None]
Ended = Callable[[str, int], Awaitable[None]]

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
"""The signals that come from outside: from operators, or from the kernel when memory is short.

A process that fails by itself ends with another signal or with an exit status.
"""


def is_from_outside(status: int) -> bool:
    """Return whether a process with this exit status (-signal) was ended from outside."""
    return -status in _FROM_OUTSIDE


async def _ignore(name: str, status: int) -> None:
    return None


@dataclass(frozen=True)
class ChildSpec:
    """A process that the supervisor keeps running."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class RestartPolicy:
    """The rules for restarts of a child.

    A child that lives for less than ``young_s`` dies young; ``most_young_deaths`` in a row are too
    many. The wait before a restart starts at ``first_delay_s`` and doubles.
    """

    young_s: float = 20.0
    most_young_deaths: int = 5
    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    stop_s: float = 30.0

    def delay_s(self, young_deaths: int) -> float:
        doubled: float = self.first_delay_s * 2 ** max(young_deaths - 1, 0)
        return min(doubled, self.longest_delay_s)


class Supervisor:
    """Keeps its children running until a signal arrives or a child is given up.

    Only a child that cannot start is given up. Once everything was ready, children are restarted
    forever: a request may kill its worker, but only a few times before the request fails.
    ``ended`` is called with the name and the exit status of a child before each restart; it must
    not raise.
    """

    def __init__(
        self,
        children: Sequence[ChildSpec],
        say: Say,
        policy: RestartPolicy,
        ended: Ended = _ignore,
    ) -> None:
        self._children = children
        self._say = say
        self._policy = policy
        self._ended = ended
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._was_ready = False

    async def supervise(self, ready: Callable[[], "asyncio.Task[None]"] | None = None) -> int:
        """Run the children until a signal or until a child is given up; return the exit status.

        The status is 0 after SIGTERM or SIGINT, else that of the child given up. ``ready`` runs
        beside the children; it ends when everything is ready.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        stopped = asyncio.create_task(stop.wait())
        keeping = [asyncio.create_task(self._keep(child)) for child in self._children]
        reporting = [ready()] if ready else []
        for report in reporting:
            report.add_done_callback(self._note_ready)
        try:
            await asyncio.wait([stopped, *keeping], return_when=asyncio.FIRST_COMPLETED)
            return next((task.result() for task in keeping if task.done()), 0)
        finally:
            for task in (stopped, *keeping, *reporting):
                task.cancel()
            await asyncio.gather(stopped, *keeping, *reporting, return_exceptions=True)
            await self._stop_all()

    def _note_ready(self, report: "asyncio.Task[None]") -> None:
        self._was_ready = not report.cancelled() and report.exception() is None

    async def _keep(self, child: ChildSpec) -> int:
        """Restart the child whenever it dies; return its exit status once it is given up."""
        young_deaths = 0
        while True:
            started_s = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *child.command, env=dict(child.environment), process_group=0
            )
            self._running[child.name] = process
            status = await process.wait()
            del self._running[child.name]
            if status == REFUSED:
                self._say(f"{child.name} refused to start; its message above says why")
                return status
            died_young = time.monotonic() - started_s < self._policy.young_s
            young_deaths = young_deaths + 1 if died_young else 0
            if young_deaths >= self._policy.most_young_deaths and not self._was_ready:
                self._say(
                    f"{child.name} died {young_deaths} times in a row within "
                    f"{self._policy.young_s:g} s of its start, last with {_ending(status)}; giving "
                    "up. Its log above says why"
                )
                return status if status > 0 else 1
            await self._ended(child.name, status)
            delay_s = self._policy.delay_s(young_deaths)
            self._say(f"{child.name} ended with {_ending(status)}; restarting in {delay_s:g} s")
            await asyncio.sleep(delay_s)

    async def _stop_all(self) -> None:
        """Stop the children, the last started first: a worker needs the API to report to."""
        order = [child.name for child in reversed(self._children)]
        for name in [name for name in order if name in self._running]:
            process = self._running.pop(name)
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), self._policy.stop_s)
            except TimeoutError:
                self._say(f"{name} did not stop within {self._policy.stop_s:g} s; killing it")
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"


def child_command(*arguments: str) -> list[str]:
    """Return the command line of a child that ends with this process."""
    return [sys.executable, "-m", "tuneserve_server", *arguments, "--supervisor", str(os.getpid())]


def end_with(supervisor_pid: int) -> None:
    """Make the kernel end this process when the supervisor dies, even by SIGKILL.

    The effect survives ``exec``. Does nothing outside Linux, which alone has the call.
    """
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != supervisor_pid:  # the supervisor died before the call
        sys.exit(1)
