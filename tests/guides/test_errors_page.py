"""The messages on docs/errors.md are messages of the code, with `…` for the parts that differ."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.M)
PACKAGES = (
    "clients/tuneserve_client",
    "server/tuneserve_server",
    "engine/tuneserve_engine",
)
VALUE = "\0"


def text_of(node: ast.AST) -> str | None:
    """The text of a literal, with VALUE for each value in it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or VALUE for part in node.values)
    return None


@lru_cache
def texts() -> tuple[str, ...]:
    trees = (
        ast.parse(path.read_text())
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    )
    found = {text_of(node) for tree in trees for node in ast.walk(tree)}
    return tuple(each for each in found if each)


def is_message(message: str) -> bool:
    """Whether a text of the code has the message's fixed parts, in this order."""
    parts = [re.escape(part) for part in message.split("…") if part]
    pattern = re.compile(".*".join(parts), re.S)
    return any(pattern.search(text) for text in texts())


def test_the_page_has_messages_of_every_area() -> None:
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) == 8
    assert all(len(re.findall(r"^\| `", section, re.M)) >= 5 for section in sections)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_of_the_code(message: str) -> None:
    assert is_message(message)


def test_a_message_that_the_code_does_not_have_is_found() -> None:
    assert not is_message("the server has … no such words")
    assert not is_message("and that the server runs … does not answer")  # in another order
