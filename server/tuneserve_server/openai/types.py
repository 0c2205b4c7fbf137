"""The bodies of the OpenAI-compatible routes, with the fields that are supported.

The other fields of a request are in ``model_extra``, and ``openai.requests`` decides about them.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from tuneserve_client.wire.body import Request

_TOKEN_ID = re.compile(r"[0-9]{1,10}")


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


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


_MEDIA = {
    "audio": "audio",
    "document": "a document",
    "file": "a file",
    "image": "an image",
    "image_url": "an image",
    "input_audio": "audio",
    "input_file": "a file",
    "input_image": "an image",
    "video_url": "a video",
}


def media(kind: object) -> str:
    """Return in words what a part of content is that is not text."""
    return _MEDIA.get(kind, "of a kind that is not known") if isinstance(kind, str) else "no part"


def _only_text(value: object) -> object:
    """Refuse parts that are not text, in words that do not repeat them."""
    for index, part in enumerate(value if isinstance(value, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(
                f"part {index} is {media(kind)}; the models of this server read text only, so send "
                "parts of the type text"
            )
    return value


class ContentPart(Request):
    type: Literal["text"]
    text: str


class CalledFunction(Request):
    name: ToolName
    arguments: str = Field(description="A JSON object, as text.")


class MessageToolCall(Request):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Request):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[ContentPart] | None, BeforeValidator(_only_text)] = None
    name: str | None = None
    reasoning_content: str | None = Field(
        default=None, description="The reasoning of an earlier answer."
    )
    reasoning: str | None = Field(default=None, description="The same as `reasoning_content`.")
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = Field(
        default=None, description="The call that a message of the role `tool` answers."
    )


class FunctionSpec(Request):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="A JSON schema of the arguments, which the template shows."
    )
    strict: bool | None = Field(default=None, description="`true` is refused.")


class FunctionTool(Request):
    type: Literal["function"]
    function: FunctionSpec


class FunctionName(Request):
    name: ToolName


class NamedToolChoice(Request):
    type: Literal["function"]
    function: FunctionName


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = Field(
        default=None, description="With `false`, an answer ends after its first call."
    )
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = Field(
        default=None, description="With `false`, a reasoning block stays in the text."
    )


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
