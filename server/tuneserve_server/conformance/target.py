"""A server of the protocol, addressed by plain HTTP as the official SDK addresses it."""

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from google.protobuf.message import DecodeError

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_server.conformance.tensors import floats_of

_PROTOBUF = "application/x-protobuf"
POLL_S = 45.0
"""The time after which the official SDK gives up a poll and waits before the next."""


class NotConforming(Exception):
    """The server's answer breaks the rule; the text says how."""


def expect(is_met: object, text: str) -> None:
    """Raise ``NotConforming`` with the text unless the condition is met."""
    if not is_met:
        raise NotConforming(text)


class ServerUnderTest:
    """The server under test. Raises ``NotConforming`` for answers that the SDK cannot read."""

    def __init__(
        self,
        url: str,
        api_key: str,
        base_model: str | None = None,
        *,
        deadline_s: float = 300.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"X-API-Key": api_key, "X-Stainless-Package-Version": "0.38.0"}
        self._http = httpx.Client(
            base_url=f"{url.rstrip('/')}/api/v1/",
            headers=headers,
            timeout=POLL_S,
            transport=transport,
            trust_env=False,
        )
        self._bare = httpx.Client(timeout=POLL_S, transport=transport, trust_env=False)
        self._deadline_s = deadline_s
        self._base_model = base_model
        self._session: str | None = None
        self._models = 0
        self._samplers = 0

    def close(self) -> None:
        """End the session and the connections."""
        try:
            if self._session is not None:
                reason = {"reason": {"type": "success"}, "detail": None}
                self.send("POST", f"sessions/{self._session}/finish", reason)
        except NotConforming:
            pass  # a check is about this call
        self._http.close()
        self._bare.close()

    # --- calls ------------------------------------------------------------------------------------

    def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Send one request. JSON bodies are mappings, protobuf bodies bytes."""
        sent = dict(headers or {})
        content: dict[str, Any] = {"json": body} if isinstance(body, Mapping) else {}
        if isinstance(body, bytes):
            content = {"content": body}
            sent["Content-Type"] = _PROTOBUF
        elif body is None and method != "GET":
            sent["Content-Type"] = "application/json"
        try:
            return self._http.request(method, path, headers=sent, **content)
        except httpx.TimeoutException:
            raise NotConforming(f"{method} {path}: no answer within {POLL_S:g} s") from None
        except httpx.HTTPError as error:
            raise NotConforming(f"{method} {path}: {error or type(error).__name__}") from None

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None
    ) -> dict[str, Any]:
        """Send one request, and return the JSON object of a successful answer."""
        return _object(self.send(method, path, body), f"{method} {path}")

    def download(self, url: str) -> bytes:
        """Return the bytes at an address, asked for without a key."""
        try:
            response = self._bare.get(url)
        except httpx.HTTPError as error:
            raise NotConforming(f"a signed address cannot be read: {error}") from None
        expect(response.is_success, f"a signed address answers {response.status_code}")
        return response.content

    def submit(self, path: str, body: Mapping[str, Any] | bytes) -> str:
        """Send a request whose result is a future; return its ``request_id``."""
        answer = self.ask("POST", path, body)
        request_id = answer.get("request_id")
        expect(isinstance(request_id, str), f"POST {path} answers without a request_id")
        return str(request_id)

    def poll(self, request_id: str) -> httpx.Response:
        """Ask once for the result of a future."""
        body = {"request_id": request_id, "allow_metadata_only": False}
        return self.send("POST", "retrieve_future", body, {"Accept": _PROTOBUF})

    def outcome(self, request_id: str) -> httpx.Response:
        """Return the final answer of a future."""
        end_s = time.monotonic() + self._deadline_s
        while time.monotonic() < end_s:
            response = self.poll(request_id)
            if not is_pending(response):
                return response
        raise NotConforming(f"a future has no result after {self._deadline_s:g} s")

    def result(self, request_id: str) -> dict[str, Any]:
        """Return the JSON result of a future that succeeds."""
        body = _object(self.outcome(request_id), "retrieve_future")
        expect("error" not in body, f"the request failed: {body.get('error')}")
        return body

    def message(self, request_id: str, kind: type[Any]) -> Any:
        """Return the protobuf result of a future that succeeds."""
        response = self.outcome(request_id)
        if _PROTOBUF not in response.headers.get("Content-Type", ""):
            said = response.text[:200]
            raise NotConforming(f"the result is not {_PROTOBUF}: {response.status_code} {said}")
        try:
            return kind.FromString(response.content)
        except DecodeError as error:
            raise NotConforming(f"the result is no {kind.DESCRIPTOR.name}: {error}") from None

    def failure(self, request_id: str) -> dict[str, Any]:
        """Return the answer of a future that fails, as the SDK expects it."""
        response = self.outcome(request_id)
        expect(
            response.status_code == 200,
            f"a failed request answers {response.status_code}; it must be 200 with an error",
        )
        body = _object(response, "retrieve_future")
        expect(isinstance(body.get("error"), str), "a failed request answers without an error")
        return body

    # --- things to work with ----------------------------------------------------------------------

    @property
    def base_model(self) -> str:
        """The base model to use: as given, or the first that the server trains."""
        if self._base_model is None:
            served = self.ask("GET", "get_server_capabilities").get("supported_models") or []
            names = [each.get("model_name") for each in served if each.get("trainable", True)]
            expect(names and names[0], "get_server_capabilities names no model that trains")
            self._base_model = str(names[0])
        return self._base_model

    @property
    def session(self) -> str:
        """The session of all checks."""
        if self._session is None:
            self._session = self.new_session()
        return self._session

    def new_session(self, **fields: Any) -> str:
        """Open a session and return its id."""
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
        answer = self.ask("POST", "create_session", {**body, **fields})
        expect(isinstance(answer.get("session_id"), str), "create_session answers no session_id")
        return str(answer["session_id"])

    def new_model(self, **fields: Any) -> "TestedModel":
        """Create a model with an adapter of rank 4 and return it."""
        number, self._models = self._models, self._models + 1
        body = {
            "session_id": self.session,
            "model_seq_id": number,
            "base_model": self.base_model,
            "lora_config": {"rank": 4, "seed": 0},
            "optimizer_config": {"type": "adamw"},
            "type": "create_model",
        }
        made = self.result(self.submit("create_model", {**body, **fields}))
        expect("model_id" in made, "create_model's result has no model_id")
        return TestedModel(self, str(made["model_id"]))

    def loaded_model(self, path: str, *, optimizer: bool = True) -> "TestedModel":
        """Create a model from a checkpoint and return it."""
        number, self._models = self._models, self._models + 1
        body = {
            "session_id": self.session,
            "model_seq_id": number,
            "path": path,
            "optimizer": optimizer,
            "type": "load_weights",
        }
        self.result(self.submit("load_weights", body))
        return TestedModel(self, f"{self.session}:train:{number}")

    def next_sampler_number(self) -> int:
        """Return the next ``sampling_session_seq_id``."""
        number, self._samplers = self._samplers, self._samplers + 1
        return number

    def new_sampler(self, model_path: str | None = None) -> "TestedSampler":
        """Open a sampler of a checkpoint, or of the base model."""
        about = (
            {"base_model": self.base_model} if model_path is None else {"model_path": model_path}
        )
        body = {
            "session_id": self.session,
            "sampling_session_seq_id": self.next_sampler_number(),
            "type": "create_sampling_session",
            **about,
        }
        answer = self.ask("POST", "create_sampling_session", body)
        expect("sampling_session_id" in answer, "the answer has no sampling_session_id")
        return TestedSampler(self, str(answer["sampling_session_id"]))


class TestedModel:
    """A model of the session, with the sequence numbers of its requests."""

    def __init__(self, target: ServerUnderTest, model_id: str) -> None:
        self.target = target
        self.id = model_id
        self.next_seq = 1

    def _numbered(self, seq_id: int | None) -> int:
        if seq_id is not None:
            return seq_id
        self.next_seq += 1
        return self.next_seq - 1

    def submit_gradient(
        self,
        data: Sequence[wire.Datum],
        loss: str = "cross_entropy",
        config: Mapping[str, float] | None = None,
        *,
        forward_only: bool = False,
        seq_id: int | None = None,
    ) -> str:
        """Send a ``forward_backward`` under the next number, or under the given one."""
        message = wire.ForwardBackwardRequest(
            model_id=self.id,
            seq_id=self._numbered(seq_id),
            data=data,
            loss_fn=loss,
            forward_only=forward_only,
            loss_fn_config=config,
            loss_fn_config_v2={
                name: wire.LossConfigValue(number=value) for name, value in (config or {}).items()
            },
        )
        return self.target.submit("forward_backward", message.SerializeToString())

    def gradient(self, data: Sequence[wire.Datum], *loss: Any, **options: Any) -> "GradientOutput":
        """Send a ``forward_backward`` and return its output."""
        request_id = self.submit_gradient(data, *loss, **options)
        return GradientOutput(self.target.message(request_id, wire.ForwardBackwardOutput))

    def submit_step(self, seq_id: int | None = None, **params: float) -> str:
        """Send an ``optim_step`` under the next number, or under the given one."""
        known = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
        body = {"model_id": self.id, "seq_id": self._numbered(seq_id), "type": "optim_step"}
        return self.target.submit("optim_step", {**body, "adam_params": {**known, **params}})

    def step(self, **params: float) -> dict[str, Any]:
        """Send an ``optim_step`` and return its metrics."""
        metrics = self.target.result(self.submit_step(None, **params)).get("metrics") or {}
        expect(isinstance(metrics, dict), "the metrics of optim_step are no object")
        return dict(metrics)

    def submit_save(self, route: str, name: str, **fields: Any) -> str:
        """Send a save under the next number."""
        body = {"model_id": self.id, "seq_id": self._numbered(None), "path": name, "type": route}
        return self.target.submit(route, {**body, **fields})

    def saved(self, route: str, name: str | None = None, **fields: Any) -> str:
        """Save a checkpoint under a name and return its path."""
        name = name or f"conformance-{uuid.uuid4().hex[:8]}"
        made = self.target.result(self.submit_save(route, name, **fields))
        expect(isinstance(made.get("path"), str), f"the result of {route} has no path")
        return str(made["path"])


class GradientOutput:
    """The output of a ``forward_backward``."""

    def __init__(self, message: wire.ForwardBackwardOutput) -> None:
        self.message = message
        self.metrics = dict(message.metrics)
        self.logprobs = [
            values
            for record in message.loss_fn_outputs
            for values in floats_of(record.fields["logprobs"])
        ]

    @property
    def loss(self) -> float:
        """The metric ``loss:sum``."""
        expect("loss:sum" in self.metrics, "the metrics lack loss:sum")
        return self.metrics["loss:sum"]


class TestedSampler:
    """A sampler of the session."""

    def __init__(self, target: ServerUnderTest, sampler_id: str) -> None:
        self.target = target
        self.id = sampler_id
        self._next_seq = 0

    def accepted(
        self,
        prompt: Sequence[int],
        *,
        count: int = 1,
        params: Mapping[str, Any] | None = None,
        in_chunks: bool = False,
        **fields: Any,
    ) -> dict[str, Any]:
        """Send an ``asample``; return its answer.

        ``params`` are entries of ``sampling_params``, and ``fields`` of the request. With
        ``in_chunks`` each token of the prompt is a chunk of its own.
        """
        chunks = [_text([token]) for token in prompt] if in_chunks else [_text(prompt)]
        known = {"max_tokens": 8, "seed": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
        body = {
            "sampling_session_id": self.id,
            "seq_id": self._next_seq,
            "num_samples": count,
            "prompt": {"chunks": chunks},
            "sampling_params": {**known, **(params or {})},
            "prompt_logprobs": False,
            "topk_prompt_logprobs": 0,
            "topk_sample_logprobs": 0,
            "prompt_alt_tokens_k": 0,
            "type": "sample",
        }
        self._next_seq += 1
        return self.target.ask("POST", "asample", {**body, **fields})

    def sample(self, prompt: Sequence[int], **options: Any) -> wire.SampleResponse:
        """Sample and return the result."""
        request_id = self.accepted(prompt, **options).get("request_id")
        expect(isinstance(request_id, str), "asample answers without a request_id")
        found: wire.SampleResponse = self.target.message(str(request_id), wire.SampleResponse)
        expect(found.sequences, "the result of asample has no sequences")
        return found


def _text(tokens: Sequence[int]) -> dict[str, Any]:
    return {"type": "encoded_text", "tokens": list(tokens)}


def is_pending(response: httpx.Response) -> bool:
    """Return whether the answer asks the client to poll again."""
    if response.status_code == 408:
        return True
    if response.status_code != 200 or _PROTOBUF in response.headers.get("Content-Type", ""):
        return False
    try:
        body = response.json()
    except ValueError:
        return False
    return isinstance(body, dict) and body.get("type") == "try_again"


def is_near(one: float, other: float, relative: float = 1e-3, absolute: float = 1e-3) -> bool:
    """Return whether two losses are equal but for rounding."""
    return math.isclose(one, other, rel_tol=relative, abs_tol=absolute)


def _object(response: httpx.Response, what: str) -> dict[str, Any]:
    if not response.is_success:
        raise NotConforming(f"{what} answers {response.status_code}: {response.text[:200]}")
    try:
        body = response.json()
    except ValueError:
        raise NotConforming(f"the answer of {what} is not JSON: {response.text[:100]}") from None
    expect(isinstance(body, dict), f"the answer of {what} is no JSON object")
    return dict(body)
