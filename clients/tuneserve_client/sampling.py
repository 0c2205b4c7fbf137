"""Sampling from frozen weights of a base model or a checkpoint."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from tuneserve_client.arguments import checks_arguments
from tuneserve_client.codec import decode_samples
from tuneserve_client.data import Array, Message, Tokens, as_tokens
from tuneserve_client.errors import Category, RequestFailed, Unreachable
from tuneserve_client.futures import AsyncFuture
from tuneserve_client.results import SampleOutput
from tuneserve_client.session import Session
from tuneserve_client.transport import Answer
from tuneserve_client.wire import types

if TYPE_CHECKING:
    from tuneserve_client.wire.tokenizer import Tokenizer

Prompt = str | Tokens | Sequence[Message]
"""A text, token ids, or the messages of a conversation."""

_DATA, _DONE = "data: ", "[DONE]"


@checks_arguments
class AsyncSampler:
    """A sampler of weights that never change; ``path`` is that of their checkpoint, if any.

    A prompt is a text, token ids, or the messages of a conversation. In ``stream`` and ``chat``,
    the server tokenizes texts and messages.
    """

    def __init__(
        self,
        session: Session,
        sampler_id: str,
        base_model: str,
        path: str | None,
        first_seq_id: int = 0,
    ) -> None:
        self.id = sampler_id
        self.base_model = base_model
        self.path = path
        self._session = session
        self._seq = first_seq_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path or self.id!r}, {self.base_model!r})"

    def sample(  # noqa: PLR0913 - all that the server can
        self,
        prompt: Prompt,
        *,
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] | Sequence[int] | None = None,
        top_logprobs: int = 0,
        prompt_logprobs: bool = False,
        prompt_logprobs_last_n: int | None = None,
        top_prompt_logprobs: int = 0,
        target_logprobs: npt.ArrayLike | None = None,
        prompt_alternatives: int = 0,
    ) -> AsyncFuture[SampleOutput]:
        """Draw ``num_samples`` continuations of the prompt.

        Each has up to ``max_tokens`` tokens. By default, it has as many as the context has left.
        ``temperature`` 0 takes the likeliest token. ``stop`` takes texts or token ids, in addition
        to the end of sequence; with ``[]``, nothing stops a continuation early.
        ``target_logprobs`` are ids [N - 1, K] to score at the prompt's positions after the first,
        with -1 for no id.
        """
        params = types.SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            stop=stop if stop is None or isinstance(stop, str) else cast(list[str], list(stop)),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        return self._sample(
            prompt,
            num_samples=num_samples,
            sampling_params=params,
            prompt_logprobs=prompt_logprobs,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            topk_prompt_logprobs=top_prompt_logprobs,
            topk_sample_logprobs=top_logprobs,
            target_prompt_logprobs=None if target_logprobs is None else _targets(target_logprobs),
            prompt_alt_tokens_k=prompt_alternatives,
        )

    def logprobs(self, prompt: Prompt) -> AsyncFuture[Array]:
        """Return the logprob of each prompt token given the tokens before it; NaN for the first."""
        params = types.SamplingParams(max_tokens=1)
        fields = {"num_samples": 1, "sampling_params": params, "prompt_logprobs": True}
        sending, _ = self._sending(prompt, fields)
        return self._session.submit(sending, read_logprobs)

    async def stream(  # noqa: PLR0913 - as in sample
        self,
        /,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        **template: Any,
    ) -> AsyncIterator[str]:
        """Yield pieces of one continuation's text as they are drawn; leaving the loop ends it.

        ``max_tokens`` defaults to 16 for a text or tokens, and to the rest of the context for a
        conversation. ``template`` has options of the chat template, for example
        ``enable_thinking=False``.
        """
        if template and (isinstance(prompt, str) or not _is_conversation(prompt)):
            raise TypeError(f"{next(iter(template))} is not an option for text or tokens")
        body: dict[str, Any] = {
            "model": self.id,  # the id stays valid when the checkpoint at the path is deleted
            "stream": True,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "stop": stop if stop is None or isinstance(stop, str) else list(stop),
        }
        path = "/v1/completions"
        if isinstance(prompt, str):
            body["prompt"] = prompt
        elif _is_conversation(prompt):
            body |= {"messages": list(prompt), "chat_template_kwargs": template}
            body["separate_reasoning"] = False  # the pieces are the text as it is drawn
            path = "/v1/chat/completions"
        else:
            body["prompt"] = as_tokens(cast(Tokens, prompt)).tolist()
        body = {name: value for name, value in body.items() if value is not None}
        async with self._session.transport.stream(path, body) as response:
            async for line in response.aiter_lines():
                if line == _DATA + _DONE:
                    return
                if line.startswith(_DATA):
                    for piece in _pieces(json.loads(line.removeprefix(_DATA))):
                        yield piece
        raise Unreachable("the stream ended before it was done; try again")

    async def chat(self, /, messages: Sequence[Message], **options: Any) -> str:
        """Return the assistant's next message; ``options`` are those of ``stream``."""
        return "".join([piece async for piece in self.stream(messages, **options)])

    def _sample(self, prompt: Prompt, **fields: Any) -> AsyncFuture[SampleOutput]:
        sending, readers = self._sending(prompt, fields)

        def read(answers: Sequence[Answer]) -> SampleOutput:
            return with_texts(read_samples(answers), readers[0] if readers else None)

        return self._session.submit(sending, read)

    def _sending(self, prompt: Prompt, fields: Mapping[str, Any]) -> tuple[Any, list["Tokenizer"]]:
        """Return the coroutine that sends the request, and a list for the tokenizer.

        Sending puts the tokenizer into the list, unless the prompt is tokens.
        """
        seq_id, self._seq = self._seq, self._seq + 1
        readers: list[Tokenizer] = []
        is_text = isinstance(prompt, str) or _is_conversation(prompt)
        # Copy the tokens: the caller's may change after the call.
        given: Any = prompt if is_text else as_tokens(cast(Tokens, prompt)).tolist()

        async def tokens() -> list[int]:
            if not is_text:
                return cast(list[int], given)
            readers.append(await self._session.catalog.tokenizer(self.base_model))
            if isinstance(given, str):
                return readers[0].encode(given)
            return readers[0].apply_chat_template(given)

        async def sending() -> list[str]:
            chunk = types.Chunk(tokens=await tokens())
            body = types.SampleRequest(
                sampling_session_id=self.id,
                seq_id=seq_id,
                prompt=types.Prompt(chunks=[chunk]),
                **fields,
            )
            answer = await self._session.transport.ask(
                types.SampleFutureResponse, "POST", "/asample", body=body
            )
            return [answer.request_id]

        return sending(), readers


