"""A model that says what a test wants, with a tokenizer of one character per token."""

import json
import string
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.support.fake_backend import FAKE_INFO, FakeBackend
from tuneserve_engine.backend.base import (
    SampledSequence,
    SampleProgress,
    SampleResult,
    SamplingRequest,
)
from tuneserve_engine.settings.common import TINY_MODEL

CHARACTERS = string.printable + "é°"
EOS = len(CHARACTERS)
QWEN = json.loads((TINY_MODEL / "tokenizer_config.json").read_text())["chat_template"]
"""Tools and calls as Hermes and Qwen have them, and Qwen's reasoning block."""
OPENED = QWEN + "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
"""The same, but the prompt opens the block."""
LLAMA = (
    '{% if tools %}{{ \'Respond as {"name": name, "parameters": arguments}.\' }}'
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class ScriptedBackend(FakeBackend):
    """Says ``said``; a message that is not cut by ``max_tokens`` ends with EOS.

    With ``permits``, each token of a stream needs one.
    """

    said = ""
    permits: threading.Semaphore | None = None
    prompts: list[str]

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SampleResult]:
        found = []
        for request in requests:
            self.prompts.append("".join(CHARACTERS[token] for token in request.prompt))
            text, stopped = self.said, True
            ends = [text.find(stop) + len(stop) for stop in request.stop_strings if stop in text]
            tokens = [*map(CHARACTERS.index, text[: min(ends)] if ends else text)]
            if not ends:
                tokens.append(EOS)
            if len(tokens) > request.max_tokens:
                tokens, stopped = tokens[: request.max_tokens], False
            sequence = SampledSequence(
                np.array(tokens, np.int32),
                np.full(len(tokens), -1, np.float32),
                "stop" if stopped else "length",
            )
            found.append(SampleResult((sequence,) * request.num_samples))
        return found

    def sample_until(
        self, asked: Mapping[str, SamplingRequest], should_yield: Callable[[], bool]
    ) -> SampleProgress:
        """One token of each stream a step, so that streams come in many pieces."""
        if self.permits is not None:
            assert self.permits.acquire(timeout=10)
        return super().sample_until(asked, lambda: True)


class Talk:
    """The API with such a model."""

    def __init__(self, api: Any) -> None:
        self.api = api

    @classmethod
    async def begun(cls, api: Any, folder: Path, template: str) -> "Talk":
        folder.mkdir()
        vocabulary = {letter: i for i, letter in enumerate(CHARACTERS)} | {"<eos>": EOS}
        made = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
        made.add_special_tokens(["<eos>"])
        made.save(str(folder / "tokenizer.json"))
        config = {"chat_template": template, "eos_token": "<eos>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        info = replace(
            FAKE_INFO,
            vocab_size=EOS + 1,
            context_length=4096,
            eos_token_ids=(EOS,),
            tokenizer_id=str(folder),
        )
        await api.start_worker(info=info, backend=ScriptedBackend)
        api.backend.prompts = []
        return cls(api)

    def says(self, text: str) -> None:
        """From now on the model says this."""
        self.api.backend.said = text

    @property
    def prompt(self) -> str:
        """The last prompt that the model received."""
        prompt: str = self.api.backend.prompts[-1]
        return prompt

    def openai(self) -> openai.AsyncOpenAI:
        transport = httpx2.ASGITransport(app=self.api.app)
        return openai.AsyncOpenAI(
            base_url="http://localhost/v1",
            api_key="tml-a",
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=transport),
        )

    async def post(self, path: str, body: Any, **headers: str) -> Any:
        headers = {"X-API-Key": "tml-a", **headers}
        return await self.api.http.post(path, json=body, headers=headers)
