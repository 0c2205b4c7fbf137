"""The category of each error, and client texts in messages."""

import pytest

from tuneserve_engine.core.errors import (
    EngineError,
    FileDamaged,
    ServerError,
    UserError,
    shown,
    shown_number,
)


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (EngineError("why"), "unknown"),
        (UserError("why"), "user"),
        (ServerError("why"), "server"),
        (FileDamaged("why", "cut off"), "server"),
    ],
)
def test_every_error_has_a_category_and_its_message(error: EngineError, category: str) -> None:
    assert (error.category, str(error), error.no_room) == (category, "why", False)


def test_a_damaged_file_keeps_the_reason() -> None:
    assert FileDamaged("checkpoint a is damaged", "it is cut off").reason == "it is cut off"


def test_a_text_is_quoted_escaped_and_cut() -> None:
    assert shown("a") == "'a'"
    assert shown("a\n'") == '"a\\n\'"'
    assert shown("x" * 64) == f"'{'x' * 64}'"
    assert shown("x" * 65) == f"'{'x' * 64}…'"


def test_a_number_too_long_to_read_is_shown_by_its_bits() -> None:
    assert shown_number(-(10**24) + 1) == "-999999999999999999999999"
    assert shown_number(2**100) == "a number of 101 bits"
