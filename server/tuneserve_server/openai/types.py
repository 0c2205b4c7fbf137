"""The bodies of the OpenAI-compatible routes, with the fields that are supported.

The other fields of a request are in ``model_extra``, and ``openai.requests`` decides about them.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from tuneserve_client.wire.body import Request

_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def _by_id(value: object) -> object:
    """Convert the keys of a JSON object to token ids."""
    if not isinstance(value, dict):
        return value
    if not all(isinstance(key, str) and _TOKEN_ID.fullmatch(key) for key in value):
        # Checked here: pydantic's own error would name the entry, whose key is the client's.
        raise ValueError('each key must be a token id in decimal digits, such as "42"')
    return {int(key): bias for key, bias in value.items()}


class StreamOptions(Request):
    include_usage: bool = False


class GenerationRequest(Request):
    """The fields that completions and chat completions share; null means the default."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    n: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_by_id)] = Field(
        default=None, description="Numbers to add to the logits of tokens, by token id."
    )
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: dict[str, Any] | None = Field(
        default=None, description="Any text, any JSON object, or JSON of a schema."
    )
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="As in vLLM: a schema, a regular expression, or choices."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(GenerationRequest):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | bool | None = Field(
        default=None,
        description="The number of alternatives per token; `true` means 1, and `false` means no "
        "logprobs.",
    )
    echo: bool | None = Field(
        default=None, description="Whether the answer begins with the prompt."
    )
    best_of: int | None = Field(
        default=None, description="The number of samples, of which the `n` likeliest are returned."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Whether logprobs name each token as `token_id:<id>`."
    )


class TextPart(Request):
    type: Literal["text"]
    text: str


class ChatMessage(Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ModelEntry(BaseModel):
    """A base model or a checkpoint; ``parent`` is a checkpoint's base model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tuneserve"
    parent: str | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelEntry]
