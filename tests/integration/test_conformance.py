"""A real server passes every check of ``tuneserve conformance``; a server with a fault fails it.

A fault is made by a transport that changes requests or answers on their way.
"""

import json
import os
import struct
from collections import Counter
from collections.abc import Callable

import httpx
import pytest
from google.protobuf.message import DecodeError

from tests.quick_service import QUICK
from tests.support.command_line import called
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_server.cli.local_server import LocalServer
from tuneserve_server.conformance.checks import chosen
from tuneserve_server.conformance.suite import CHECKS, results
from tuneserve_server.conformance.target import ServerUnderTest


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    os.environ["HF_HUB_OFFLINE"] = "1"
    with LocalServer(tmp_path_factory.mktemp("service"), poll_s="2", **QUICK) as running:
        yield running


def test_this_server_passes_every_check(server):
    told = json.loads(called("conformance", server.url, "--json").stdout)
    assert [each["reason"] for each in told["checks"] if each["outcome"] == "failed"] == []
    assert told["passed"] == len(CHECKS) > 40


class Faulty(httpx.BaseTransport):
    """A connection that changes requests, and answers to requests, to addresses with this end."""

    def __init__(self, end: str, ask: Callable | None = None, answer: Callable | None = None):
        self._inner = httpx.HTTPTransport()
        self._end, self._ask, self._answer = end, ask, answer

    def handle_request(self, request):
        is_meant = request.url.path.endswith(self._end)
        if is_meant and self._ask:
            content = self._ask(request.read(), request)
            headers = {k: v for k, v in request.headers.items() if k != "content-length"}
            request = httpx.Request(request.method, request.url, headers=headers, content=content)
        answer = self._inner.handle_request(request)
        content = answer.read()
        if is_meant and self._answer:
            return self._answer(answer, content)
        return answer

    def close(self):
        self._inner.close()


def changed_json(change):
    """The change of a JSON answer."""

    def answer(response, content):
        if not response.headers.get("content-type", "").endswith("json"):
            return response
        body = json.loads(content)
        change(body)
        return httpx.Response(response.status_code, json=body)

    return answer


def changed_message(kind, change):
    """The change of a protobuf answer."""

    def answer(response, content):
        if "protobuf" not in response.headers.get("content-type", ""):
            return response
        try:
            message = kind.FromString(content)
        except DecodeError:  # the result of another kind of request
            return response
        change(message)
        headers = {"content-type": response.headers["content-type"]}
        return httpx.Response(200, content=message.SerializeToString(), headers=headers)

    return answer


def changed_body(change):
    """The change of a JSON request."""

    def ask(content, request):
        body = json.loads(content)
        change(body)
        return json.dumps(body).encode()

    return ask


def changed_gradient(change):
    def ask(content, request):
        message = wire.ForwardBackwardRequest.FromString(content)
        change(message)
        return message.SerializeToString()

    return ask


def status(code, content=b"{}"):
    return lambda response, _: httpx.Response(code, content=content)


def as_400(response, content):
    failed = b'"error"' in content
    return httpx.Response(400, json={"detail": "x"}) if failed else response


def floats(change):
    """The change of packed float32 numbers."""

    def of(data):
        values = change(list(struct.unpack(f"<{len(data) // 4}f", data)))
        return struct.pack(f"<{len(values)}f", *values)

    return of


def rename_loss(message):
    message.metrics["loss"] = message.metrics.pop("loss:sum")


def mean_loss(message):
    message.metrics["loss:sum"] /= 6


def as_mask(message):
    for datum in message.data:
        weights = datum.loss_fn_inputs["weights"]
        weights.dense = floats(lambda values: [float(x != 0) for x in values])(weights.dense)


def other_logprobs(change):
    def edit(message):
        for each in message.sequences:
            each.logprobs = floats(change)(each.logprobs)

    return edit


def without_stop(message):
    for each in message.sequences:
        if each.stop_reason == wire.STOP_REASON_STOP:
            each.tokens, each.logprobs = each.tokens[:-4], each.logprobs[:-4]


def zero_first(message):
    if message.HasField("prompt_logprobs"):
        values = floats(lambda each: [0.0, *each[1:]])
        message.prompt_logprobs = values(message.prompt_logprobs)


def set_temperature(value):
    return changed_body(lambda body: body["sampling_params"].update(temperature=value))


def new_request_ids():
    count = Counter()

    def change(body):
        count["answers"] += 1
        body["request_id"] += f"-{count['answers']}"

    return changed_json(change)


def times_out(content, request):
    raise httpx.ReadTimeout("too long")


