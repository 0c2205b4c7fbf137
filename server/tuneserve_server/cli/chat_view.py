"""The display of ``tuneserve chat``: turns from a terminal, a pipe or an option, and answers."""

import os
import sys
from collections.abc import Generator, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tuneserve_client import RequestFailed
from tuneserve_server.cli.conversation import BadCommand, Conversation, run_command
from tuneserve_server.cli.output import print_json_line


def run_prompts(prompts: Iterator[str], talks: list[Conversation], *, as_json: bool) -> None:
    """Print the answers to the prompts, in their order."""
    for said in prompts:
        if as_json:
            answers = ["".join(talk.answer(said)) for talk in talks]
            facts = dict(zip(("answer", "base_answer"), answers, strict=False))
            print_json_line({"prompt": said, **facts})
        elif len(talks) == 1:
            _print(talks[0].answer(said))
        else:
            for talk in talks:
                typer.echo(f"{talk.name}:")
                _print(talk.answer(said))


def lines_of_stdin() -> Iterator[str]:
    """Yield the lines of standard input, except empty ones."""
    yield from (line.strip() for line in sys.stdin if line.strip())


def converse(talks: list[Conversation]) -> None:
    """Hold a conversation on a terminal until Ctrl-D."""
    names = " beside ".join(talk.name for talk in talks)
    typer.echo(f"{names}: /help lists commands, Ctrl-D ends the conversation", err=True)
    console = Console()
    session: PromptSession[str] = PromptSession("> ", history=_history(), key_bindings=_keys())
    while True:
        try:
            said = session.prompt().strip()
            if said.startswith("/"):
                typer.echo(run_command(said, talks))
            elif said:
                _answer(talks, said, console)
        except BadCommand as error:
            typer.echo(f"tuneserve: {error}", err=True)
        except (EOFError, KeyboardInterrupt):
            return


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> History:
    """Return the earlier turns, from a file that only its owner can read if one can be written."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state / "tuneserve"
    file = folder / "chat_history"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))


def _answer(talks: list[Conversation], said: str, console: Console) -> None:
    """Print an answer; a failed or interrupted answer does not end the conversation."""
    answers = [talk.answer(said) for talk in talks]
    try:
        _print(answers[0]) if len(talks) == 1 else _print_columns(talks, answers, console)
    except KeyboardInterrupt:
        typer.echo(" …")
    except RequestFailed as error:
        typer.echo(f"tuneserve: {error}", err=True)
    finally:
        for each in answers:
            each.close()  # keep the received part of an interrupted answer


def _print_columns(
    talks: list[Conversation], answers: Sequence[Generator[str, None, None]], console: Console
) -> None:
    """Print the answers side by side while they arrive."""
    texts = ["" for _ in answers]
    with Live(console=console, auto_refresh=False) as live:
        for pieces in zip_longest(*answers, fillvalue=""):
            texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
            shown = Table(expand=True)
            for talk in talks:
                shown.add_column(Text(talk.name))
            shown.add_row(*map(Text, texts))  # an answer is no markup
            live.update(shown, refresh=True)


def _print(pieces: Iterator[str]) -> None:
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
