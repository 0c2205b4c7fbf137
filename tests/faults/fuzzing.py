"""The clients of the fuzz tests: their requests, and the checks of every answer."""

import asyncio
import json
import random
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.faults import asgi
from tests.faults.mutations import CANARY, NAMES, compressed, mutated_json, mutated_message
from tests.server.conftest import Api
from tests.server.routes.test_external_uploads import START
from tuneserve_client.wire.proto import wire_pb2 as wire

PREFIX = "/api/v1"
OPENAI = "/v1"
ANTHROPIC = "/v1/messages"
Template = tuple[str, str, Any]
"""Method, path as described, and body. Paths other than OpenAI's have no prefix."""


def whole(described: str) -> str:
    """The path of a template as the API describes it."""
    return described if described.startswith(f"{OPENAI}/") else PREFIX + described


@dataclass
class Checked:
    """Sends requests to the API, checks every answer, and remembers accepted requests."""

    api: Api
    documented: dict[tuple[str, str], set[int]]
    accepted: dict[str, str] = field(default_factory=dict)  # tenant's key by request id
    statuses: Counter[int] = field(default_factory=Counter)
    openai: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Answers of OpenAI's routes, by status and error type."""

    @classmethod
    def of(cls, api: Api) -> "Checked":
        paths = api.app.openapi()["paths"]
        statuses = {
            (method.upper(), path): {int(status) for status in operation["responses"]}
            for path, operations in paths.items()
            for method, operation in operations.items()
        }
        return cls(api, statuses)

    async def send(
        self, method: str, described: str, target: str, body: bytes, headers: dict[str, str]
    ) -> asgi.Answer:
        answer = await asgi.call(self.api.app, method, target, body, headers)
        self.statuses[answer.status] += 1
        if is_openai := described.startswith(f"{OPENAI}/"):
            self.openai[answer.status, answer.headers["content-type"].partition(";")[0]] += 1
        assert answer.status < 500, (target, body[:1000], answer)
        assert answer.status in self.documented[method, described], (target, answer)
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            assert int(answer.headers["content-length"]) == len(answer.body)
        if answer.status == 200:
            self._note(answer, headers["X-API-Key"])
        elif answer.status != 408:  # a poll without a result yet
            if described.startswith(ANTHROPIC):
                assert set(answer.json) == {"type", "error"}, answer
                assert set(answer.json["error"]) == {"type", "message", "code"}, answer
            elif is_openai:
                assert set(answer.json) == {"error"}, answer
                assert set(answer.json["error"]) == {"message", "type", "param", "code"}, answer
            else:
                assert set(answer.json) == {"detail", "code"}, answer
            assert answer.headers["content-type"] == "application/json"
            if CANARY.encode() in answer.body:
                assert _is_field(answer) or _names_canary(body), (body, answer)
        return answer

    def _note(self, answer: asgi.Answer, key: str) -> None:
        if answer.headers["content-type"] == "application/json" and answer.body != b"":
            found = answer.json.get("request_id")
            if found is not None:
                self.accepted[found] = key

    async def all_end(self) -> Counter[str]:
        """The endings of the accepted requests. Each must end, and none by the server's fault."""
        endings: Counter[str] = Counter()
        polls = list(self.accepted.items())
        for start in range(0, len(polls), 64):
            part = polls[start : start + 64]
            endings.update(await asyncio.gather(*(self._ending(*poll) for poll in part)))
        return endings

    async def _ending(self, request_id: str, key: str) -> str:
        body = json.dumps({"request_id": request_id}).encode()
        async with asyncio.timeout(60):
            while True:
                answer = await asgi.call(
                    self.api.app, "POST", f"{PREFIX}/retrieve_future", body, {"X-API-Key": key}
                )
                if answer.status != 408:
                    break
        assert answer.status == 200, answer
        if answer.headers["content-type"] != "application/json" or "error" not in answer.json:
            return "done"
        assert answer.json["category"] == "user", answer.json
        return "rejected"


def _names_canary(body: bytes) -> bool:
    """Whether the body names an object by the canary: an error may say what does not exist."""
    given = json.loads(body)
    return isinstance(given, dict) and any(CANARY in str(given.get(name)) for name in NAMES)


