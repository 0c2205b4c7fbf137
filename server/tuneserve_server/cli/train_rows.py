"""Training data from a JSONL file with rows ``{"messages": […]}`` or ``{"prompt", "completion"}``.

A row that cannot be trained on is reported by its line before anything is trained.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tuneserve_client import Datum, chat_datum, sft_datum
from tuneserve_client.data import Encoder, Message

T = TypeVar("T")
R = TypeVar("R")

_SHAPES = 'an object with "messages", or with "prompt" and "completion"'


class BadRows(Exception):
    """Rows that cannot be trained on: the first one, the reason, and the number of others."""


@dataclass(frozen=True)
class Row:
    line: int
    messages: Sequence[Message] = ()
    prompt: str = ""
    completion: str = ""


@dataclass(frozen=True)
class Rows:
    path: Path
    digest: str
    """The digest of the file's bytes, by which a resumed run recognizes its data."""
    rows: list[Row]


def read_rows(path: Path) -> Rows:
    """Return all rows of the file. Raises ``BadRows``, and ``OSError``."""
    content = path.read_bytes()
    lines = [(n, line) for n, line in enumerate(content.splitlines(), 1) if line.strip()]
    if not lines:
        raise BadRows(f"{path} has no rows; each line must be {_SHAPES}")
    rows = _each(path, lines, lambda item: item[0], lambda item: _row(*item))
    return Rows(path, hashlib.sha256(content).hexdigest()[:16], rows)


def encode(rows: Rows, tokenizer: Encoder, *, limit: int, cut: bool) -> list[Datum]:
    """Return the rows as datums of up to ``limit`` tokens.

    With ``cut``, longer rows are cut at their end; otherwise they are bad. A conversation may
    become several datums. Raises ``BadRows``.
    """

    def datums(row: Row) -> list[Datum]:
        found = [_within(each, limit, cut=cut) for each in _datums(row, tokenizer)]
        if not any(each.inputs["weights"].any() for each in found):
            raise ValueError("there is nothing to learn: the answer is empty or beyond the limit")
        return found

    encoded = _each(rows.path, rows.rows, lambda row: row.line, datums)
    return [datum for found in encoded for datum in found if datum.inputs["weights"].any()]


def _each(
    path: Path, items: Iterable[T], line: Callable[[T], int], read: Callable[[T], R]
) -> list[R]:
    """Return ``read`` of each item. Raises ``BadRows`` if ``read`` refuses an item."""
    found, bad = [], []
    for item in items:
        try:
            found.append(read(item))
        except ValueError as error:
            bad.append(f"{path} line {line(item)}: {error}")
    if bad:
        more = len(bad) - 1
        others = f" (and {more} other rows are bad)" if more else ""
        raise BadRows(f"{bad[0]}{others}; nothing was trained")
    return found


def _row(line: int, text: bytes) -> Row:
    try:
        value = json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is {type(value).__name__}; it must be {_SHAPES}")
    if "messages" in value:
        return Row(line, messages=_messages(value["messages"]))
    texts = {name: value.get(name) for name in ("prompt", "completion")}
    for name, each in texts.items():
        if not isinstance(each, str):
            problem = f'"{name}" is not a string' if name in value else f'there is no "{name}"'
            raise ValueError(f"{problem}; it must be {_SHAPES}")
    return Row(line, prompt=str(texts["prompt"]), completion=str(texts["completion"]))


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError('"messages" is not a list')
    for number, message in enumerate(value, 1):
        is_said = isinstance(message, dict) and all(
            isinstance(message.get(name), str) for name in ("role", "content")
        )
        if not is_said:
            raise ValueError(f'message {number} needs a string as "role" and one as "content"')
    if not any(message["role"] == "assistant" for message in value):
        raise ValueError('there is no message with the role "assistant" to train on')
    return value


def _datums(row: Row, tokenizer: Encoder) -> list[Datum]:
    if not row.messages:
        return [sft_datum(tokenizer, row.prompt, row.completion)]
    try:
        return [chat_datum(tokenizer, row.messages, learn="all")]
    except ValueError:
        # Templates that leave out past reasoning render an answer differently once other messages
        # follow it, so each answer becomes a separate datum.
        turns = [n for n, message in enumerate(row.messages, 1) if message["role"] == "assistant"]
        return [chat_datum(tokenizer, row.messages[:turn]) for turn in turns]


def _within(datum: Datum, limit: int, *, cut: bool) -> Datum:
    if len(datum) <= limit:
        return datum
    if not cut:
        raise ValueError(
            f"it has {len(datum)} tokens, and at most {limit} fit; split it, or cut longer rows "
            "with --max-tokens"
        )
    return Datum(datum.tokens[:limit], datum.targets[:limit], datum.inputs["weights"][:limit])
