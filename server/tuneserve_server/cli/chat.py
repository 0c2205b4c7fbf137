"""``tuneserve chat``: a conversation with a base model or any checkpoint."""

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

from tuneserve_client import RequestFailed, Sampler, TuneserveError
from tuneserve_client.data import Message
from tuneserve_server.cli.options import HERE, PATIENT_S, ApiKey, AsJson, Url, connected
from tuneserve_server.cli.output import print_json_line
from tuneserve_server.cli.resolve import checkpoint_or_base_model


def chat(  # noqa: PLR0913 - options
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATH|BASE_MODEL]",
            help="Checkpoint (path, run name, start of the id, or last) or base model. Default: "
            "the only base model.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Send this prompt, print the answer and exit.", metavar="TEXT"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.", metavar="TEXT")] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 gives the likeliest answer.")
    ] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 512,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the samples, for reproducible answers.")
    ] = None,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Talk to a checkpoint or a base model. Without a terminal, each input line is a turn."""
    is_live = prompt is None and sys.stdin.isatty() and not as_json
    with connected(url, api_key, deadline_s=PATIENT_S, name="chat") as client:
        options = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        chosen = None if what is None else checkpoint_or_base_model(client, what)
        talk = _Talk(client.sampler(chosen), options, system)
        if is_live:
            keys = "Ctrl-C stops an answer, Ctrl-D ends the conversation"
            typer.echo(f"{talk.name}: {keys}", err=True)
        for said in [prompt] if prompt is not None else _lines(is_live):
            if as_json:
                print_json_line({"prompt": said, "answer": "".join(talk.answer(said))})
            elif is_live:
                _answer_live(talk, said)
            else:
                _print(talk.answer(said))


class _Talk:
    """A conversation; each turn is sent with the turns before it."""

    def __init__(self, sampler: Sampler, options: dict[str, Any], system: str | None) -> None:
        self.name = sampler.path or sampler.base_model
        self._sampler = sampler
        self._options = options
        self._said: list[Message] = []
        if system is not None:
            self._said.append({"role": "system", "content": system})

    def answer(self, text: str) -> Iterator[str]:
        """Yield the pieces of the answer.

        The conversation keeps the received part of an interrupted answer. It drops a failed answer
        together with its question.
        """
        asked: Message = {"role": "user", "content": text}
        pieces: list[str] = []
        try:
            for piece in self._sampler.stream([*self._said, asked], **self._options):
                pieces.append(piece)
                yield piece
        except TuneserveError:
            pieces.clear()
            raise
        finally:
            if pieces:
                self._said += [asked, {"role": "assistant", "content": "".join(pieces)}]


def _lines(is_live: bool) -> Iterator[str]:
    """Yield the lines that are typed or read, except empty ones."""
    if not is_live:
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    console = Console()
    while True:
        try:
            said = console.input("[bold cyan]>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if said:
            yield said


def _answer_live(talk: _Talk, said: str) -> None:
    """Print an answer; a failed or interrupted answer does not end the conversation."""
    pieces = talk.answer(said)
    try:
        _print(pieces)
    except KeyboardInterrupt:
        typer.echo(" …")
    except RequestFailed as error:
        typer.echo(f"tuneserve: {error}", err=True)


def _print(pieces: Iterator[str]) -> None:
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