def _is_field(answer: asgi.Answer) -> bool:
    """Whether the answer names a field that is called like the canary, and no value."""
    error = answer.json.get("error", {})
    said = str(error.get("message"))
    is_param = error.get("param") == CANARY or f"{CANARY} is not a field" in said
    return is_param and said.count(CANARY) == 1


@dataclass
class FuzzClient:
    """One model of one tenant, and every other object that its requests name."""

    key: str
    session: str
    ended: str
    model: str
    sampler: str
    checkpoint: str
    done: str
    upload: str = ""  # a finished one
    seq: int = 2  # of the model's next request
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @classmethod
    async def open(cls, api: Api, number: int) -> "FuzzClient":
        key = f"tml-{number % 4}"
        session, ended = [await api.session(key=key) for _ in "12"]
        model = await api.model(session, key=key)
        sampler = await api.sampler(session, key=key)
        save = {"model_id": model, "seq_id": 1, "path": "a"}
        answer = await api.post("/save_weights", save, key=key)
        path = (await api.result(answer, key=key))["path"]
        return cls(key, session, ended, model, sampler, path, answer["request_id"])

    def templates(self, bodies: Any) -> list[Template]:
        """A valid body for each route that takes JSON."""
        number = next(self.numbers)
        model = {"model_id": self.model, "seq_id": self.seq}
        load = {"path": self.checkpoint, "optimizer": True}
        named = {"path": f"c{number}", "ttl_seconds": 3600, "user_metadata": {"a": "b"}}
        adam = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
        session = {"session_id": self.session}
        return [
            ("POST", "/create_session", {"tags": ["a"], "user_metadata": {"a": "b"}}),
            ("POST", "/session_heartbeat", session),
            ("POST", "/sessions/{session_id}/finish", {"reason": {"type": "success"}}),
            ("POST", "/telemetry", {"events": [{"event": CANARY}], **session}),
            ("POST", "/create_model", bodies.create_model(self.session, number)),
            ("POST", "/get_info", {"model_id": self.model}),
            ("POST", "/create_custom_loss", {**session, **self._custom_loss(number)}),
            ("POST", "/optim_step", {**model, "adam_params": {**adam, "grad_clip_norm": 1.0}}),
            ("POST", "/save_weights", {**model, **named, "overwrite": False}),
            ("POST", "/save_weights_for_sampler", {**model, "sampling_session_seq_id": number}),
            ("POST", "/save_weights_external", {**model, "path": f"e{number}"}),
            ("POST", "/load_weights", {**model, **load}),
            ("POST", "/load_weights", {**session, "model_seq_id": 10**6 + number, **load}),
            ("POST", "/weights_info", {"tinker_path": self.checkpoint}),
            (
                "POST",
                "/create_sampling_session",
                {**session, "sampling_session_seq_id": number, "model_path": self.checkpoint},
            ),
            ("POST", "/asample", self._sample(bodies, number)),
            ("POST", "/retrieve_future", {"request_id": self.done, "allow_metadata_only": True}),
            (
                "POST",
                "/retrieve_futures",
                {
                    "target": {"sampling_session_id": self.sampler, "cloned_sampler_id": 0},
                    "prev_cursor": number,
                    "timeout": 0,
                    "retrieved_request_ids": [self.done],
                },
            ),
            ("POST", "/cancel_future", {"request_id": self.done}),
            ("POST", "/join_sampling_session", {"sampling_session_id": self.sampler}),
            (
                "PUT",
                "/training_runs/{model_id}/checkpoints/{kind}/{name}/ttl",
                {"ttl_seconds": 86_400},
            ),
            ("PATCH", "/training_runs/{model_id}", {"user_metadata": {"notes": "a", "b": None}}),
            (
                "POST",
                "/training_runs/{model_id}/events",
                {"kind": "note", "step": 3, "data": {"a": [1]}, "event_id": f"e{number % 50}"},
            ),
            ("POST", "/sessions/search", self._search(number)),
            ("PUT", "/sessions/{session_id}/project", {"project_id": f"p{number % 9}"}),
            ("POST", "/external_weights_upload_start", {**START, "destination_project_id": "p"}),
            ("POST", "/external_weights_upload_finish", {"upload_id": self.upload}),
            ("POST", "/copy_weights", {"source_path": self.checkpoint, "ttl_seconds": 3600}),
            ("POST", "/checkpoints/search", self._checkpoint_search()),
            ("POST", "/v1/completions", self._completion(number)),
            ("POST", "/v1/chat/completions", self._chat(number)),
            ("POST", "/v1/responses", self._response(number)),
            ("POST", "/v1/messages", {"max_tokens": 2, **self._message(number)}),
            ("POST", "/v1/messages/count_tokens", self._message(number)),
        ]

    def _search(self, number: int) -> Any:
        cursor = {"last_created_at": "2026-11-29T12:00:00Z", "last_session_id": self.session}
        finished = {"type": "client_finished", "reasons": ["success"]}
        named = {"session_id": self.session, "display_name": "a", "project_ids": ["p1"]}
        owner = {"type": "user", "owner_urns": [self.key]}
        limits = {"limit": 20, "cursor": cursor} if number % 2 else {"limit": 200}
        statuses = [{"type": "active"}, finished]
        return {**named, "owner": owner, "user_metadata": {}, "statuses": statuses, **limits}

    def _checkpoint_search(self) -> Any:
        place = {"last_created_at": "2026-11-06T00:00:00Z", "last_checkpoint_uuid": "a"}
        chosen = {"project_ids": ["p"], "base_models": ["tuneserve/fake"], "limit": 3}
        owner = {"type": "user", "owner_urns": ["a"]}
        return {**chosen, "user_metadata": {"a": "b"}, "owner": owner, "cursor": place}

    def _custom_loss(self, number: int) -> Any:
        step = {"op": "call_method", "name": "sum_1", "target": "sum", "kwargs": {"dim": 0}}
        returned = {"tuple": [{"ref": "sum_1"}, {"dict": {"custom/a:sum": {"ref": "sum_1"}}}]}
        nodes = [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
            {**step, "args": [{"ref": "logprobs"}]},
            {"op": "output", "name": "output", "target": "output", "args": [returned]},
        ]
        inputs = [{"name": "logprobs", "rank": 1}]
        named = {"custom_loss_seq_id": number % 256, "name": "a", "inputs": inputs}
        return {**named, "graph": {"format": 1, "nodes": nodes}}

    def _completion(self, number: int) -> Any:
        drawn = {"max_tokens": 2, "n": 2, "stop": ["a"], "seed": 3, "logprobs": 1, "user": "me"}
        shown = {"stream": True, "stream_options": {"include_usage": True}} if number % 2 else {}
        return {"model": self.checkpoint, "prompt": ["ab", "c"], **drawn, **shown}

    def _chat(self, number: int) -> Any:
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]
        drawn = {"max_completion_tokens": 2, "temperature": 0.5, "logprobs": True}
        read = {"top_logprobs": 2, "chat_template_kwargs": {"voice": "a"}}
        shown = {} if number % 2 else {"stream": True}
        return {"model": self.sampler, "messages": messages, **drawn, **read, **shown}

    def _response(self, number: int) -> Any:
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ]
        shown = {} if number % 2 else {"stream": True, "tool_choice": "none"}
        drawn = {"max_output_tokens": 2, "temperature": 0.5, "store": False}
        tool = {"type": "function", "name": "f", "parameters": {}, "strict": False}
        tools = {} if number % 2 else {"tools": [tool]}
        return {"model": self.checkpoint, "input": items, **drawn, **tools, **shown}

    def _message(self, number: int) -> Any:
        use = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": "r", "is_error": True}
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "h"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}, use]},
            {"role": "user", "content": [result]},
        ]
        shown = {"thinking": {"type": "enabled", "budget_tokens": 9}} if number % 2 else {}
        return {"model": self.sampler, "messages": messages, "system": "x", **shown}

    def _sample(self, bodies: Any, number: int) -> Any:
        targets = {
            "data": [1, 2],
            "dtype": "int64",
            "shape": [1, 2],
            "sparse_crow_indices": [0, 2],
            "sparse_col_indices": [0, 1],
        }
        params = {"max_tokens": 2, "stop": ["a"], "top_k": 3, "top_p": 0.5, "temperature": 0.7}
        return bodies.asample(
            self.sampler,
            number,
            num_samples=2,
            sampling_params={**params, "seed": 3},
            target_prompt_logprobs=targets,
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=1,
            prompt_alt_tokens_k=1,
        )

    def target(self, described: str) -> str:
        """The path with this client's objects in it."""
        *_, kind, name = self.checkpoint.split("/")
        return whole(described).format(
            session_id=self.ended, model_id=self.model, kind=kind, name=name
        )

    async def send_json(self, checked: Checked, bodies: Any, rng: random.Random) -> None:
        method, described, body = rng.choices(self.templates(bodies), _WEIGHTS)[0]
        await checked.send(
            method,
            whole(described),
            self.target(described),
            mutated_json(rng, body),
            {"X-API-Key": self.key, "Content-Type": "application/json"},
        )
        if "seq_id" in body and "model_id" in body:
            await self.spend(checked)

    async def send_message(self, checked: Checked, rng: random.Random) -> None:
        head = wire.ForwardBackwardRequest(model_id=self.model, seq_id=self.seq)
        key_bytes = head.SerializeToString()
        body = mutated_message(rng, key_bytes + rng.choice(_MESSAGES), len(key_bytes))
        headers = {"X-API-Key": self.key, "Content-Type": "application/x-protobuf"}
        if rng.random() < 0.3:
            body, headers["Content-Encoding"] = compressed(rng, body)
        path = PREFIX + "/forward_backward"
        await checked.send("POST", path, path, body, headers)
        await self.spend(checked)

    async def spend(self, checked: Checked) -> None:
        """Use up the number with a meaningless request, because later ones would wait for it.

        If the mutated request has taken the number, this one is refused.
        """
        step = {"model_id": self.model, "seq_id": self.seq, "adam_params": {}}
        path = PREFIX + "/optim_step"
        headers = {"X-API-Key": self.key}
        answer = await checked.send("POST", path, path, json.dumps(step).encode(), headers)
        assert answer.status in (200, 422), answer
        self.seq += 1


