"""A model: one adapter, whose requests run in the order of the calls."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tuneserve_client.arguments import checks_arguments
from tuneserve_client.codec import (
    chunks,
    decode_output,
    encode_data,
    encode_gradient,
    joined,
)
from tuneserve_client.data import Array, Datum
from tuneserve_client.defaults import LEARNING_RATE
from tuneserve_client.errors import LossFailed, ModelInterrupted, Overloaded, Refused
from tuneserve_client.futures import AsyncFuture, of_all_parts
from tuneserve_client.results import StepOutput, TrainOutput
from tuneserve_client.sampling import AsyncSampler, open_sampler
from tuneserve_client.session import Session
from tuneserve_client.transport import API, PROTOBUF, Answer, read_body
from tuneserve_client.wire import types

_ADAM = types.AdamParams()
_AT_ONCE = 8
"""The most requests of one model that are sent at once. The server puts them in order, so the
client need not wait for a round trip each time."""

_KEEPS_ITS_PLACE = "body_too_large"

CustomLoss = Callable[
    [Sequence[Datum], list[Array]],
    tuple[float, Sequence[npt.ArrayLike]] | tuple[float, Sequence[npt.ArrayLike], dict[str, float]],
]
"""A function from the data and the logprobs of each datum to the loss, its derivative with respect
to each of these logprobs, and optional metrics."""

_IN_LOSS_OF: ContextVar[frozenset["AsyncModel"]] = ContextVar("_IN_LOSS_OF", default=frozenset())
"""The models whose custom losses are being computed. One model's loss may call another model."""

Post = Callable[[int], Awaitable[str]]
"""A function that sends one request under a sequence number, and returns the request's id."""


