"""Conversations with a sampler, as ``tuneserve chat`` holds them."""

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneserve_client import Sampler, TuneserveError
from tuneserve_client.data import Message

HELP = """\
/set                      show the system message and the sampling options
/set system TEXT          set the system message
/set temperature VALUE    set the sampling temperature; 0 gives the likeliest answer
/set max_tokens COUNT     set the longest answer in tokens
/set seed NUMBER          set the seed of the samples; none: a new one for each answer
/clear                    forget the turns so far
/save FILE                append the conversation to a file of rows for tuneserve train
/help                     show the commands
/exit                     end the conversation, as Ctrl-D does
Alt-Enter begins a new line. Ctrl-C stops an answer."""


class BadCommand(Exception):
    """The error for a command of a conversation that cannot be carried out."""


@dataclass
class ChatOptions:
    """The system message and the sampling options of a conversation."""

    temperature: float = 0.7
    max_tokens: int = 512
    seed: int | None = None
    system: str | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": self.seed}

    def change(self, name: str, text: str) -> None:
        """Change one option. Raises ``BadCommand`` for a name or a value that does not exist."""
        if name == "system":
            self.system = text or None
            return
        if name not in _VALUES:
            known = ", ".join(["system", *_VALUES])
            raise BadCommand(f"{name!r} is not an option; the options are {known}")
        read, wanted = _VALUES[name]
        try:
            setattr(self, name, read(text))
        except ValueError:
            raise BadCommand(f"{name} is {text!r}; it must be {wanted}") from None


def _at_least(read: Callable[[str], float], least: float) -> Callable[[str], float]:
    def value(text: str) -> float:
        found = read(text)
        if not least <= found < float("inf"):
            raise ValueError
        return found

    return value


_VALUES: dict[str, tuple[Callable[[str], float | None], str]] = {
    "temperature": (_at_least(float, 0), "a number from 0 on"),
    "max_tokens": (_at_least(int, 1), "a whole number from 1 on"),
    "seed": (lambda text: None if text == "none" else int(text), "a whole number, or none"),
}


@dataclass
class Conversation:
    """A conversation; each turn is sent with the turns before it."""

    sampler: Sampler
    options: ChatOptions
    turns: list[Message] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.sampler.path or self.sampler.base_model

    @property
    def messages(self) -> list[Message]:
        """The turns so far, after the system message if there is one."""
        system = self.options.system
        return [*([] if system is None else [_message("system", system)]), *self.turns]

    def answer(self, text: str) -> Generator[str, None, None]:
        """Yield the pieces of the answer.

        The conversation keeps the received part of an interrupted answer. It drops a failed answer
        together with its question.
        """
        asked = _message("user", text)
        pieces: list[str] = []
        try:
            for piece in self.sampler.stream([*self.messages, asked], **self.options.sampling):
                pieces.append(piece)
                yield piece
        except TuneserveError:
            pieces.clear()
            raise
        finally:
            if pieces:
                self.turns += [asked, _message("assistant", "".join(pieces))]

    def save(self, path: Path) -> None:
        """Append the conversation to a file of rows, each on a line.

        Raises ``BadCommand`` if there is nothing to save or no file can be written.
        """
        if not self.turns:
            raise BadCommand("there are no turns to save yet")
        try:
            with path.open("a", encoding="utf-8") as file:
                print(json.dumps({"messages": self.messages}, ensure_ascii=False), file=file)
        except OSError as error:
            raise BadCommand(f"{path} cannot be written: {error.strerror}") from None


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def run_command(line: str, talks: list[Conversation]) -> str:
    """Carry out a line that begins with ``/`` and return the text to show.

    ``talks`` are the conversations that take each turn, the saved one first; they share their
    options. Raises ``BadCommand`` with the reason, and ``EOFError`` at the end.
    """
    name, _, rest = line.partition(" ")
    options = talks[0].options
    match name, rest.strip():
        case "/help", _:
            return HELP
        case "/exit" | "/quit" | "/bye", _:
            raise EOFError
        case "/clear", _:
            for each in talks:
                each.turns.clear()
            return "the conversation begins anew"
        case "/set", "":
            return "\n".join(f"{each} = {value}" for each, value in vars(options).items())
        case "/set", given:
            option, _, value = given.partition(" ")
            options.change(option, value.strip())
            return f"{option} = {getattr(options, option)}"
        case "/save", "":
            raise BadCommand("/save needs the name of a file")
        case "/save", file:
            talks[0].save(Path(file).expanduser())
            return f"appended to {file}"
    raise BadCommand(f"{name} is not a command; /help lists them")
