"""Rows of training data as datums.

A row that cannot be trained on is reported by its line before anything is trained.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tuneserve_client import Datum, chat_datum, next_token_datum, sft_datum
from tuneserve_client.data import Encoder
from tuneserve_server.cli.data.forms import (
    SHAPES,
    Row,
    check_roles,
    known_roles,
    row_from,
    with_keys,
)
from tuneserve_server.cli.data.sources import open_source

T = TypeVar("T")
R = TypeVar("R")

_SHOWN_BAD = 10


class BadRows(Exception):
    """Rows that cannot be trained on: the first ones, with a reason per line, and their number."""


@dataclass
class Rows:
    name: str
    digest: str
    """The digest of the data, by which a resumed run recognizes them."""
    rows: list[Row]
    skip_bad: bool = False
    bad: list[str] = field(default_factory=list)
    """The places and reasons of bad rows so far."""
    cut: int = 0
    """The number of rows that were cut to fit."""

    @property
    def unused(self) -> list[str]:
        """The columns that the forms of the rows do not read, in the order of the data."""
        return list(dict.fromkeys(name for row in self.rows for name in row.unused))


def read_rows(
    data: str,
    renamed: Mapping[str, str] | None = None,
    *,
    config: str | None = None,
    split: str | None = None,
    skip_bad: bool = False,
) -> Rows:
    """Return all rows of the data. Raises ``BadRows``, ``NoSource`` and ``OSError``.

    ``renamed`` has the column of the data for each name that a form expects. ``config`` and
    ``split`` name a configuration and a split of a dataset.
    """
    source = open_source(data, config, split)
    if not source.rows:
        raise BadRows(f"{data} has no rows; each row must be {SHAPES}")
    digest = source.digest
    if renamed:
        digest = hashlib.sha256(f"{digest}{sorted(renamed.items())}".encode()).hexdigest()[:16]
    rows = Rows(f"{data} split {split}" if split else data, digest, [], skip_bad)
    rows.rows = _each(
        rows,
        source.rows,
        lambda raw: raw.place,
        lambda raw: row_from(raw.place, raw.read(), renamed or {}),
    )
    return rows


def encode(rows: Rows, tokenizer: Encoder, *, limit: int, cut: bool) -> list[Datum]:
    """Return the rows as datums of up to ``limit`` tokens.

    With ``cut``, longer rows are cut at their end; otherwise they are bad. A conversation may
    become several datums. Raises ``BadRows``.
    """

    roles = known_roles(tokenizer) if any(row.messages for row in rows.rows) else []

    def datums(row: Row) -> tuple[Row, list[Datum], bool]:
        try:
            if roles:
                check_roles(row, roles)
            whole = _datums(row, tokenizer)
            found = [_within(each, limit, cut=cut) for each in whole]
            if not any(each.inputs["weights"].any() for each in found):
                raise ValueError(
                    "there is nothing to learn: the answer is empty or beyond the limit; add an "
                    "answer, or raise --max-tokens"
                )
        except ValueError as error:
            raise with_keys(error, row.keys) from None
        return row, found, any(len(each) > limit for each in whole)

    encoded = _each(rows, rows.rows, lambda row: row.place, datums)
    rows.rows = [row for row, _, _ in encoded]
    rows.cut = sum(is_cut for _, _, is_cut in encoded)
    return [datum for _, found, _ in encoded for datum in found if datum.inputs["weights"].any()]


def _each(
    rows: Rows, items: Iterable[T], place: Callable[[T], str], read: Callable[[T], R]
) -> list[R]:
    """Return ``read`` of each item. Raises ``BadRows`` if ``read`` refuses an item.

    With ``rows.skip_bad`` it raises only if no item is left.
    """
    found, bad = [], []
    for item in items:
        try:
            found.append(read(item))
        except ValueError as error:
            reason = " ".join(str(error).split())
            bad.append(f"{rows.name} {place(item)}: {reason}")
    rows.bad += bad
    if not bad or (rows.skip_bad and found):
        return found
    if len(bad) == 1:
        raise BadRows(f"{bad[0]}; nothing was trained; correct the row, or give --skip-bad")
    raise BadRows(
        "\n".join(bad[:_SHOWN_BAD])
        + f"\n{len(bad)} rows are bad and nothing was trained; correct them, or train on the "
        "others with --skip-bad"
    )


def _datums(row: Row, tokenizer: Encoder) -> list[Datum]:
    if row.text is not None:
        return [_text_datum(row.text, tokenizer)]
    if not row.messages:
        return [sft_datum(tokenizer, row.prompt, row.completion)]
    options: dict[str, Any] = {} if row.tools is None else {"tools": row.tools}
    if not row.learn_from:
        try:
            return [chat_datum(tokenizer, row.messages, learn="all", **options)]
        except ValueError:
            # Templates that leave out past reasoning render an answer differently once other
            # messages follow it, so each answer becomes a separate datum.
            pass
    turns = [n for n, message in enumerate(row.messages, 1) if message["role"] == "assistant"]
    return [
        chat_datum(tokenizer, row.messages[:turn], **options)
        for turn in turns
        if turn > max(row.learn_from, 1)  # one that opens the conversation answers nothing
    ]


def _text_datum(text: str, tokenizer: Encoder) -> Datum:
    tokens = tokenizer.encode(text)
    if tokenizer.eos_token_id is not None and tokens[-1:] != [tokenizer.eos_token_id]:
        tokens = [*tokens, tokenizer.eos_token_id]
    if len(tokens) < 2:
        raise ValueError("there is nothing to learn: the text is empty; add a text")
    return next_token_datum(tokens)


def _within(datum: Datum, limit: int, *, cut: bool) -> Datum:
    if len(datum) <= limit:
        return datum
    if not cut:
        raise ValueError(
            f"it has {len(datum)} tokens, and at most {limit} fit; split it, or cut longer rows "
            "with --max-tokens"
        )
    return Datum(datum.tokens[:limit], datum.targets[:limit], datum.inputs["weights"][:limit])
