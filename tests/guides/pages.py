"""The documentation's pages as blocks, the test that runs each block, and checks of the rest.

A ``python`` or ``sh`` block runs, in the order of the page, in the test that ``ELSEWHERE`` names or
in ``test_pages.py``. If the line above it is

    <!-- not run: the reason -->

it does not run. Then its Python must compile, its shell must parse, and the names of ours that it
calls must exist.
"""

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer.main

from tuneserve_server.cli import main as cli

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docker" / "README.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]
RUN = {"python", "sh"}
ELSEWHERE = {
    "README.md": {
        "make demo\n": "tests/integration/test_end_to_end.py",
        "tuneserve train my-rows.jsonl": "tests/guides/test_readme.py",
        "examples/sft": "tests/guides/test_examples.py",
        "tuneserve keys create": "tests/server/cli/test_keys.py",
    },
    "docs/api.md": {"checkpoints/import": "tests/client/test_peft_guide.py"},
    "docs/cli.md": {"": "tests/integration/test_client_cli.py"},
    "docs/configuration.md": {
        "tuneserve worker --": "tests/guides/test_started.py",
        "tuneserve api --": "tests/guides/test_started.py",
        "tuneserve tenants set": "tests/server/cli/test_keys.py",
    },
    "docs/guides/operating.md": {"": "tests/guides/test_operating.py"},
    "docs/guides/peft.md": {"": "tests/client/test_peft_guide.py"},
    "docs/keys.md": {
        "tuneserve up --": "tests/guides/test_started.py",
        "tuneserve keys create": "tests/server/cli/test_keys.py",
    },
    "docs/dashboard.md": {"": "tests/server/cli/test_keys.py"},
    "docs/sdk.md": {"": "tests/client/test_docs.py"},
}
"""Blocks that need more than a service: the page, the words that identify a block (the first match
counts), and the test that runs it.
"""
_NAMES_FOR_THEM = {"", "bash", "shell", "console", "py", "pycon"}
"""Names under which a block would look as if it were run."""
HERE = "tests/guides/test_pages.py"
URL = "http://127.0.0.1:8410"
"""The address of the service in the guides."""

_MARK = re.compile(r"<!-- not run: (.+) -->")
_OURS = re.compile(r"(?<!> )\b(?:docker|docs|examples|benchmarks|scripts)/[\w./-]+")
_ENDS = {"|", "||", "&&", ";", "&", ">", ">>"}
_BEFORE_COMMANDS = _ENDS | {"sudo", "exec", "nohup", "time", "env", "if", "then", "do", "else", "!"}


class Block(NamedTuple):
    language: str
    code: str
    line: int
    """The number of its first line of code, from 1."""
    not_run: str | None
    """The reason why it is not run."""


def blocks(page: str) -> Iterator[Block]:
    """Every fenced block of the page."""
    opened: tuple[str, int, str | None] | None = None
    mark = None
    lines = page.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if opened is None and line.startswith("```"):
            opened = line.strip("`\n "), number + 1, mark
        elif opened is not None and line.startswith("```"):
            language, first, why = opened
            yield Block(language, "".join(lines[first - 1 : number - 1]), first, why)
            opened = None
        if opened is None:
            found = _MARK.fullmatch(line.strip())
            mark = found[1] if found else None
    assert opened is None, f"the block from line {opened[1] if opened else 0} is not closed"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def runner(page: Path, block: Block) -> str | None:
    """The test that runs the block, or None."""
    if block.language not in RUN or block.not_run is not None:
        return None
    for words, test in ELSEWHERE.get(name(page), {}).items():
        if words in block.code:
            return test
    return HERE


def block_with(page: str, words: str) -> Block:
    """The only block of the page that contains ``words``."""
    (found,) = [b for b in blocks((ROOT / page).read_text()) if words in b.code]
    return found


def check(block: Block) -> None:
    """Check a block as far as possible without running it."""
    assert block.language not in _NAMES_FOR_THEM, f"write python or sh: {block}"
    if block.language == "python":
        ast.parse(block.code)
    if block.language == "sh":
        parsed = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True)
        assert parsed.returncode == 0, parsed.stderr
        for line in block.code.replace("\\\n", " ").splitlines():
            _check_line(line)


def _check_line(line: str) -> None:
    for path in _OURS.findall(line.partition(" #")[0]):
        assert (ROOT / path).exists(), f"{path} does not exist: {line}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    words = _words(line)
    for place, word in enumerate(words):
        arguments = words[place + 1 :]
        stop = next((n for n, each in enumerate(arguments) if each in _ENDS), len(arguments))
        before = words[place - 1] if place else ";"
        is_command = before in _BEFORE_COMMANDS or re.fullmatch(r"\w+=.*", before)
        if Path(word).name == "tuneserve" and is_command:
            _check_command(arguments[:stop], line)
        if word == "make":
            assert arguments[0] in targets, f"no such target: {line}"


def _words(line: str) -> list[str]:
    reader = shlex.shlex(re.sub(r"\$\(", " ; ", line), posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    try:
        return [word.strip("()") for word in reader]
    except ValueError:
        return []  # a part of a text of several lines


def _check_command(arguments: list[str], line: str) -> None:
    """The command and each of its options exist."""
    command: Any = typer.main.get_command(cli.app)
    words = [word for word in arguments if not word.startswith("-")]
    while words and words[0] in getattr(command, "commands", ()):
        command = command.get_command(typer.Context(command), words.pop(0))
    assert not (words and hasattr(command, "commands")), f"no such command: {line}"
    options = [[*each.opts, *each.secondary_opts] for each in command.params]
    known = {name for names in options for name in names} | {"--help"}
    given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    assert given <= known, f"no such option, {given - known}: {line}"
