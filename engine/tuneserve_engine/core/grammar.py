"""The form that a sample's text must have: JSON of a schema, a regular expression, or a choice."""

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from tuneserve_engine.core.errors import UserError

MAX_GRAMMAR_BYTES = 64 * 1024
"""The most bytes of a schema, a regular expression, or a list of choices."""

MAX_MERGES = 12
"""The most parts of a schema that must hold together with others."""
MAX_REMAINDERS = 10_000
"""The most remainders that the divisors of a schema have together."""
_MOST_DIGITS = 12
_PATTERNS = ("pattern", "format", "multipleOf")

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
    """Raise ``UserError`` for a grammar that would take too long to compile."""
    size = len(grammar.text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise UserError(
            f"the form of the answer has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}; send a "
            "smaller schema, or fewer choices"
        )
    if grammar.kind == "json_schema":
        _check_schema(grammar.text)


def _check_schema(text: str) -> None:
    """Refuse schemas whose compilation takes a time that no other limit bounds.

    The time doubles with each pattern that has to hold at once, and grows with the least common
    multiple of divisors.
    """
    try:
        waiting = [json.loads(text, parse_float=Decimal)]
    except (ValueError, RecursionError):
        raise UserError(
            "the schema cannot be read as JSON, or is nested too deeply; send a simpler one"
        ) from None
    merges = 0
    divisors: set[Decimal] = set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
            merges += _merges(part)
            if isinstance(divisor := part.get("multipleOf"), int | Decimal):
                divisors.add(Decimal(divisor))
    if merges > MAX_MERGES:
        raise UserError(
            f"the schema has {merges} parts that must hold together with others (allOf, or a "
            f"pattern beside anyOf or $ref); the limit is {MAX_MERGES}; put them into one"
        )
    groups = [divisors] if merges else [{each} for each in divisors]
    if sum(_remainders(each) for each in groups if each) > MAX_REMAINDERS:
        raise UserError(
            f"the multipleOf of the schema have more than {MAX_REMAINDERS} remainders together; "
            "send divisors with fewer digits, or leave them out"
        )


def _merges(part: dict[str, Any]) -> int:
    """Return the number of parts of the schema that are merged with others here."""
    together = part.get("allOf")
    count = len(together) if isinstance(together, list) else 0
    has_others = any(name in part for name in ("anyOf", "oneOf", "$ref"))
    return count + (has_others and any(name in part for name in _PATTERNS))


def _remainders(divisors: set[Decimal]) -> int:
    """Return the least common multiple, in units of the last decimal place."""
    for each in divisors:
        _, digits, exponent = each.as_tuple()
        if len(digits) > _MOST_DIGITS or not isinstance(exponent, int):
            return MAX_REMAINDERS + 1
        if abs(exponent) > _MOST_DIGITS:
            return MAX_REMAINDERS + 1
    places = max(0, *(-int(each.as_tuple().exponent) for each in divisors))
    return math.lcm(*(abs(int(each.scaleb(places))) for each in divisors))
