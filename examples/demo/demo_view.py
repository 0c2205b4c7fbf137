"""The display of the demo: live progress, loss curves, and answers before and after training."""

import threading
from statistics import fmean

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

_BARS = " ▁▂▃▄▅▆▇█"
_COLOURS = ("cyan", "magenta", "yellow")
_HEIGHT, _GAP, _FRAME = 6, 3, 4


class View:
    """A display that is live during its ``with`` block; tenants report from their own threads."""

    def __init__(self, tenants: list[tuple[str, str]], steps: int) -> None:
        self.console = Console()
        self._steps = steps
        self._lock = threading.Lock()
        self._losses: dict[str, list[float]] = {name: [] for name, _ in tenants}
        self._before: dict[str, list[str]] = {}
        self._after: dict[str, list[str]] = {}
        self._titles = dict(tenants)
        self._colour = dict(zip(self._titles, _COLOURS, strict=False))
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._tasks = {
            name: self._progress.add_task(
                f"[{self._colour[name]}]{name:8}[/] {title}", total=steps, note="opening a session"
            )
            for name, title in tenants
        }
        self._compiling = ""
        self._live = Live(self._panel(), console=self.console, refresh_per_second=8)

    def __enter__(self) -> "View":
        self._live.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._live.update(self._panel())
        self._live.__exit__(None, None, None)

    def say(self, name: str, note: str) -> None:
        """Say what a tenant waits for."""
        self._progress.update(self._tasks[name], note=note)

    def compiling(self, programs: str) -> None:
        """Say how many of the worker's programs are compiled, or nothing."""
        with self._lock:
            self._compiling = programs
            self._live.update(self._panel())

    def before(self, name: str, answers: list[str]) -> None:
        """Store the base model's answers."""
        self._before[name] = answers
        self.say(name, "waiting for the first step")

    def step(self, name: str, loss: float) -> None:
        """Report one finished optimizer step; ``loss`` is in nats per trained token."""
        with self._lock:
            self._losses[name].append(loss)
            self._progress.update(self._tasks[name], advance=1, note=f"loss {loss:.3f}")
            self._live.update(self._panel())

    def after(self, name: str, answers: list[str]) -> None:
        """Store the trained adapter's answers."""
        self._after[name] = answers
        self._progress.update(self._tasks[name], note=f"loss {self._losses[name][-1]:.3f}, done")

    def _panel(self) -> Panel:
        charts = Table.grid(padding=(0, _GAP))
        charts.add_row(*(self._chart(name) for name in self._losses))
        return Panel(
            Group(self._progress, Text(), charts),
            title="three tenants, one base model, the official tinker SDK",
            subtitle=f"the worker compiles, once: {self._compiling}"
            if self._compiling
            else "loss in nats per token",
            border_style="dim",
        )

    def _chart(self, name: str) -> Text:
        """Return the loss curve as columns of block characters, with 0 at the bottom.

        A column is the mean of as many steps as it takes to fit the curves side by side.
        """
        losses = self._losses[name]
        room = (self.console.width - _FRAME) // len(self._losses) - _GAP
        share = -(-self._steps // max(room, 1))
        means = [fmean(losses[i : i + share]) for i in range(0, len(losses), share)]
        top = max(means, default=1.0)
        rows = []
        for level in reversed(range(_HEIGHT)):
            eighths = (round(8 * (_HEIGHT * mean / top - level)) for mean in means)
            rows.append("".join(_BARS[min(max(n, 0), 8)] for n in eighths))
        label = f"{name} {losses[0]:.2f} → {losses[-1]:.2f}" if losses else name
        return Text("\n".join([*rows, label]), style=self._colour[name], no_wrap=True)

    def summary(self, questions: list[str], shared: tuple[int, int], seconds: float) -> None:
        """Print the answers side by side, the number of shared passes, and the next steps."""
        self.console.print()
        for name, title in self._titles.items():
            table = Table(title=f"{name}: {title}", title_style=self._colour[name], expand=False)
            for column in ("asked (never trained on)", "base model", "after training"):
                table.add_column(column)
            for row in zip(questions, self._before[name], self._after[name], strict=True):
                table.add_row(*map(Text, row))
            self.console.print(table)
        self.console.print(
            f"{shared[0]} of {shared[1]} training passes carried rows of more than one tenant.\n"
        )
        self.console.print(f"Done in {seconds:.0f} s. Next, with a real model:", style="bold")
        self.console.print(
            "  .venv/bin/tuneserve up --base-model Qwen/Qwen3-0.6B   # a hub id or a directory\n"
            "  export TINKER_BASE_URL=http://127.0.0.1:8410 TINKER_API_KEY=tml-local\n"
            "  .venv/bin/python examples/sft_tinker.py   # or any script for the tinker SDK",
            highlight=False,
            soft_wrap=True,
        )
