"""The English of the docs, docstrings, command-line help and settings (CONTRIBUTING.md, Notation).

This is a guard, not a style guide: it keeps out the openings and words that make readers stumble.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_server.cli.main import app
from tuneserve_server.settings import ApiSettings

ROOT = Path(__file__).parent.parent
CODE = ("clients", "engine", "server", "benchmarks", "examples", "scripts", "tests")
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "docker").glob("*.md"),
    *(ROOT / "deploy").glob("*.md"),
]

OPENING = re.compile(r"(?:Who|Whoever|Whose|What|Whatever|That|Those)\b")
WORDS = re.compile(r"\b(?:nobody|somebody|is told|are told)\b|\bwho\b[^.]*\bgo(?:es)? on\b", re.I)


def sentences(text: str) -> Iterator[str]:
    """The sentences, table cells and list items of a text without its code blocks."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\.) ?)", text):
        plain = re.sub(r"\s+", " ", paragraph)
        yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*\"'(\[])|\s*\|\s*", plain)


def stumbles(text: str) -> list[str]:
    found = []
    for sentence in sentences(text):
        start = re.sub(r"^(?:[-*#>]+|\d+\.)\s+", "", sentence.strip()).strip(' *_"`([')
        if OPENING.match(start) or WORDS.search(sentence):
            found.append(sentence.strip()[:120])
    return found


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module that stand alone: docstrings of modules, classes and names."""
    for node in ast.walk(ast.parse(file.read_text())):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                if isinstance(each.value.value, str):
                    yield each.lineno, each.value.value


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("The worker loads the point.", 0),
        ("What the worker loads is the point.", 1),
        ("It is fine. Who comes first is served.", 1),
        ("| a | Those that wait |", 1),
        ("- That is it.", 1),
        ("The client that waits is served.", 0),
        ("It is there and nobody asks.", 1),
        ("```\nWhat a code block says\n```", 0),
    ],
)
def test_the_guard_counts_forbidden_openings_and_words(text: str, count: int) -> None:
    assert len(stumbles(text)) == count


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_no_forbidden_opening_or_word(page: Path) -> None:
    assert stumbles(page.read_text()) == []


@pytest.mark.parametrize("folder", CODE)
def test_docstrings_have_no_forbidden_opening_or_word(folder: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {each}"
        for file in (ROOT / folder).rglob("*.py")
        if not file.name.endswith("_pb2.py")
        for line, text in docstrings(file)
        for each in stumbles(text)
    ]
    assert found == []


def test_the_help_of_every_command_has_no_forbidden_opening_or_word() -> None:
    texts = []
    commands: list[Any] = [typer.main.get_command(app)]
    while commands:
        command = commands.pop()
        texts.append(command.help or "")
        texts += [getattr(each, "help", None) or "" for each in command.params]
        if hasattr(command, "commands"):
            context = typer.Context(command)
            commands += [command.get_command(context, each) for each in command.commands]
    assert len(texts) > 200
    assert [each for text in texts for each in stumbles(text)] == []


@pytest.mark.parametrize("settings", [ApiSettings, WorkerSettings])
def test_the_settings_have_no_forbidden_opening_or_word(
    settings: type[ApiSettings] | type[WorkerSettings],
) -> None:
    texts = [field.description or "" for field in settings.model_fields.values()]
    assert [each for text in texts for each in stumbles(text)] == []
