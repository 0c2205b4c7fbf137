"""Forms of a row, recognized by its keys: each becomes a conversation, a text or two texts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuneserve_client.data import Encoder, Message

SHAPES = (
    'an object with "messages", with "prompt" and "completion", with "instruction" and "output", '
    'with "conversations", or with "text"'
)
_EMPTY: Sequence[Any] = (None, "", [], {})
_MAPPED = "rename columns with --map, for example --map prompt=question,completion=answer"
_SHAREGPT = {"human": "user", "gpt": "assistant"}
_BESIDE_MESSAGES = {"system", "tools"}
"""The columns that every form with messages reads beside its own."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Row:
    place: str
    messages: Sequence[Message] = ()
    learn_from: int = 0
    """The index of the first message to train on."""
    tools: Sequence[Any] | None = None
    prompt: str = ""
    completion: str = ""
    text: str | None = None
    keys: str = ""
    """The keys that the row was found with, for errors about it."""
    unused: Sequence[str] = ()
    """The columns with a value that the form does not read."""

    @property
    def content(self) -> str:
        """A text that is the same for copies of a row, and only for these."""
        return repr(replace(self, place="", keys="", unused=()))

    @property
    def is_answer_empty(self) -> bool:
        if self.text is not None:
            return not self.text.strip()
        if not self.messages:
            return not self.completion.strip()
        return any(
            each["role"] == "assistant" and not each["content"].strip() and "tool_calls" not in each
            for each in self.messages[max(self.learn_from, 1) :]
        )


def row_from(place: str, value: Any, renamed: Mapping[str, str]) -> Row:
    """Return the row of a value whose columns are ``renamed``. Raises ``ValueError``."""
    if not isinstance(value, dict):
        raise ValueError(f"it is {type(value).__name__}; it must be {SHAPES}")
    keys = ", ".join(f'"{name}"' for name in value) or "none"
    try:
        return replace(_recognized(place, value, keys, renamed), keys=keys)
    except ValueError as error:
        raise with_keys(error, keys) from None


def with_keys(error: ValueError, keys: str) -> ValueError:
    """Return the error of a row with the row's keys, unless it names keys already."""
    return error if "keys are" in str(error) else ValueError(f"{error}; its keys are {keys}")


def _recognized(place: str, value: Mapping[str, Any], keys: str, renamed: Mapping[str, str]) -> Row:
    if missing := [old for old in renamed.values() if old not in value]:
        raise ValueError(
            f'there is no "{missing[0]}", which --map names; its keys are {keys}; correct --map'
        )
    others = {name: each for name, each in value.items() if name not in renamed.values()}
    value = {**others, **{new: value[old] for new, old in renamed.items()}}
    row, used = _form(place, value, keys)
    if row.messages:
        row = _with_system(replace(row, tools=_tools(value)), value.get("system"))
    unused = [name for name, each in value.items() if name not in used and each not in _EMPTY]
    return replace(row, unused=[renamed.get(name, name) for name in unused])


def _form(place: str, value: Mapping[str, Any], keys: str) -> tuple[Row, set[str]]:
    """Return the row without what is beside its messages, and the names that its form reads."""
    # Datasets fill the columns that a row lacks with None.
    has = {name for name, each in value.items() if each is not None}
    if "messages" in has:
        said = _messages(value["messages"], "messages")
        return Row(place, messages=said), {"messages"} | _BESIDE_MESSAGES
    if "conversations" in has:
        said = _messages(_from_sharegpt(value["conversations"]), "conversations")
        return Row(place, messages=said), {"conversations"} | _BESIDE_MESSAGES
    if {"prompt", "completion"} & has:
        row = _completion(place, value, keys)
        return row, {"prompt", "completion"} | (_BESIDE_MESSAGES if row.messages else set())
    if {"instruction", "output"} & has:
        used = {"instruction", "input", "output", "history"} | _BESIDE_MESSAGES
        return _instruction(place, value, keys), used
    if "text" in has:
        return Row(place, text=_text(value, "text", keys)), {"text"}
    raise ValueError(f"its keys are {keys}; it must be {SHAPES}; {_MAPPED}")


def _tools(value: Mapping[str, Any]) -> Sequence[Any] | None:
    tools = _listed(value.get("tools")) or None
    if tools is not None and not isinstance(tools, list):
        raise ValueError('"tools" is not a list; make it a list of tools, or leave it out')
    return tools


def _with_system(row: Row, system: Any) -> Row:
    """Return the row with the system prompt of its own column as the first message."""
    if system is None or system == "":
        return row
    if not isinstance(system, str):
        raise ValueError('"system" is not a string; make it the system prompt, or leave it out')
    first = row.messages[0]
    if first["role"] != "system":
        messages = [{"role": "system", "content": system}, *row.messages]
        return replace(row, messages=messages, learn_from=row.learn_from and row.learn_from + 1)
    if first["content"] != system:
        raise ValueError('"system" differs from the first message, a system prompt; leave one out')
    return row


def known_roles(tokenizer: Encoder) -> list[str]:
    """Return the roles of messages that the chat template renders."""
    mark = "tuneserve-probe"
    first = {"role": "user", "content": "a"}

    def is_rendered(role: str) -> bool:
        probe = {"role": role, "content": mark}
        for messages in ([probe], [first, probe], [first, {**first, "role": "assistant"}, probe]):
            try:
                if mark in tokenizer.render(messages, add_generation_prompt=False):
                    return True
            except ValueError:
                continue
        return False

    return [role for role in _ROLES if is_rendered(role)]


