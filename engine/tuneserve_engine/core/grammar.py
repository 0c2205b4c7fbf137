"""The form that a sample's text must have: JSON of a schema, a regular expression, or a choice."""

import json
from dataclasses import dataclass
from typing import Literal

from tuneserve_engine.core.errors import UserError

MAX_GRAMMAR_BYTES = 64 * 1024
"""The most bytes of a schema, a regular expression, or a list of choices."""

GrammarKind = Literal["json_schema", "regex", "choice"]


@dataclass(frozen=True)
class Grammar:
    """The form of a text. Without its end, a sample that reaches ``max_tokens`` lacks a part of it.

    ``text`` is a JSON Schema, a regular expression that the whole text matches, or a JSON list of
    the texts to choose from.
    """

    kind: GrammarKind
    text: str

    @property
    def choices(self) -> list[str]:
        """The texts to choose from. Raises ``UserError`` if the list is none, or empty."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError):
            found = None
        if not (isinstance(found, list) and all(isinstance(each, str) for each in found)):
            raise UserError("the choices are no list of texts; send a JSON list of texts")
        if not all(found) or not found:
            raise UserError("the choices are empty, or one is; send at least one, and no empty one")
        return found


def check_grammar(grammar: Grammar) -> None:
    """Raise ``UserError`` for a grammar that is too long to be compiled."""
    size = len(grammar.text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise UserError(
            f"the form of the answer has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}; send a "
            "smaller schema, or fewer choices"
        )
