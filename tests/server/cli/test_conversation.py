"""The turns, options and commands of a conversation."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuneserve_client import RequestFailed
from tuneserve_server.cli.conversation import (
    HELP,
    BadCommand,
    ChatOptions,
    Conversation,
    run_command,
)


class Parrot(SimpleNamespace):
    """A sampler that repeats the last message word by word, and remembers the requests."""

    def stream(self, messages: list[dict[str, str]], **options: Any) -> Iterator[str]:
        self.asked.append((messages, options))
        for word in messages[-1]["content"].split():
            if word == "fail":
                raise RequestFailed("the worker is gone", category="server")
            yield f"{word} "


def conversation(options: ChatOptions | None = None) -> Conversation:
    sampler: Any = Parrot(path="tinker://a/weights/b", base_model="base", asked=[])
    return Conversation(sampler, options or ChatOptions())


def say(talk: Conversation, text: str) -> str:
    return "".join(talk.answer(text))


def asked_of(talk: Conversation) -> list[Any]:
    sampler: Any = talk.sampler
    found: list[Any] = sampler.asked
    return found


def test_each_turn_is_sent_with_the_turns_before_it() -> None:
    talk = conversation()
    say(talk, "one")
    say(talk, "two")
    messages, _ = asked_of(talk)[-1]
    assert [each["content"] for each in messages] == ["one", "one ", "two"]
    assert [each["role"] for each in messages] == ["user", "assistant", "user"]


def test_a_failed_answer_is_dropped_and_an_interrupted_one_is_kept() -> None:
    talk = conversation()
    with pytest.raises(RequestFailed):
        say(talk, "it will fail")
    assert talk.turns == []
    pieces = talk.answer("some words")
    next(pieces)
    pieces.close()
    assert [each["content"] for each in talk.turns] == ["some words", "some "]


def test_options_change_the_next_turn() -> None:
    talk = conversation()
    for line in (
        "/set temperature 0.5",
        "/set seed 7",
        "/set system Be brief.",
        "/set max_tokens 9",
    ):
        run_command(line, [talk])
    say(talk, "hi")
    messages, options = asked_of(talk)[-1]
    assert options == {"temperature": 0.5, "max_tokens": 9, "seed": 7}
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert run_command("/set seed none", [talk]) == "seed = None"
    shown = run_command("/set", [talk])
    assert shown.splitlines() == [
        "temperature = 0.5",
        "max_tokens = 9",
        "seed = None",
        "system = Be brief.",
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("/set temperature hot", "temperature is 'hot'; it must be a number from 0 on"),
        ("/set temperature -1", "it must be a number from 0 on"),
        ("/set temperature nan", "it must be a number from 0 on"),
        ("/set max_tokens 0", "it must be a whole number from 1 on"),
        ("/set seed x", "it must be a whole number, or none"),
        ("/set heat 1", "'heat' is not an option; the options are system, temperature"),
        ("/sett", "/sett is not a command; /help lists them"),
        ("/save", "/save needs the name of a file"),
        ("/save talk.jsonl", "there are no turns to save yet"),
    ],
)
def test_a_wrong_command_is_refused_with_a_way_out(line: str, reason: str) -> None:
    talk = conversation()
    with pytest.raises(BadCommand, match=re.escape(reason)):
        run_command(line, [talk])
    assert talk.options == ChatOptions()


def test_the_help_names_every_command_and_exit_ends() -> None:
    talk = conversation()
    assert run_command("/help", [talk]) == HELP
    for name in ("/set", "/clear", "/save", "/help", "/exit"):
        assert f"{name} " in HELP
    with pytest.raises(EOFError):
        run_command("/exit", [talk])


def test_conversations_that_are_compared_are_cleared_together() -> None:
    options = ChatOptions()
    talks = [conversation(options), conversation(options)]
    for talk in talks:
        say(talk, "hi")
    run_command("/clear", talks)
    assert [talk.turns for talk in talks] == [[], []]


def test_a_saved_conversation_is_a_row_for_training(tmp_path: Path) -> None:
    talk = conversation(ChatOptions(system="Be kind."))
    say(talk, "größe")
    file = tmp_path / "talk.jsonl"
    for _ in range(2):
        assert run_command(f"/save {file}", [talk]) == f"appended to {file}"
    first, second = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert first == second
    assert [each["role"] for each in first["messages"]] == ["system", "user", "assistant"]
    assert "größe" in file.read_text(encoding="utf-8")
    with pytest.raises(BadCommand, match="cannot be written: No such file"):
        run_command(f"/save {tmp_path}/none/talk.jsonl", [talk])
