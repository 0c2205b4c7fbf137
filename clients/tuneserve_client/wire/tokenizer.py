"""The tokenizer: text to tokens and back, and conversations by the base model's chat template."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2.exceptions
import tokenizers
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tuneserve_client.data import Message

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""The files of a tokenizer, in Hugging Face's layout; only the first is required."""

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
SET_HERE = frozenset({"messages", "add_generation_prompt", "tools", "documents", *_TOKENS})
"""The names that a chat template knows without options."""


class TemplateError(ValueError):
    """The error for a missing chat template, or one that cannot render these messages."""


class NoTemplate(TemplateError): ...


_LONG = 4096  # characters, which take some milliseconds


class Tokenizer:
    """A base model's tokenizer. ``name`` appears in error messages."""

    def __init__(
        self, tokenizer: str, config: str | None = None, template: str | None = None, name: str = ""
    ) -> None:
        self.name = name
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config: dict[str, Any] = json.loads(config) if config else {}
        self._source = template if template is not None else _template_in(self._config)

    @classmethod
    def from_folder(cls, folder: Path, name: str = "") -> "Tokenizer":
        """Return the tokenizer of a model's folder in Hugging Face's layout."""
        first, *others = (folder / file for file in FILES)
        config, template = (path.read_text() if path.exists() else None for path in others)
        return cls(first.read_text(), config, template, name)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a sequence, if there is one."""
        text = _token_text(self._config.get("eos_token"))
        found: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return found

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, if there is one."""
        return self._source

    @property
    def vocab_size(self) -> int:
        size: int = self._tokenizer.get_vocab_size()
        return size

    @cached_property
    def longest_token(self) -> int:
        """The number of characters of the longest token.

        A text of more than n times as many characters has more than n tokens. This holds for tokens
        that stand for bytes too: they have a character for each byte, and no text has more
        characters than bytes.
        """
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of the text.

        With ``special``, BOS comes first if the tokenizer puts one there. Raises ``ValueError`` for
        a text that is not Unicode, or that makes the tokenizer give up. Other threads run during a
        long call.
        """
        call = self._tokenizer.encode if len(text) < _LONG else self._encode_apart
        tokens: list[int] = _encoded(call, text, special).ids
        return tokens

    def _encode_apart(self, text: str, *, add_special_tokens: bool) -> Any:
        """Encode with the call for several texts: no other lets other threads run meanwhile."""
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of the text, and the start and end of each in the text."""
        encoded = _encoded(self._tokenizer.encode, text, special=False)
        return encoded.ids, encoded.offsets

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of the tokens; special tokens are left out if ``skip_special``."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
        return text

    def apply_chat_template(
        self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Return the conversation's tokens, by default up to where the assistant speaks next."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt, **options)
        return self.encode(text, special=False)

    def render(
        self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """Return the conversation as text.

        ``options`` are further names for the template. Raises ``TemplateError`` if the template is
        missing or cannot render the messages.
        """
        known = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            **{name: _token_text(self._config.get(name)) for name in _TOKENS},
        }
        try:
            return self._template.render(**{**known, **options})
        except NoTemplate:
            raise
        except Exception as error:  # a template is a program, and may raise anything
            raise TemplateError(str(error)) from None

    @cached_property
    def _template(self) -> Template:
        if self._source is None:
            raise NoTemplate(f"base model {self.name!r} has no chat template; send text")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self._source)


def _encoded(call: Callable[..., Any], text: str, special: bool) -> Any:
    try:
        return call(text, add_special_tokens=special)
    except TypeError:
        if not isinstance(text, str):
            raise
        raise ValueError(
            "the text has half of a surrogate pair (\\ud800 to \\udfff), which tokenizers do not "
            "accept; correct or remove it"
        ) from None
    except BaseException as error:
        # A panic inside the library is not an Exception, and its class cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"the tokenizer gave up on this text of {len(text)} characters ({str(error)[:100]}); "
            "long runs of one character, for example of spaces, cause this; shorten them"
        ) from None


def _template_in(config: dict[str, Any]) -> str | None:
    """Return the chat template of a tokenizer_config.json; the default if there are several."""
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}.get("default")
    return found


def _token_text(token: Any) -> str | None:
    """Return the text of a special token, which an object may describe."""
    text: str | None = token.get("content") if isinstance(token, dict) else token
    return text


def _to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON as templates expect it: jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)
