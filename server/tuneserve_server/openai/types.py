"""The bodies of the OpenAI-compatible routes, with the fields that are supported.

The other fields of a request are in ``model_extra``, and ``openai.requests`` decides about them.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from tuneserve_client.wire.body import Request


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
