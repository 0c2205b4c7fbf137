"""Contenders that take turns, so other work on the machine slows all of them alike."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Pace:
    """The work per second of one contender, round by round."""

    per_s: list[float] = field(default_factory=list)
    per_cpu_s: list[float] = field(default_factory=list)
    """The work per second of processor time, of all processes involved. Other load on the machine
    changes this pace least."""

    @property
    def median(self) -> float:
        return statistics.median(self.per_s)


def take_turns(
    contenders: Mapping[str, Callable[[], int]],
    *,
    rounds: int,
    pids: tuple[int, ...] = (),
    prepare: Callable[[str], None] = lambda name: None,
) -> dict[str, Pace]:
    """Run A, B, A, B, ... ``rounds`` times, after one round that does not count.

    Each call returns the amount of work that it did. The time of ``prepare``, which runs before a
    call, does not count. ``pids`` are processes whose children work for some contender.
    """
    paces = {name: Pace() for name in contenders}
    for counts in (False, *[True] * rounds):
        for name, run in contenders.items():
            prepare(name)
            started_s, started_cpu_s = time.perf_counter(), _cpu_s(pids)
            work = run()
            wall_s, cpu_s = time.perf_counter() - started_s, _cpu_s(pids) - started_cpu_s
            if counts:
                paces[name].per_s.append(work / wall_s)
                paces[name].per_cpu_s.append(work / max(cpu_s, 1 / _TICKS_PER_S))
    return paces


def ratio(of: Pace, to: Pace) -> float:
    """Return the median over rounds of one contender's pace over another's in the same round."""
    return statistics.median(a / b for a, b in zip(of.per_s, to.per_s, strict=True))


def compared(what: str, paces: dict[str, Pace], least: float) -> dict[str, Any]:
    """Return a row about two contenders: the one in question, and its reference."""
    (of, pace), (to, reference) = paces.items()
    found = ratio(pace, reference)
    names = {"this": of, "its pace": pace.median, "that": to, "that one's": reference.median}
    shown = {"what": what, **names, "ratio": found, "at least": least, "kept": found >= least}
    print(shown, file=sys.stderr)
    return shown


def cpu_ratio(of: Pace, to: Pace) -> float:
    """Return ``ratio`` for the work per second of processor time."""
    return statistics.median(a / b for a, b in zip(of.per_cpu_s, to.per_cpu_s, strict=True))


def _cpu_s(pids: tuple[int, ...]) -> float:
    """Return the processor time used so far by this process, the given ones and their children."""
    times = os.times()
    others = sum(_ticks(pid) for root in pids for pid in _tree(root))
    return times.user + times.system + others / _TICKS_PER_S


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


def _ticks(pid: int) -> int:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[11]) + int(after_name[12])


def limit_threads(threads: int | None) -> int:
    """Limit this process and its children to so many cores and threads; return the number.

    Call it before another library starts threads.
    """
    cores = sorted(os.sched_getaffinity(0))
    if threads is None:
        return len(cores)
    if threads > len(cores):
        raise SystemExit(f"--threads is {threads}; this machine has {len(cores)} cores")
    os.sched_setaffinity(0, cores[:threads])
    if threads == 1:
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    return threads
