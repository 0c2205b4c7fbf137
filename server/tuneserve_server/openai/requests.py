"""The conversion of OpenAI's request bodies into the commands that samplers run.

A field that would change the answer and is not supported is refused with ``InvalidField``, never
ignored.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast

from tuneserve_client.wire.body import Request
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.errors import UserError, shown_number
from tuneserve_engine.core.jobs import SampleCommand
from tuneserve_engine.core.misspelt import meant
from tuneserve_engine.core.sampling_options import (
    bounded,
    check_biased_tokens,
    check_sampling_options,
)
from tuneserve_server.base_model_text import BaseText
from tuneserve_server.commands.common import checked_seed
from tuneserve_server.commands.sampling import checked_prompt, checked_stops
from tuneserve_server.errors import InvalidField, Malformed
from tuneserve_server.http import body
from tuneserve_server.openai import response_format
from tuneserve_server.openai.types import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)

G = TypeVar("G", bound=GenerationRequest)

MAX_PROMPTS = 128
MAX_LOGPROBS = 5
MAX_TOP_LOGPROBS = 20
_DEFAULT_TOKENS = 16  # of a completion, as at OpenAI

_HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "best_of": (1,),  # in chats; completions support it
    "echo": (False,),  # in chats; completions support it
    "function_call": ("none", "auto"),
    "functions": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
"""The fields that are not supported, with the values at which they ask for nothing.

These are OpenAI's fields, and those that vLLM's clients send with their defaults.
"""


@dataclass(frozen=True)
class Scoring:
    """The logprobs of an answer: whether it has any, and the alternatives at each position."""

    wanted: bool
    top: int


class Echo(Enum):
    """The part of a completion that is the prompt."""

    NONE = "none"
    BEFORE = "before"  # the sampled text follows the prompt
    ALONE = "alone"  # nothing follows: the request asks only for the prompt's logprobs


def parse(body_type: type[G], raw: bytes) -> G:
    """Return the parsed body. Raises ``InvalidField`` for a field that cannot be carried out."""
    try:
        request = body.parse(body_type, raw, notices_unknown=False)
    except Malformed as error:
        raise named(body_type, str(error)) from None
    check_rest(request, "", best_of=request.n or 1)
    if isinstance(request, ChatCompletionRequest):
        for index, message in enumerate(request.messages):
            check_rest(message, f"messages[{index}].")
        for index, tool in enumerate(request.tools or []):
            check_rest(tool, f"tools[{index}].")
            check_rest(tool.function, f"tools[{index}].function.")
    return request


def named(body_type: type[Request], problem: str) -> InvalidField:
    """Return the problem as an ``InvalidField`` that names the field it begins with."""
    name = re.match(r"\w*", problem)
    found = name is not None and name[0] in body_type.model_fields
    return InvalidField(problem, name[0] if found and name else None)


def check_rest(
    part: Request,
    where: str,
    harmless: frozenset[str] = _HARMLESS,
    unsupported: Mapping[str, tuple[Any, ...]] = _NEUTRAL,
    **neutral: Any,
) -> None:
    """Refuse fields that are not supported, unless their values ask for nothing.

    ``unsupported`` has such values, the first for use in the error. Raises ``InvalidField``.
    """
    for name, value in (part.model_extra or {}).items():
        asks_nothing = value is None or value in unsupported.get(name, ())
        if name in harmless or asks_nothing or (name in neutral and value == neutral[name]):
            continue
        if name in unsupported:
            instead = f", or send {unsupported[name][0]!r}" if unsupported[name] else ""
            raise InvalidField(
                f"{where}{name} is not supported by this server, and it would change the answer; "
                f"leave it out{instead}",
                name,
            )
        close = meant(name, type(part).model_fields.keys())
        raise InvalidField(
            f"{where}{name[:64]} is not a field that this server knows, and it might change the "
            f"answer; {f'did you mean {close}? Rename it, or ' if close else ''}leave it out",
            name[:64],
        )


def prompts(request: CompletionRequest, text: BaseText, info: BaseModelInfo) -> list[list[int]]:
    """Return the tokens of each prompt. Blocks.

    A prompt with too many tokens is refused before the next prompt is tokenized.
    """
    given = request.prompt
    is_one = isinstance(given, str) or (given and isinstance(given[0], int))
    each = cast(list[str | list[int]], [given] if is_one else given)
    if not 0 < len(each) <= MAX_PROMPTS:
        raise InvalidField(
            f"prompt has {len(each)} prompts; one request takes 1 to {MAX_PROMPTS}; send them in "
            "several requests",
            "prompt",
        )
    try:
        return [
            checked_prompt(text.encode(x) if isinstance(x, str) else x, info, room=_room(request))
            for x in each
        ]
    except UserError as error:
        raise named(CompletionRequest, str(error)) from None


def scoring(request: GenerationRequest) -> Scoring:
    """Return which logprobs the answer has. Raises ``InvalidField``."""
    if isinstance(request, CompletionRequest):
        wanted = request.logprobs is not None and request.logprobs is not False
        top = int(request.logprobs or 0)
        return Scoring(wanted, _limited(request, "logprobs", top, MAX_LOGPROBS))
    assert isinstance(request, ChatCompletionRequest)
    top = request.top_logprobs or 0
    if top and not request.logprobs:
        raise InvalidField(
            f"top_logprobs is {top} without logprobs; also send logprobs: true", "top_logprobs"
        )
    return Scoring(bool(request.logprobs), _limited(request, "top_logprobs", top, MAX_TOP_LOGPROBS))


def echo(request: GenerationRequest) -> Echo:
    """Return which part of the answer is the prompt."""
    if not (isinstance(request, CompletionRequest) and request.echo):
        return Echo.NONE
    if request.stream:
        raise InvalidField(
            "echo is true in a stream, which has only sampled text; leave out stream or echo",
            "echo",
        )
    return Echo.ALONE if request.max_tokens == 0 else Echo.BEFORE


def kept(request: GenerationRequest) -> int:
    """Return how many of a prompt's samples are in the answer."""
    return 1 if request.n is None else request.n