# One weight per template. Templates that write files to a disk are rarer.
_WEIGHTS = [
    *(10, 5, 5, 2, 8, 5, 5, 12, 2, 2, 2, 8, 2, 5, 8, 15, 5, 8, 5, 5, 5, 3, 3),
    *(3, 3, 2, 3, 2, 4, 4, 4, 4, 4, 2),
]


def _data_of(loss: str, inputs: dict[str, list[float]], sparse: bool = False) -> bytes:
    """A valid request without its key: two datums."""
    datum = wire.Datum()
    datum.model_input.add().encoded_text.tokens = struct.pack("<2i", 1, 2)
    datum.model_input.add().encoded_text.tokens = struct.pack("<1i", 3)
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dtype = wire.DTYPE_INT64
    if sparse:
        targets.shape.extend([3, 4])
        targets.sparse_csr.values = struct.pack("<3q", 5, 6, 7)
        targets.sparse_csr.crow_indices = struct.pack("<4q", 0, 1, 2, 3)
        targets.sparse_csr.col_indices = struct.pack("<3q", 0, 3, 1)
    else:
        targets.dense = struct.pack("<3q", 2, 3, 4)
    for name, values in inputs.items():
        datum.loss_fn_inputs[name].dense = struct.pack(f"<{len(values)}f", *values)
        datum.loss_fn_inputs[name].dtype = wire.DTYPE_FLOAT32
    return wire.ForwardBackwardRequest(data=[datum] * 2, loss_fn=loss).SerializeToString()


def _traced(body: bytes) -> bytes:
    """The request with spans of sampled tokens."""
    request = wire.ForwardBackwardRequest.FromString(body)
    for datum in request.data:
        for spans in (datum.model_input_spans, datum.loss_fn_input_spans):
            spans.add().prompt_tokens.MergeFrom(
                wire.PromptProvenanceSpan(sequence_id="s:sample:0:1:0", length=1)
            )
            spans.add().sampled_tokens.MergeFrom(
                wire.SampledProvenanceSpan(sequence_id="s:sample:0:1:0", length=2)
            )
    return request.SerializeToString()


_POLICY = {"logprobs": [-1.0, -2.0, -0.5], "advantages": [0.5, -0.5, 1.0]}
_MESSAGES = [
    _data_of("cross_entropy", {"weights": [1.0, 0.5, 0.0]}),
    _data_of("cross_entropy", {}, sparse=True),
    _data_of("ppo", _POLICY),
    _data_of("gspo", {**_POLICY, "sequence_ratio_mask": [1.0, 0.0, 1.0]}),
    _traced(_data_of("stable_reinforce", _POLICY)),
]
