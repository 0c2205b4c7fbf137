"""Text to tokens and back in the API process: a base model's tokenizer and chat template."""

import asyncio
import json
import logging
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tuneserve_engine.adapters import BaseModelInfo
from tuneserve_server.errors import InvalidField, ModelUnavailable

logger = logging.getLogger(__name__)

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_MOST_SHOWN = 300


class BaseText:
    """What a base model's tokenizer says. Its calls block: long texts take a while."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = folder / "tokenizer_config.json"
        self._config: dict[str, Any] = json.loads(config.read_text()) if config.exists() else {}
        source = folder / "chat_template.jinja"
        self._source = source.read_text() if source.exists() else _template_in(self._config)

    def encode(self, text: str) -> list[int]:
        """The text's tokens, and before them BOS if the tokenizer puts one there."""
        tokens: list[int] = self._tokenizer.encode(text).ids
        return tokens

    def chat(self, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        """The conversation as the chat template has it, up to where the assistant speaks.
        Raises ``InvalidField``."""
        known = {
            "messages": messages,
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            **{name: _token_text(self._config.get(name)) for name in _TOKENS},
        }
        if taken := options.keys() & known.keys():
            raise InvalidField(
                f"chat_template_kwargs sets {', '.join(sorted(taken))}, which the server sets "
                "itself; leave it out",
                "chat_template_kwargs",
            )
        try:
            text = self._template.render(**known, **options)
        except InvalidField:
            raise
        except Exception as error:  # a template is a program: it fails in any way on what we give
            raise InvalidField(
                f"the chat template of {self._name!r} cannot render these messages: "
                f"{str(error)[:_MOST_SHOWN]}; change them, or send a prompt to /v1/completions",
                "messages",
            ) from None
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    @cached_property
    def _template(self) -> Template:
        if self._source is None:
            raise InvalidField(
                f"base model {self._name!r} has no chat template; send a prompt to "
                "/v1/completions instead",
                "model",
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self._source)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, special ones left out."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def piece(self, token: int) -> str:
        """The text of one token by itself, be it special."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


class Texts:
    """The texts of base models, each loaded when it is first asked for."""

    def __init__(self) -> None:
        self._loading: dict[str, asyncio.Task[BaseText]] = {}

    async def of(self, info: BaseModelInfo) -> BaseText:
        """Raises ``ModelUnavailable``, and tries again when it is asked again."""
        task = self._loading.get(info.tokenizer_id)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(asyncio.to_thread(_load, info.name, info.tokenizer_id))
            task.add_done_callback(_noted)
            self._loading[info.tokenizer_id] = task
        return await asyncio.shield(task)


def _load(name: str, tokenizer_id: str) -> BaseText:
    try:
        return BaseText(name, _folder(tokenizer_id))
    except Exception as error:  # the hub, the disk, three formats of files
        logger.warning("the tokenizer of %s cannot be read from %s: %s", name, tokenizer_id, error)
        raise ModelUnavailable(
            f"the tokenizer of {name!r} cannot be read in the API process, which the /v1 routes "
            f"need; ask the operator to make {tokenizer_id} readable there (tokenizer.json, "
            "tokenizer_config.json), or use the tinker SDK, which sends tokens"
        ) from None


def _folder(tokenizer_id: str) -> Path:
    folder = Path(tokenizer_id)
    if folder.is_dir() or folder.is_absolute():
        return folder
    return Path(snapshot_download(tokenizer_id, allow_patterns=list(_FILES)))


def _template_in(config: dict[str, Any]) -> str | None:
    """The chat template of a tokenizer_config.json; of several, the default."""
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}.get("default")
    return found


def _token_text(token: Any) -> str | None:
    """A special token, which may be described by an object."""
    text: str | None = token.get("content") if isinstance(token, dict) else token
    return text


def _to_json(value: Any, indent: int | None = None) -> str:
    """As templates are written for: jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _noted(task: "asyncio.Task[BaseText]") -> None:
    """Looks at how it ended, lest asyncio complain when all who waited have left."""
    if not task.cancelled():
        task.exception()
