"""The base models' tokenizers and chat templates in the API process: text to tokens and back."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tuneserve_client.wire.tokenizer import FILES, SET_HERE, NoTemplate, TemplateError, Tokenizer
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_server.errors import InvalidField, ModelUnavailable
from tuneserve_server.http.incoming import finished
from tuneserve_server.http.shares import Limit, Shares

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHARACTER_BYTES = 200
"""The memory in bytes that encoding takes per character of a text; 150 was measured."""

_MOST_SHOWN = 300
_THREADS = 4
_FREE_BYTES = 2**20  # a text that takes up to this much never waits for memory


class BaseText:
    """The tokenizer and chat template of a base model. Calls block: long texts take a while."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self._name = name
        self._tokenizer = Tokenizer.from_folder(folder, name)
        self._longest_token = self._tokenizer.longest_token  # computed once, because it is slow

    def most_characters(self, tokens: int) -> int:
        """Return the character count above which any text has more than ``tokens`` tokens."""
        return tokens * self._longest_token

    def encode(self, text: str) -> list[int]:
        """Return the text's tokens, after BOS if the tokenizer adds it. Raises ``InvalidField``."""
        return self._encoded("prompt", self._tokenizer.encode, text)

    def _encoded(self, field: str, encode: Callable[[str], list[int]], text: str) -> list[int]:
        try:
            return encode(text)
        except ValueError as error:
            raise InvalidField(f"{field}: {error}", field) from None

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, if there is one."""
        return self._tokenizer.chat_template

    def chat(
        self, messages: Sequence[dict[str, Any]], options: dict[str, Any], most: int | None = None
    ) -> list[int]:
        """Return the tokens of the conversation in the chat template, up to the assistant's turn.

        Raises ``InvalidField``, also if the template renders more than ``most`` characters.
        """
        return self.encode_rendered(self.render(messages, options, most))

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        options: dict[str, Any],
        most: int | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """Return the conversation in the chat template, up to the assistant's turn.

        Raises ``InvalidField`` as ``chat`` does.
        """
        if taken := options.keys() & SET_HERE:
            raise InvalidField(
                f"chat_template_kwargs sets {', '.join(sorted(taken))}, which only the server may "
                "set; leave it out",
                "chat_template_kwargs",
            )
        try:
            text = self._tokenizer.render(messages, tools=tools, **options)
        except NoTemplate:
            raise InvalidField(
                f"base model {self._name!r} has no chat template; send a prompt to "
                "/v1/completions instead",
                "model",
            ) from None
        except TemplateError as error:
            raise InvalidField(
                f"the chat template of {self._name!r} cannot render these messages: "
                f"{str(error)[:_MOST_SHOWN]}; change them, or send a prompt to /v1/completions",
                "messages",
            ) from None
        if most is not None and len(text) > most:
            raise InvalidField(
                f"messages have {len(text)} characters in the chat template; the context holds no "
                f"more than {most}; leave some out",
                "messages",
            )
        return text

    def encode_rendered(self, text: str) -> list[int]:
        """Return the tokens of a text from the chat template. Raises ``InvalidField``."""
        return self._encoded("messages", partial(self._tokenizer.encode, special=False), text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens without the special tokens."""
        return self._tokenizer.decode(tokens)

    def piece(self, token: int) -> str:
        """Return the text of one token by itself, even if the token is special."""
        return self._tokenizer.decode([token], skip_special=False)


class TokenizerPool:
    """The tokenizers of base models, each loaded on first use, and the encoding of texts.

    Encoding runs in a separate thread pool, within ``memory_bytes``; a tenant may have half.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._loading: dict[str, asyncio.Task[BaseText]] = {}
        total, half = (Limit(n, "text_memory_bytes") for n in (memory_bytes, memory_bytes // 2))
        self.memory = Shares("tokenizing text", total=total, of_tenant=half)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokens")

    def stop(self) -> None:
        self._threads.shutdown(wait=False)

    @property
    def most_characters(self) -> int:
        """The most characters of one text, for any context length."""
        return self.memory.most // CHARACTER_BYTES

    async def tokens(self, tenant: str, characters: int, call: Callable[[], T]) -> T:
        """Run ``call``, which encodes, in a thread; its longest text has ``characters``.

        Raises ``TooManyRequests`` if the memory for the text is not free in time.
        """
        size = characters * CHARACTER_BYTES
        loop = asyncio.get_running_loop()
        async with self.memory.taken(tenant, size) if size > _FREE_BYTES else nullcontext():
            return await finished(loop.run_in_executor(self._threads, call))

    async def load_base_text(self, info: BaseModelInfo) -> BaseText:
        """Return the base model's tokenizer, loading it on first use.

        Raises ``ModelUnavailable``; the next call tries again.
        """
        task = self._loading.get(info.tokenizer_id)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(asyncio.to_thread(_load, info))
            task.add_done_callback(_noted)
            self._loading[info.tokenizer_id] = task
        return await asyncio.shield(task)


def _load(info: BaseModelInfo) -> BaseText:
    name, tokenizer_id = info.name, info.tokenizer_id
    try:
        return BaseText(name, _folder(tokenizer_id, info.revision or None))
    except Exception as error:  # the hub, the disk, three formats of files
        logger.warning("the tokenizer of %s cannot be read from %s: %s", name, tokenizer_id, error)
        raise ModelUnavailable(
            f"the API process cannot read the tokenizer of {name!r}, which the /v1 routes and "
            f"/api/v1/tokenizer need; ask the operator to make {tokenizer_id} readable there "
            "(tokenizer.json, tokenizer_config.json), or send tokens through an SDK"
        ) from None


def _folder(tokenizer_id: str, revision: str | None) -> Path:
    folder = Path(tokenizer_id)
    if folder.is_dir() or folder.is_absolute():
        return folder
    from huggingface_hub import snapshot_download  # slow to import

    return Path(snapshot_download(tokenizer_id, revision=revision, allow_patterns=list(FILES)))


def _noted(task: "asyncio.Task[BaseText]") -> None:
    """Retrieve the task's exception, so that asyncio does not complain if every caller left."""
    if not task.cancelled():
        task.exception()