def _sample_count(request: GenerationRequest) -> tuple[str, int]:
    """Return the field that says how many samples to draw for each prompt, and that number."""
    count = kept(request)
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    if best_of is None:
        return "n", count
    if best_of < count:
        raise InvalidField(
            f"best_of is {shown_number(best_of)}, below n, which is {count}; it is the number of "
            "samples of which n are returned: send at least n",
            "best_of",
        )
    if best_of > count and request.stream:
        raise InvalidField(
            f"best_of is {shown_number(best_of)} in a stream, and the best samples are known only "
            "at the end; leave out stream or best_of",
            "best_of",
        )
    return ("best_of" if best_of > count else "n"), best_of


def names_by_id(request: GenerationRequest) -> bool:
    """Return whether the tokens of logprobs are named by their ids."""
    return isinstance(request, CompletionRequest) and bool(request.return_tokens_as_token_ids)


def _limited(request: Request, name: str, value: int, high: int) -> int:
    try:
        return bounded(name, value, 0, high)
    except UserError as error:
        raise named(type(request), str(error)) from None


def samples(
    request: GenerationRequest,
    tokens: Sequence[list[int]],
    file_id: str | None,
    info: BaseModelInfo,
) -> list[SampleCommand]:
    """Return one command for each prompt, all with the request's seed if it has one."""
    try:
        return _samples(request, tokens, file_id, info)
    except UserError as error:
        raise named(type(request), str(error)) from None


def _samples(
    request: GenerationRequest,
    tokens: Sequence[list[int]],
    file_id: str | None,
    info: BaseModelInfo,
) -> list[SampleCommand]:
    # Here an empty list means no additional stops; in asample it means to never stop.
    _, strings = checked_stops("stop", request.stop or None)
    scored = scoring(request)
    echoed = scored.wanted and echo(request) is not Echo.NONE
    length_name, most = _max_tokens(request)
    count_name, count = _sample_count(request)
    form = response_format.grammar(request)
    commands = [
        SampleCommand(
            prompt=checked_prompt(prompt, info, room=_room(request)),
            seed=checked_seed(request.seed),  # without a seed, each prompt gets a new one
            file_id=file_id,
            num_samples=count,
            max_tokens=most,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=request.top_k or -1,  # 0 also means all tokens, as in vLLM
            top_p=1.0 if request.top_p is None else request.top_p,
            logit_bias=request.logit_bias or {},
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            grammar=form,
            stop_strings=strings,
            topk_sample_logprobs=scored.top,
            prompt_logprobs=echoed,
            topk_prompt_logprobs=scored.top if echoed else 0,
        )
        for prompt in tokens
    ]
    for command in commands:
        check_sampling_options(command, {"num_samples": count_name, "max_tokens": length_name})
        check_biased_tokens(command, info)
    return commands


def _room(request: GenerationRequest) -> int:
    """Return the tokens of context that a prompt must leave free, or -1 if it is only scored."""
    return -1 if echo(request) is Echo.ALONE and scoring(request).wanted else 1


def _max_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    """Return the field that says how many tokens to sample, and that number.

    None means up to the context.
    """
    name, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        name, asked = "max_completion_tokens", request.max_completion_tokens
    if echo(request) is Echo.ALONE:
        return name, 0 if scoring(request).wanted else 1  # that one token is not in the answer
    if asked is None and isinstance(request, CompletionRequest):
        return name, _DEFAULT_TOKENS
    return name, asked