def by_arrival():
    """A server that runs requests as they arrive: it numbers them anew."""
    count = Counter()

    class Arrival(httpx.BaseTransport):
        def __init__(self):
            self._inner = httpx.HTTPTransport()

        def handle_request(self, request):
            content = request.read()
            kind = request.url.path.rpartition("/")[2]
            if kind == "forward_backward":
                message = wire.ForwardBackwardRequest.FromString(content)
                count[message.model_id] += 1
                message.seq_id = count[message.model_id]
                content = message.SerializeToString()
            elif kind == "optim_step":
                body = json.loads(content)
                count[body["model_id"]] += 1
                content = json.dumps({**body, "seq_id": count[body["model_id"]]}).encode()
            headers = {k: v for k, v in request.headers.items() if k != "content-length"}
            sent = httpx.Request(request.method, request.url, headers=headers, content=content)
            return self._inner.handle_request(sent)

        def close(self):
            self._inner.close()

    return Arrival()


OUTPUT, SAMPLED = wire.ForwardBackwardOutput, wire.SampleResponse
POLL = "retrieve_future"
FAULTS = {
    "client-config": lambda: Faulty("client/config", answer=status(404)),
    "session-life": lambda: Faulty("/finish", answer=status(404)),
    "refusals-have-a-body": lambda: Faulty("get_info", answer=status(404, b"")),
    "model-ids": lambda: Faulty(
        POLL, answer=changed_json(lambda body: body.update(model_id="run-1"))
    ),
    "training-runs": lambda: Faulty(
        ":train:0", answer=changed_json(lambda body: body.pop("user_metadata"))
    ),
    "checkpoint-calls": lambda: Faulty("/publish", answer=status(422)),
    "download": lambda: Faulty("adapter_config.json", answer=status(401)),
    "protobuf-results": lambda: Faulty(
        POLL, answer=lambda response, content: httpx.Response(200, json={"metrics": {}})
    ),
    "metric-names": lambda: Faulty(POLL, answer=changed_message(OUTPUT, rename_loss)),
    "no-error-in-success": lambda: Faulty(
        POLL, answer=changed_json(lambda body: body.update(error=None))
    ),
    "order": by_arrival,
    "polls-end-in-time": lambda: Faulty(POLL, ask=times_out),
    "repetition": lambda: Faulty("forward_backward", answer=new_request_ids()),
    "failures": lambda: Faulty(POLL, answer=as_400),
    "cross-entropy-is-a-sum": lambda: Faulty(POLL, answer=changed_message(OUTPUT, mean_loss)),
    "forward-leaves-no-gradient": lambda: Faulty(
        "forward_backward",
        ask=changed_gradient(lambda message: setattr(message, "forward_only", False)),
    ),
    "load-restores": lambda: Faulty(
        "load_weights", ask=changed_body(lambda body: body.update(optimizer=False))
    ),
    "sequence-ids": lambda: Faulty(
        "asample", answer=changed_json(lambda body: body.pop("sample_sequence_ids"))
    ),
    "seeds": lambda: Faulty(
        "asample", ask=changed_body(lambda body: body["sampling_params"].update(seed=1))
    ),
    "greedy": lambda: Faulty("asample", ask=set_temperature(9.0)),
    "stop-tokens": lambda: Faulty(POLL, answer=changed_message(SAMPLED, without_stop)),
    "prompt-logprobs": lambda: Faulty(POLL, answer=changed_message(SAMPLED, zero_first)),
    "sampled-logprobs": lambda: Faulty(
        POLL,
        answer=changed_message(SAMPLED, other_logprobs(lambda lps: [lp - 0.5 for lp in lps])),
    ),
    "temperature": lambda: Faulty(
        POLL, answer=changed_message(SAMPLED, other_logprobs(lambda lps: [lp * 2 for lp in lps]))
    ),
    "frozen-weights": lambda: Faulty(
        "optim_step", ask=changed_body(lambda body: body["adam_params"].update(learning_rate=0.0))
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(server, name):
    target = ServerUnderTest(server.url, "tml-local", transport=FAULTS[name]())
    (found,) = results(chosen(CHECKS, [name]), target)
    target.close()
    assert (found.outcome, bool(found.reason)) == ("failed", True)


def test_weights_that_count_as_a_mask_are_found(server):
    fault = Faulty("forward_backward", ask=changed_gradient(as_mask))
    target = ServerUnderTest(server.url, "tml-local", transport=fault)
    (found,) = results(chosen(CHECKS, ["cross-entropy-is-a-sum"]), target)
    target.close()
    assert found.outcome == "failed" and "-sum(weight * logprob)" in found.reason


def test_a_server_that_is_not_there_fails_every_check_with_its_address():
    target = ServerUnderTest("http://127.0.0.1:9", "tml-local")
    found = list(results(CHECKS, target))
    target.close()
    assert {each.outcome for each in found} == {"failed"}
    assert all("refused" in each.reason.lower() for each in found)


def test_the_command_ends_with_a_reason_for_wrong_arguments():
    assert "must begin with http" in called("conformance", "host:1", status=2).stderr
    assert "no check 'a'" in called("conformance", "--only", "a", status=2).stderr
    listed = json.loads(called("conformance", "--list", "--json").stdout)
    assert [each["name"] for each in listed] == [each.name for each in CHECKS]
    assert all(each["rule"].endswith(".") for each in listed)