def check_roles(row: Row, roles: Iterable[str]) -> None:
    """Raise ``ValueError`` for a message whose role the chat template does not know."""
    for number, message in enumerate(row.messages, 1):
        if message["role"] not in roles:
            raise ValueError(
                f'message {number} has the role "{message["role"]}"; the chat template knows '
                f"{', '.join(roles)}; rename the role"
            )


def _text(value: Mapping[str, Any], name: str, keys: str) -> str:
    if isinstance(value.get(name), str):
        return str(value[name])
    problem = f'"{name}" is not a string' if name in value else f'there is no "{name}"'
    raise ValueError(f"{problem}; its keys are {keys}; it must be {SHAPES}; {_MAPPED}")


def _completion(place: str, value: Mapping[str, Any], keys: str) -> Row:
    if isinstance(value.get("prompt"), list) and isinstance(value.get("completion"), list):
        asked, answered = value["prompt"], value["completion"]
        said = _messages([*asked, *answered], "prompt and completion", len(asked))
        return Row(place, messages=said, learn_from=len(asked))
    prompt, completion = (_text(value, name, keys) for name in ("prompt", "completion"))
    return Row(place, prompt=prompt, completion=completion)


def _instruction(place: str, value: Mapping[str, Any], keys: str) -> Row:
    asked, answer = (_text(value, name, keys) for name in ("instruction", "output"))
    more = _text(value, "input", keys) if value.get("input") is not None else ""
    turns = [*_history(value.get("history")), (f"{asked}\n\n{more}" if more else asked, answer)]
    roles = ("user", "assistant")
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(roles, turn, strict=True)
    ]
    return Row(place, messages=messages)


def _history(value: Any) -> Sequence[Sequence[str]]:
    """Return the earlier turns of an instruction: pairs of a question and its answer."""
    turns = _listed(value) or []
    if not isinstance(turns, list) or not all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(each, str) for each in turn)
        for turn in turns
    ):
        raise ValueError(
            '"history" is not a list of pairs of strings; give a question and an answer per turn'
        )
    return turns


def _from_sharegpt(turns: Any) -> Any:
    if not isinstance(turns, list):
        return turns
    for number, turn in enumerate(turns, 1):
        if not (isinstance(turn, dict) and isinstance(turn.get("from"), str) and "value" in turn):
            found = ", ".join(f'"{name}"' for name in turn) if isinstance(turn, dict) else "none"
            raise ValueError(
                f'turn {number} of "conversations" needs "from" and "value"; its keys are {found}; '
                "add the missing one"
            )
    return [
        {"role": _SHAREGPT.get(turn["from"], turn["from"]), "content": turn["value"]}
        for turn in turns
    ]


def _messages(value: Any, name: str, learn_from: int = 0) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError(f'"{name}" is not a list; it must be a list of messages, one per turn')
    said = [_message(number, message) for number, message in enumerate(value, 1)]
    if not any(message["role"] == "assistant" for message in said[learn_from:]):
        raise ValueError('there is no message with the role "assistant" to train on; add an answer')
    if not any(message["role"] == "assistant" for message in said[1:]):
        raise ValueError(
            f'the only message of the assistant opens "{name}", so it answers nothing; put the '
            "message that it answers before it"
        )
    return said


def _message(number: int, message: Any) -> Message:
    if isinstance(message, dict) and isinstance(message.get("role"), str):
        # Datasets fill the keys that a message lacks with None.
        kept = {k: v for k, v in message.items() if v is not None}
        if kept.get("tool_calls"):
            kept["tool_calls"] = _tool_calls(number, kept["tool_calls"])
        content = kept.get("content")
        if isinstance(content, str):
            return kept
        if content is None and kept.get("tool_calls") and message["role"] == "assistant":
            return {**kept, "content": ""}
        if isinstance(content, list):
            return {**kept, "content": "".join(_part(number, part) for part in content)}
    keys = list(message) if isinstance(message, dict) else []
    found = ", ".join(f'"{name}"' for name in keys) or "none"
    way_out = (
        "rename the column with --map conversations=messages"
        if {"from", "value"} <= set(keys)
        else "correct the message"
    )
    raise ValueError(
        f'message {number} needs a string as "role" and one as "content"; its keys are {found}; '
        f"{way_out}"
    )


def _listed(value: Any) -> Any:
    """Return the list that a string has as JSON; any other value as it is."""
    parsed = _json_in(value)
    return parsed if isinstance(parsed, list) else value


def _json_in(value: Any) -> Any:
    """Return the JSON value that a string has, or None."""
    try:
        return json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        return None


def _tool_calls(number: int, calls: Any) -> list[Any]:
    """Return the calls with objects as arguments, as chat templates expect them.

    In OpenAI's form, the arguments are a string with the object as JSON.
    """
    found = _listed(calls)
    if not isinstance(found, list) or not all(isinstance(call, dict) for call in found):
        raise ValueError(
            f'"tool_calls" of message {number} is not a list of objects; correct the message'
        )
    return [
        {**call, "function": _with_arguments(number, call["function"])}
        if isinstance(call.get("function"), dict)
        else _with_arguments(number, call)
        for call in found
    ]


def _with_arguments(number: int, function: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(function.get("arguments"), str):
        return function
    arguments = _json_in(function["arguments"] or "{}")  # as in the chats of the server
    if not isinstance(arguments, dict):
        raise ValueError(
            f'message {number} has a tool call whose "arguments" are no JSON object; write them '
            'as one, such as {"city": "Paris"}'
        )
    return {**function, "arguments": arguments}


def _part(number: int, part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(
        f"message {number} has a part {kind!r}; only text parts can be trained on; leave it out"
    )
