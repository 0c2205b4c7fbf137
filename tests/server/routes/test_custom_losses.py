"""Custom losses: created in a session, run by its models, and harmless to everyone else."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from tests.engine.custom_loss import losses, malformed
from tests.engine.custom_loss.traced import Loss, text_of, theirs
from tests.server.conftest import forward_backward
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.records import CustomLossRecord
from tuneserve_server.commands import custom_losses

pytestmark = pytest.mark.anyio

LOGPROBS = np.array([-0.5, -0.75], "f4")  # of tokens 1, 2, 3 on the fake backend


def created(session: str, number: int, graph: Any) -> dict[str, Any]:
    """The request that creates a loss from its stored form."""
    key = {"session_id": session, "custom_loss_seq_id": number, "type": "create_custom_loss"}
    nodes = {"format": 1, "nodes": graph["nodes"]}
    return {**key, "name": graph["name"], "inputs": graph["inputs"], "graph": nodes}


def graph_of(loss: Loss = losses.entropy_bonus, **ranks: int) -> Any:
    return json.loads(text_of(loss, {"logprobs": 1, **ranks}))


async def loss_of(api: Any, session: str, number: int = 0, **options: Any) -> str:
    answer = await api.post("/create_custom_loss", created(session, number, graph_of()), **options)
    result = await api.result(answer, **options)
    assert result["type"] == "create_custom_loss"
    loss_id: str = result["loss_id"]
    return loss_id


def request_of(model: str, seq_id: int, loss_id: str, **inputs: list[float]) -> bytes:
    """A request of a datum with targets 2 and 3, as the official SDK sends it."""
    request = wire.ForwardBackwardRequest.FromString(forward_backward(model, seq_id))
    request.loss_fn = "custom"
    request.loss_fn_config_v2["loss_id"].text = loss_id
    for name, values in inputs.items():
        tensor = request.data[0].loss_fn_inputs[name]
        tensor.dense, tensor.dtype = np.array(values, "<f4").tobytes(), wire.DTYPE_FLOAT32
    return request.SerializeToString()


async def test_a_created_loss_is_run_by_its_id(service: Any) -> None:
    session = await service.session()
    model = await service.model(session)
    loss_id = await loss_of(service, session)
    answer = await service.forward_backward(model, 1, content=request_of(model, 1, loss_id))
    output = await service.output(answer)
    value, _, _ = theirs(losses.entropy_bonus, LOGPROBS, {})
    assert output.metrics["loss:sum"] == pytest.approx(value)
    data = output.loss_fn_outputs[0].fields["logprobs"].data
    np.testing.assert_array_equal(np.frombuffer(data, "<f4"), LOGPROBS)


async def test_clients_are_told_that_losses_run_here(service: Any) -> None:
    config = await service.post("/client/config", {"sdk_version": "0.38.0"})
    assert config["custom_loss_server_side"] is True


async def test_a_creation_that_is_sent_again_is_the_same_loss(service: Any) -> None:
    session = await service.session()
    body = created(session, 3, graph_of())
    first = await service.post("/create_custom_loss", body)
    other = created(session, 3, graph_of(losses.functions))
    assert await service.post("/create_custom_loss", other) == first
    assert await service.result(first) == await service.result(first)
    record = await service.services.store.get_record(CustomLossRecord, first["request_id"])
    assert record is not None and json.loads(record.graph)["name"] == "entropy_bonus"


async def test_a_graph_that_cannot_be_run_is_refused_through_its_future(service: Any) -> None:
    session = await service.session()
    model = await service.model(session)
    graph = graph_of()
    graph["nodes"][1].update(op="call_function", target="torch.rand_like")
    answer = await service.post("/create_custom_loss", created(session, 0, graph))
    error = await service.error(answer)
    name = graph["nodes"][1]["name"]
    assert f"node {name} ('torch.rand_like')" in error and "may not be random" in error
    body = request_of(model, 1, answer["request_id"])
    assert error in await service.error(await service.forward_backward(model, 1, content=body))
    wrong = await service.post(
        "/create_custom_loss", {"session_id": session, "custom_loss_seq_id": 1}
    )
    assert "graph" in await service.error(wrong)


@pytest.mark.parametrize("number", [-1, 256, 2**40])
async def test_a_session_has_a_limit_of_losses(service: Any, number: int) -> None:
    body = created(await service.session(), number, graph_of())
    response = await service.call("POST", "/create_custom_loss", json=body)
    assert (response.status_code, response.json()["code"]) == (422, "malformed")
    assert "custom_loss_seq_id" in response.json()["detail"]


async def test_a_tenant_has_a_limit_of_losses(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_losses, "MOST_TENANT_LOSSES", 2)
    session = await service.session()
    for number in (0, 1, 0):  # the last is the first again
        await loss_of(service, session, number)
    body = created(await service.session(), 0, graph_of())
    response = await service.call("POST", "/create_custom_loss", json=body)
    assert (response.status_code, response.headers["retry-after"]) == (429, "30")
    assert "you have 2 custom losses" in response.json()["detail"]
    await loss_of(service, await service.session(key="tml-b"), key="tml-b")
    await service.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
    assert await service.result(await service.post("/create_custom_loss", body))


async def test_a_large_graph_is_refused_with_the_limit(service: Any) -> None:
    graph = graph_of()
    long = ["x" * 60] * 4500
    graph["nodes"][1]["args"] = [*graph["nodes"][1]["args"], long]
    answer = await service.post("/create_custom_loss", created(await service.session(), 0, graph))
    assert "the limit is 262144" in await service.error(answer)
    graph["nodes"][1]["args"] = [["x" * 60] * 20_000]
    answer = await service.post("/create_custom_loss", created(await service.session(), 0, graph))
    assert "the limit is 1048576" in await service.error(answer)


async def test_a_loss_of_another_session_or_tenant_is_as_unknown_as_none(service: Any) -> None:
    session, second = await service.session(), await service.session()
    foreign = await loss_of(service, await service.session(key="tml-b"), key="tml-b")
    model = await service.model(session)
    ids = [await loss_of(service, second), foreign, f"{session}:loss:9", "", "x" * 900]
    errors = set()
    for seq_id, loss_id in enumerate(ids, 1):
        body = request_of(model, seq_id, loss_id)
        answer = await service.forward_backward(model, seq_id, content=body)
        errors.add(await service.error(answer))
    assert len(errors) == 1
    assert "names no custom loss of the model's session" in errors.pop()


async def test_the_future_of_a_loss_is_its_tenants(service: Any) -> None:
    session = await service.session()
    theirs_ = await loss_of(service, session)
    for request_id in (theirs_, f"{session}:loss:77"):
        body = {"request_id": request_id}
        response = await service.call("POST", "/retrieve_future", json=body, key="tml-b")
        assert response.status_code == 404
        assert "does not exist, or it is not yours" in response.json()["detail"]


async def test_an_ended_session_creates_no_loss_and_forgets_its_losses(service: Any) -> None:
    session = await service.session()
    loss_id = await loss_of(service, session)
    await service.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
    response = await service.call(
        "POST", "/create_custom_loss", json=created(session, 1, graph_of())
    )
    assert (response.status_code, response.json()["code"]) == (410, "session_ended")
    assert await service.services.store.get_record(CustomLossRecord, loss_id) is None


async def test_a_graph_that_a_client_puts_into_a_request_is_replaced(service: Any) -> None:
    session = await service.session()
    model = await service.model(session)
    loss_id = await loss_of(service, session)
    request = wire.ForwardBackwardRequest.FromString(request_of(model, 1, loss_id))
    request.loss_fn_config_v2["graph"].text = text_of(losses.neg_ll, {"logprobs": 1, "mask": 1})
    content = request.SerializeToString()
    output = await service.output(await service.forward_backward(model, 1, content=content))
    value, _, _ = theirs(losses.entropy_bonus, LOGPROBS, {})
    assert output.metrics["loss:sum"] == pytest.approx(value)


async def test_a_config_of_many_bytes_is_refused(service: Any) -> None:
    session = await service.session()
    model = await service.model(session)
    request = wire.ForwardBackwardRequest.FromString(
        request_of(model, 1, await loss_of(service, session))
    )
    request.loss_fn_config_v2["more"].text = "x" * 5000
    content = request.SerializeToString()
    error = await service.error(await service.forward_backward(model, 1, content=content))
    assert "more than a loss_id" in error


# --- replay and neighbours ------------------------------------------------------------------------


async def trained(api: Any, *, dies: bool) -> bytes:
    """Train with a custom loss and return the outputs of the model afterwards."""
    session = await api.session()
    model = await api.model(session)
    loss_id = await loss_of(api, session)
    for seq_id in (1, 3):
        content = request_of(model, seq_id, loss_id)
        await api.output(await api.forward_backward(model, seq_id, content=content))
        if dies:  # the gradient is lost, and the loss is not there any more
            await api.kill_worker()
            await api.services.store.delete_record(CustomLossRecord, loss_id)
            await api.start_worker()
            loss_id = await loss_of(api, session, seq_id)
        step = {"model_id": model, "seq_id": seq_id + 1, "adam_params": {"learning_rate": 0.01}}
        await api.result(await api.post("/optim_step", step))
    output = await api.output(await api.forward_backward(model, 5))
    data: bytes = output.loss_fn_outputs[0].fields["logprobs"].data
    return data


async def test_a_replay_after_a_workers_death_needs_only_the_requests(service: Any) -> None:
    undisturbed = await trained(service, dies=False)
    assert await trained(service, dies=True) == undisturbed
    assert undisturbed != LOGPROBS.tobytes()


async def hostile(service: Any, count: int) -> tuple[int, int, int]:
    """Create hostile losses as one tenant and run them; count those refused, failed and run."""
    refused = failed = ran = 0
    session = model = ""
    seq_id = 0
    inputs = {name: [1.0, 1.0] for name in ("ref", "chosen", "rejected", "mask", "labels")}
    for i, graph in enumerate(malformed.graphs(3, count)):
        if i % 200 == 0:
            if session:
                ended = {"reason": {"type": "success"}}
                await service.post(f"/sessions/{session}/finish", ended, key="tml-hostile")
            session = await service.session(key="tml-hostile")
            model, seq_id = await service.model(session, key="tml-hostile"), 0
        body = created(session, i % 200, graph)
        response: httpx.Response = await service.call(
            "POST", "/create_custom_loss", json=body, key="tml-hostile"
        )
        assert response.status_code == 200, response.text
        result = await service.result(response.json(), key="tml-hostile")
        if "error" in result:
            assert result["category"] == "user", result
            refused += 1
            continue
        seq_id += 1
        content = request_of(model, seq_id, result["loss_id"], **inputs)
        answer = await service.forward_backward(model, seq_id, content=content, key="tml-hostile")
        poll = await service.poll(answer["request_id"], key="tml-hostile")
        assert poll.status_code == 200, poll.text
        if poll.headers["content-type"] == "application/json":
            assert poll.json()["category"] == "user", poll.text
            failed += 1
        else:
            ran += 1
    return refused, failed, ran


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.nightly)])
async def test_hostile_graphs_lose_nothing_and_leave_another_tenant_as_it_is(
    service: Any, count: int
) -> None:
    session = await service.session()
    model, twin = await service.model(session, 0), await service.model(session, 1)

    async def outputs(of: str, start: int) -> list[bytes]:
        """Two steps of a model; both models have the same seed."""
        found = []
        for seq_id in (start, start + 2):
            response = await service.poll(
                (await service.forward_backward(of, seq_id))["request_id"]
            )
            found.append(response.content)
            step = {"model_id": of, "seq_id": seq_id + 1, "adam_params": {"learning_rate": 0.01}}
            await service.result(await service.post("/optim_step", step))
        return found

    expected = await outputs(twin, 1) + await outputs(twin, 5)
    before = await outputs(model, 1)
    refused, failed, ran = await hostile(service, count)
    assert refused + failed + ran == count
    assert refused and failed and ran
    assert before + await outputs(model, 5) == expected


def test_only_the_future_of_a_loss_has_the_form_of_one() -> None:
    assert custom_losses.is_future("s-1:loss:0")
    assert not custom_losses.is_future("s-1:train:0")
