"""The display of ``tuneserve top``: the load of the workers, from ``/metrics`` and ``healthz``."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tuneserve_client import Client, TuneserveError
from tuneserve_server.cli.output import print_json, print_json_line
from tuneserve_server.metric_names import PREFIX, STORE_METRICS

Worker = tuple[str, str]
"""A base model and the name of one of its workers; the name may be empty if there is only one."""

_WIDTH = 160  # without a terminal
_WINDOW_S = 20.0
"""The window over which rates are means: workers report metrics about every two seconds."""


def show(client: Client, url: str, *, once: bool, interval_s: float, as_json: bool) -> None:
    """Show the load of the workers once, or until Ctrl-C."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    watch = TopWindow()
    watch.add_counters(look(client))
    looks = _every(client, watch, interval_s)
    if once or not (as_json or console.is_terminal):
        facts, _ = next(looks)
        print_json(facts) if as_json else console.print(_drawn(facts, url))
        return
    with suppress(KeyboardInterrupt):
        _show_lines(looks) if as_json else _show_live(looks, console, url)


@dataclass(frozen=True)
class TopSample:
    """The health and the metrics of one moment."""

    at_s: float
    health: dict[str, Any]
    store: dict[str, float]
    workers: dict[Worker, dict[str, float]]


def look(client: Client) -> TopSample:
    health = client.health().model_dump(mode="json", exclude_none=True)
    store: dict[str, float] = {}
    workers: dict[Worker, dict[str, float]] = {}
    for family in text_string_to_metric_families(client.metrics()):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            if name in STORE_METRICS:
                store[name] = sample.value
            elif "worker" in sample.labels:  # empty for a base model's first worker
                worker = (sample.labels["base_model"], sample.labels["worker"])
                workers.setdefault(worker, {})[name] = sample.value
    return TopSample(time.monotonic(), health, store, workers)


class TopWindow:
    """The measurements of the last seconds, and the rates over them."""

    def __init__(self) -> None:
        self._looks: deque[TopSample] = deque()

    def add_counters(self, one: TopSample) -> None:
        self._looks.append(one)
        while len(self._looks) > 2 and one.at_s - self._looks[1].at_s >= _WINDOW_S:
            self._looks.popleft()

    def facts(self) -> dict[str, Any]:
        last = self._looks[-1]
        return {
            "health": last.health,
            "store": last.store,
            "workers": [self._worker(worker, last) for worker in last.workers],
        }

    def _worker(self, worker: Worker, last: TopSample) -> dict[str, Any]:
        now = last.workers[worker]
        return {
            "base_model": worker[0],
            "worker": worker[1],
            "ready": now.get("ready", 1.0) == 1.0,
            "device_busy": self._rate(worker, "device_seconds_total"),
            "trained_tokens_per_s": self._rate(worker, "tokens_trained_total"),
            "sampled_tokens_per_s": self._rate(worker, "tokens_sampled_total"),
            "figures": now,
        }

    def _rate(self, worker: Worker, name: str) -> float | None:
        """Return a counter's rate per second; None with one measurement, or for a new worker."""
        first, last = self._looks[0], self._looks[-1]
        before, now = (each.workers.get(worker, {}).get(name) for each in (first, last))
        if first is last or before is None or now is None or now < before:
            return None
        return (now - before) / (last.at_s - first.at_s)


def _every(client: Client, watch: TopWindow, interval_s: float) -> Iterator[tuple[Any, str | None]]:
    """Yield the facts at every interval, forever, each with the error of a failed request or None.

    A failed request does not end the loop: a server may be away for a while.
    """
    problem = None
    while True:
        yield watch.facts(), problem
        time.sleep(interval_s)
        try:
            watch.add_counters(look(client))
            problem = None
        except TuneserveError as error:
            problem = str(error)


def _show_lines(looks: Iterator[tuple[Any, str | None]]) -> None:
    for facts, problem in looks:
        print_json_line(facts if problem is None else {"error": problem})


def _show_live(looks: Iterator[tuple[Any, str | None]], console: Console, url: str) -> None:
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for facts, problem in looks:
            shown = _drawn(facts, url)
            if problem is not None:
                shown = Group(Text(problem, style="red"), shown)
            live.update(shown, refresh=True)


_COLUMNS = [
    "worker",
    "ready",
    "busy",
    "trained/s",
    "sampled/s",
    "trained",
    "sampled",
    "padding",
    "adapters",
    "programs",
    "late",
]


def _drawn(facts: dict[str, Any], url: str) -> RenderableType:
    health, store = facts["health"], facts["store"]
    queue = ", ".join(
        f"{store.get(name, 0):.0f} {text}"
        for name, text in (
            ("store_unfinished_requests", "waiting or running"),
            ("store_logged_requests", "logged"),
            ("store_recovery_points", "recovery points"),
        )
    )
    lines = [
        f"{url}  worker {health['worker']}  store {health['store']} ({health['durability']})  "
        f"disk {health['disk']}",
        f"queue: {queue}",
        *(f"{each}: {health[each]}" for each in ("warming", "failing") if each in health),
    ]
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "worker" else "right")
    for worker in facts["workers"]:
        table.add_row(*_cells(worker))
    return Group(*map(Text, lines), Text(), table)


def _cells(worker: dict[str, Any]) -> list[str]:
    figures = worker["figures"]

    def of(name: str) -> float:
        return float(figures.get(name, 0.0))

    computed = of("tokens_computed_total")
    padding = 1 - of("tokens_trained_total") / computed if computed else 0.0
    busy = worker["device_busy"]
    return [
        " ".join(filter(None, (worker["base_model"], worker["worker"]))),
        "yes" if worker["ready"] else "warming",
        "-" if busy is None else f"{min(busy, 1.0):.0%}",
        _figure(worker["trained_tokens_per_s"]),
        _figure(worker["sampled_tokens_per_s"]),
        _figure(of("tokens_trained_total")),
        _figure(of("tokens_sampled_total")),
        f"{padding:.0%}",
        f"{of('adapters_on_device'):.0f} of {of('adapters'):.0f}",
        f"{of('programs_compiled'):.0f} of {of('programs'):.0f}",
        f"{of('compilations_after_ready_total'):.0f}",
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
