"""Held-out rows: the share of the data that a run never trains on, and the prompts in it."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuneserve_client import Datum
from tuneserve_client.data import Encoder
from tuneserve_client.wire.tokenizer import Tokenizer
from tuneserve_server.cli.data.forms import Row
from tuneserve_server.cli.train_rows import Rows

_SHOWN_TEXT = 16
"""The most tokens of a row without a prompt that stand for one."""


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt to continue; ``text`` is how it is shown, of a conversation its last message."""

    tokens: list[int]
    text: str


class TooFewRows(ValueError):
    """The error of data that leave nothing to train on, or nothing to hold out."""


def split(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    """Return the rows to train on and the held-out rows.

    The seed chooses the held-out rows, at least one. Copies of a row stay together, so that no
    held-out row is trained on. Raises ``TooFewRows`` if there are no two different rows.
    """
    keys = [row.content for row in rows.rows]
    distinct = sorted(set(keys))
    if len(distinct) < 2:
        raise TooFewRows(
            f"{rows.name} has {len(distinct)} different row, so none can be held out; give more "
            "rows, or other ones with --eval-file"
        )
    count = min(max(1, math.floor(share * len(distinct) + 0.5)), len(distinct) - 1)
    chosen = set(random.Random(f"held out:{seed}").sample(distinct, count))
    trained = [row for row, key in zip(rows.rows, keys, strict=True) if key not in chosen]
    held = [row for row, key in zip(rows.rows, keys, strict=True) if key in chosen]
    return replace(rows, rows=trained), replace(rows, rows=held)


def prompt_of(datum: Datum) -> list[int]:
    """Return the tokens before the first one that is trained on.

    If all tokens are, return the first half of them, or their first few.
    """
    is_trained = (datum.inputs["weights"] > 0).tolist()
    before = is_trained.index(True) + 1
    if before == 1:
        before = max(1, min(_SHOWN_TEXT, len(datum) // 2))
    return [int(each) for each in datum.tokens[:before]]


def prompt_in(datum: Datum, rows: Sequence[Row], tokenizer: Tokenizer) -> SamplePrompt:
    """Return the prompt of a datum, which was made of one of the rows.

    The prompt of a conversation whose last message is not found is shown with the template's marks:
    without them, a role could not be told from the text.
    """
    tokens = prompt_of(datum)
    for row in rows:
        options: dict[str, Any] = {} if row.tools is None else {"tools": row.tools}
        for turn, message in enumerate(row.messages):
            said = row.messages[turn - 1].get("content") if turn else None
            if message["role"] != "assistant" or not isinstance(said, str) or not said.strip():
                continue
            text = tokenizer.render(row.messages[:turn], **options)
            if tokenizer.encode(text, special=False) == tokens:
                return SamplePrompt(tokens, said)
    is_chat = any(row.messages for row in rows)
    return SamplePrompt(tokens, tokenizer.decode(tokens, skip_special=not is_chat))


def encoded_prompt(text: str, tokenizer: Encoder, *, as_chat: bool) -> list[int]:
    """Return the tokens of a prompt: of a user's message, with ``as_chat``, or of a plain text."""
    if not as_chat:
        return tokenizer.encode(text)
    return tokenizer.encode(tokenizer.render([{"role": "user", "content": text}]), special=False)


def weight_of(data: Sequence[Datum]) -> float:
    return float(sum(each.inputs["weights"].sum(dtype="float64") for each in data))