@checks_arguments
class AsyncModel:
    """One adapter on a base model.

    Its methods send a request at once and return a future. The server runs the requests in this
    order, so you can send a step before you have the gradient's result.
    """

    def __init__(
        self,
        session: Session,
        model_id: str,
        base_model: str,
        rank: int,
        adapter: str = "lora",
    ) -> None:
        self.id = model_id
        self.base_model = base_model
        self.rank = rank
        self.adapter = adapter
        self._session = session
        self._turn = asyncio.Lock()  # held to take sequence numbers, in the order of the calls
        self._window = asyncio.Semaphore(_AT_ONCE)
        self._seq = 0
        self._missing: BaseException | None = None

    def __repr__(self) -> str:
        adapter = f"adapter={self.adapter!r}, rank={self.rank}"
        return f"{type(self).__name__}({self.id!r}, {self.base_model!r}, {adapter})"

    # --- training ---------------------------------------------------------------------------------

    def forward_backward(
        self, /, data: Sequence[Datum], loss: str = "cross_entropy", **config: float | str
    ) -> AsyncFuture[TrainOutput]:
        """Add the gradient of the loss over all data to the gradient that the next step applies.

        ``config`` is the loss's configuration, for example ``clip_low_threshold=0.8``.
        """
        return self._gradient(data, loss, config, forward_only=False)

    def forward(
        self, /, data: Sequence[Datum], loss: str = "cross_entropy", **config: float | str
    ) -> AsyncFuture[TrainOutput]:
        """Compute the loss over all data, without a gradient."""
        return self._gradient(data, loss, config, forward_only=True)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss: CustomLoss
    ) -> AsyncFuture[TrainOutput]:
        """Add the gradient of a loss that is computed in this process.

        A first pass fetches the logprobs of the targets. A second pass sends the derivative of the
        loss with respect to each of them. ``loss`` runs in a thread, and later calls of this model
        wait for it. The result has the metrics of ``loss``, ``loss:sum``, and the
        ``surrogate_loss:sum`` that the server computed.
        """
        asked = [Datum(each.tokens, each.targets) for each in data]
        metrics: dict[str, float] = {}

        async def sending() -> list[str]:
            self._check_not_in_loss()
            async with self._turn:
                posts = self._posts(asked, "cross_entropy", {}, forward_only=True)
                tasks = [await self._start(post) for post in posts]
                request_ids = await of_all_parts(tasks)
                answers = await of_all_parts(map(self._session.transport.result, request_ids))
                scored = read_output(answers)
                weighted = await self._weighted(data, scored.logprobs, loss, metrics)
                posts = self._posts(weighted, "cross_entropy", {}, forward_only=False)
                tasks = [await self._start(post) for post in posts]
            return await of_all_parts(tasks)

        def read(answers: Sequence[Answer]) -> TrainOutput:
            output = read_output(answers)
            surrogate = {"surrogate_loss:sum": output.loss}
            return replace(output, metrics={**surrogate, **metrics})

        return self._session.submit(sending(), read)

    def optim_step(  # noqa: PLR0913 - all of AdamW's
        self,
        learning_rate: float = LEARNING_RATE,
        *,
        beta1: float = _ADAM.beta1,
        beta2: float = _ADAM.beta2,
        eps: float = _ADAM.eps,
        weight_decay: float = _ADAM.weight_decay,
        grad_clip_norm: float = _ADAM.grad_clip_norm,
    ) -> AsyncFuture[StepOutput]:
        """Take one step of AdamW, as in torch, on the gradients since the last step."""
        params = types.AdamParams(
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            grad_clip_norm=grad_clip_norm,
        )
        return self._send("optim_step", types.OptimStepRequest, read_step, adam_params=params)

    # --- checkpoints ------------------------------------------------------------------------------

    def save(
        self,
        name: str,
        *,
        ttl_s: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> AsyncFuture[str]:
        """Save a checkpoint to continue from, with the optimizer's state; the result is its path.

        With ``ttl_s``, the checkpoint is deleted after that many seconds, an hour or more.
        """
        return self._send(
            "save_weights",
            types.SaveWeightsRequest,
            read_path,
            path=name,
            ttl_seconds=ttl_s,
            overwrite=overwrite,
            user_metadata=None if user_metadata is None else dict(user_metadata),
        )

    def export(
        self, name: str, *, ttl_s: int | None = None, encrypt_for: Sequence[str] = ()
    ) -> AsyncFuture[str]:
        """Save the adapter in PEFT's layout; the result is its path, for ``client.download``.

        ``encrypt_for`` takes age public keys. If you give any, the adapter is encrypted for them.
        """
        return self._send(
            "save_weights_external",
            types.SaveWeightsExternalRequest,
            read_path,
            path=name,
            ttl_seconds=ttl_s,
            age_encryption_recipients=list(encrypt_for) or None,
        )

    def load(self, path: str, *, optimizer: bool = True) -> AsyncFuture[None]:
        """Replace the model's weights with those of a checkpoint of the same shape.

        With ``optimizer=False`` it takes only the weights, and the optimizer starts anew. The
        future raises ``NotFound`` if there is no such checkpoint.
        """
        request = types.LoadIntoRequest
        future = self._send("load_weights", request, read_nothing, path=path, optimizer=optimizer)
        future.on_failure = partial(self._session.catalog.check_found, path)
        return future

    async def save_sampler(
        self, name: str | None = None, *, ttl_s: int | None = None
    ) -> AsyncSampler:
        """Open a sampler of the present weights.

        With a ``name``, the weights are stored as a checkpoint under the sampler's ``path``.
        Without a name, they last for as long as the client is open.
        """
        request = types.SaveWeightsForSamplerRequest
        if name is not None:
            saving = self._send(
                "save_weights_for_sampler", request, read_path, path=name, ttl_seconds=ttl_s
            )
            return await open_sampler(self._session, model_path=await saving)
        number = self._session.next_sampler()
        opening = self._send(
            "save_weights_for_sampler", request, read_sampler_id, sampling_session_seq_id=number
        )
        return AsyncSampler(self._session, await opening, self.base_model, None)

    # --- sending ----------------------------------------------------------------------------------

    def _send(
        self,
        route: str,
        request: type[types.ModelKey],
        read: Callable[[Sequence[Answer]], Any],
        **fields: Any,
    ) -> AsyncFuture[Any]:
        async def post(seq_id: int) -> str:
            body = request(model_id=self.id, seq_id=seq_id, **fields)
            answer = await self._session.transport.ask(
                types.FutureResponse, "POST", f"/{route}", body=body
            )
            return answer.request_id

        request(model_id=self.id, seq_id=1, **fields)  # invalid fields raise here, in the call
        return self._session.submit(self._in_turn([post]), read)

    def _gradient(
        self,
        data: Sequence[Datum],
        loss: str,
        config: Mapping[str, float | str],
        *,
        forward_only: bool,
    ) -> AsyncFuture[TrainOutput]:
        posts = self._posts(data, loss, config, forward_only=forward_only)
        return self._session.submit(self._in_turn(posts), read_output)

    def _posts(
        self,
        data: Sequence[Datum],
        loss: str,
        config: Mapping[str, float | str],
        *,
        forward_only: bool,
    ) -> list[Post]:
        """Return a post for each chunk of the data, encoded now: the data may change later."""
        if not data:
            raise ValueError("data is empty; give at least one datum")
        encode_gradient(self.id, 1, [], loss, config, forward_only=forward_only)

        def post_of(messages: Any) -> Post:
            async def post(seq_id: int) -> str:
                body = encode_gradient(
                    self.id, seq_id, messages, loss, config, forward_only=forward_only
                )
                response = await self._session.transport.call(
                    "POST",
                    f"{API}/forward_backward",
                    body=body,
                    headers={"Content-Type": PROTOBUF},
                )
                return read_body(types.FutureResponse, response).request_id

            return post

        return [post_of(encode_data(chunk)) for chunk in chunks(data)]

    async def _in_turn(self, posts: Sequence[Post]) -> list[str]:
        self._check_not_in_loss()
        async with self._turn:
            tasks = [await self._start(post) for post in posts]
        return await of_all_parts(tasks)

    def _check_not_in_loss(self) -> None:
        """Raise ``RuntimeError`` in a custom loss of this model, which holds the turn itself."""
        if self in _IN_LOSS_OF.get():
            raise RuntimeError(
                f"a custom loss called its own model {self.id}, whose requests wait until the loss "
                "is computed; make the call before the loss, or use another model"
            )

    async def _start(self, post: Post) -> "asyncio.Task[str]":
        """Send the post under the next sequence number. The caller must hold the turn."""
        await self._window.acquire()
        if self._missing is not None:
            self._window.release()
            raise ModelInterrupted(
                f"a request of {self.id} could not be sent ({self._missing}), so its later "
                "requests cannot run; load a checkpoint into a new model"
            ) from self._missing
        self._seq += 1
        return asyncio.create_task(self._post(post, self._seq))

    async def _post(self, post: Post, seq_id: int) -> str:
        try:
            return await post(seq_id)
        except BaseException as error:
            if isinstance(error, Overloaded) and self._seq == seq_id:
                self._seq -= 1  # the request was not accepted, and no later one waits for it
            elif not (isinstance(error, Refused) and error.code == _KEEPS_ITS_PLACE):
                self._missing = error
            raise
        finally:
            self._window.release()

    async def _weighted(
        self,
        data: Sequence[Datum],
        logprobs: list[Array],
        loss: CustomLoss,
        metrics: dict[str, float],
    ) -> list[Datum]:
        """Return the data with weights under which cross_entropy has the loss's derivative."""
        # Code that the loss calls, in any thread, finds the model in this variable.
        token = _IN_LOSS_OF.set(_IN_LOSS_OF.get() | {self})
        try:
            value, gradients, *more = await asyncio.to_thread(loss, data, logprobs)
            metrics.update(more[0] if more else {})
            metrics["loss:sum"] = float(value)
            weights = [-np.asarray(each, np.float32) for each in gradients]
            shapes = [each.shape for each in weights], [each.shape for each in logprobs]
        except Exception as error:
            raise LossFailed(f"the custom loss failed: {error!r}; nothing was trained") from error
        finally:
            _IN_LOSS_OF.reset(token)
        if shapes[0] != shapes[1]:
            raise LossFailed(
                f"the custom loss returned gradients of shapes {shapes[0]} for logprobs of shapes "
                f"{shapes[1]}; return one gradient per datum, in the shape of its logprobs"
            )
        return [
            Datum(each.tokens, each.targets, given)
            for each, given in zip(data, weights, strict=True)
        ]


# --- reading results ------------------------------------------------------------------------------


def read_output(answers: Sequence[Answer]) -> TrainOutput:
    return joined([decode_output(each.body) for each in answers])


def read_step(answers: Sequence[Answer]) -> StepOutput:
    return StepOutput(metrics=answers[0].json().get("metrics") or {})


def read_path(answers: Sequence[Answer]) -> str:
    return str(answers[0].json()["path"])


def read_model_id(answers: Sequence[Answer]) -> str:
    return str(answers[0].json()["model_id"])


def read_sampler_id(answers: Sequence[Answer]) -> str:
    return str(answers[0].json()["sampling_session_id"])


def read_nothing(answers: Sequence[Answer]) -> None:
    assert answers


def torch_loss(
    loss: Callable[[Sequence[Datum], list[Any]], Any],
) -> CustomLoss:
    """Return a custom loss that computes with torch.

    ``loss(data, logprobs)`` gets tensors, and returns a scalar tensor, or a scalar tensor and a
    dict of metrics.
    """
    import torch

    def with_gradients(
        data: Sequence[Datum], logprobs: list[Array]
    ) -> tuple[float, list[Array], dict[str, float]]:
        leaves = [torch.tensor(each, requires_grad=True) for each in logprobs]
        found = loss(data, leaves)
        value, metrics = found if isinstance(found, tuple) else (found, {})
        gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        return float(value.detach()), [each.numpy() for each in gradients], metrics

    return with_gradients
