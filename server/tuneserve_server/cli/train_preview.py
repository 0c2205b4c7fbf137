"""The preview of a run's data: its size, doubtful rows, and a row with the part to train on."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Protocol

from rich.console import Console
from rich.text import Text

from tuneserve_client import Datum
from tuneserve_server.cli.output import print_json_line
from tuneserve_server.cli.time_estimate import TimeEstimate
from tuneserve_server.cli.train_rows import Rows

_SHOWN_COLUMNS = 10
_SHOWN_TOKENS = 400


class TokenDecoder(Protocol):
    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str: ...


@dataclass(frozen=True)
class Preview:
    rows: int
    held_out: int
    """The number of held-out rows, beside those to train on."""
    skipped: int
    cut: int
    """The number of rows that are longer than the limit, and lose their end."""
    tokens: int
    longest: int
    trained_share: float
    steps: int
    duplicates: int
    empty_answers: int
    unused_columns: list[str]
    """The columns that are not trained on, nor part of a prompt."""
    time: TimeEstimate | None
    example: list[tuple[str, bool]]
    """Parts of the first row, each with whether it is trained on."""

    @classmethod
    def from_data(  # noqa: PLR0913 - parts of a plan
        cls,
        data: Rows,
        datums: Sequence[Datum],
        decoder: TokenDecoder,
        *,
        steps: int,
        held_out: int = 0,
        time: TimeEstimate | None = None,
    ) -> "Preview":
        rows = data.rows
        copies = {row.content for row in rows}
        tokens = sum(map(len, datums))
        trained = sum(int((each.inputs["weights"] > 0).sum()) for each in datums)
        return cls(
            rows=len(rows),
            held_out=held_out,
            skipped=len(data.bad),
            cut=data.cut,
            tokens=tokens,
            longest=max(map(len, datums)),
            trained_share=round(trained / tokens, 4),
            steps=steps,
            duplicates=len(rows) - len(copies),
            empty_answers=sum(row.is_answer_empty for row in rows),
            unused_columns=data.unused,
            time=time,
            example=_parts(datums[0], decoder),
        )

    def show(self, console: Console, *, as_json: bool) -> None:
        if as_json:
            shown = [{"text": text, "trained": is_trained} for text, is_trained in self.example]
            print_json_line({**asdict(self), "example": shown})
            return
        held_out = f", {self.held_out:,} more held out" if self.held_out else ""
        text = Text(
            f"{self.rows:,} rows{held_out}, {self.tokens:,} tokens, the longest {self.longest:,}, "
            f"{self.trained_share:.0%} trained on, {self.steps:,} steps\n"
        )
        time = self.time.text if self.time else "shown after the second step"
        text.append(f"estimated time: {time}\n")
        for count, name in (
            (self.skipped, "bad rows skipped"),
            (self.cut, "rows cut by --max-tokens"),
            (self.duplicates, "duplicate rows"),
            (self.empty_answers, "rows with an empty answer"),
        ):
            if count:
                text.append(f"{name}: {count:,}\n", style="yellow")
        if unused := self.unused_columns:
            text.append(f"columns not used: {shortened(unused)}\n", style="yellow")
        for part, is_trained in self.example:
            plain = part if console.is_terminal or not is_trained else f"«{part}»"
            text.append(plain, style="green" if is_trained else "dim")
        console.print(text, soft_wrap=True)


def shortened(columns: Sequence[str]) -> str:
    """Return the names of the first columns, and the number of the others."""
    more = len(columns) - _SHOWN_COLUMNS
    rest = f" and {more:,} more" if more > 0 else ""
    return ", ".join(columns[:_SHOWN_COLUMNS]) + rest


def _parts(datum: Datum, decoder: TokenDecoder) -> list[tuple[str, bool]]:
    first = (int(datum.tokens[0]), False)
    weighted = zip(datum.targets.tolist(), (datum.inputs["weights"] > 0).tolist(), strict=True)
    shown = [first, *weighted][:_SHOWN_TOKENS]
    return [
        (decoder.decode([token for token, _ in run], skip_special=False), is_trained)
        for is_trained, run in groupby(shown, key=lambda each: each[1])
    ]