def _is_conversation(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _targets(ids: npt.ArrayLike) -> types.IntTensor:
    array = np.asarray(ids)
    return types.IntTensor(data=array.ravel().tolist(), shape=list(array.shape))


def _pieces(event: dict[str, Any]) -> list[str]:
    """Return the texts in one event of a stream. Raises ``RequestFailed`` if it is an error."""
    if "error" in event:
        error = event["error"]
        category: Category = "server" if error.get("type") == "server_error" else "user"
        raise RequestFailed(error["message"], category=category, code=error.get("code"))
    found = (
        choice["text"] if "text" in choice else choice["delta"].get("content")
        for choice in event["choices"]
    )
    return [piece for piece in found if piece]


# --- reading results ------------------------------------------------------------------------------


def read_samples(answers: Sequence[Answer]) -> SampleOutput:
    return decode_samples(answers[0].body)


def read_logprobs(answers: Sequence[Answer]) -> Array:
    found = read_samples(answers).prompt_logprobs
    if found is None:
        raise ValueError("the result has no prompt logprobs")
    return found


def with_texts(output: SampleOutput, tokenizer: "Tokenizer | None") -> SampleOutput:
    if tokenizer is None:
        return output
    texts = [tokenizer.decode(each.tokens) for each in output.samples]
    told = zip(output.samples, texts, strict=True)
    return replace(output, samples=[replace(each, text=text) for each, text in told])


async def open_sampler(session: Session, **weights: str) -> AsyncSampler:
    """Open a sampler of a ``base_model``, by name, or of a checkpoint, by its ``model_path``."""
    body = types.CreateSamplingSessionRequest(
        session_id=await session.id(), sampling_session_seq_id=session.next_sampler(), **weights
    )
    opened = await session.transport.ask(
        types.SamplingSessionResponse, "POST", "/create_sampling_session", body=body
    )
    found = await session.catalog.sampler_info(opened.sampling_session_id)
    return AsyncSampler(session, found.sampler_id, found.base_model, found.model_path)


async def join_sampler(session: Session, sampler_id: str) -> AsyncSampler:
    """Open another client of an existing sampler, with sequence numbers of its own."""
    found = await session.catalog.sampler_info(sampler_id)
    body = types.JoinSamplingSessionRequest(sampling_session_id=sampler_id)
    joined = await session.transport.ask(
        types.JoinSamplingSessionResponse, "POST", "/join_sampling_session", body=body
    )
    first = joined.client_counter * types.CLIENT_SEQS
    return AsyncSampler(session, sampler_id, found.base_model, found.model_path, first)
