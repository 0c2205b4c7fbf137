"""Sampling sessions and requests."""

import struct
from dataclasses import replace
from typing import Any

import pytest

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.records import SamplerRecord

pytestmark = pytest.mark.anyio


async def sample(service: Any, body: dict[str, Any]) -> wire.SampleResponse:
    answer = await service.post("/asample", body)
    assert len(answer["sample_sequence_ids"]) == body["num_samples"]
    response = await service.poll(answer["request_id"])
    assert response.headers["content-type"] == "application/x-protobuf", response.text
    return wire.SampleResponse.FromString(response.content)


def tokens(sequence: wire.SampledSequence) -> list[int]:
    return [token for (token,) in struct.iter_unpack("<i", sequence.tokens)]


async def test_samples_arrive_in_the_order_of_their_ids(service: Any, bodies: Any) -> None:
    sampler = await service.sampler(await service.session())
    body = bodies.asample(sampler, 0, num_samples=2)
    answer = await service.post("/asample", body)
    assert answer["sample_sequence_ids"] == [f"{sampler}:0:0", f"{sampler}:0:1"]
    # Sample s of the fake backend under seed 7 has token 7 + s + p at position p, and the prompt
    # has two tokens.
    response = await sample(service, bodies.asample(sampler, 1, num_samples=2))
    assert [tokens(s) for s in response.sequences] == [[9, 10, 11], [10, 11, 12]]


async def test_requests_without_a_seed_get_different_ones(service: Any, bodies: Any) -> None:
    sampler = await service.sampler(await service.session())
    found = set()
    for seq_id in range(8):
        body = bodies.asample(sampler, seq_id, sampling_params={"max_tokens": 1})
        found.add(tokens((await sample(service, body)).sequences[0])[0])
    assert len(found) > 1


async def test_a_checkpoint_can_be_sampled_by_its_path(service: Any, bodies: Any) -> None:
    session = await service.session()
    model = await service.model(session)
    request = {"model_id": model, "seq_id": 1, "path": "s", "kind": "snapshot"}
    path = (await service.result(await service.post("/save_weights_for_sampler", request)))["path"]
    request = {"session_id": session, "sampling_session_seq_id": 3, "model_path": path}
    sampler = (await service.post("/create_sampling_session", request))["sampling_session_id"]
    assert sampler == f"{session}:sample:3"
    assert await service.get(f"/samplers/{sampler}") == {
        "sampler_id": sampler,
        "base_model": "tuneserve/fake",
        "model_path": path,
    }
    await sample(service, bodies.asample(sampler, 0))
    # Deleting the checkpoint does not take the weights from a sampler.
    await service.ok("DELETE", f"/training_runs/{model}/checkpoints/sampler_weights/s")
    service.backend._snapshots.clear()
    await sample(service, bodies.asample(sampler, 1))


@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({}, 400, "base_model and model_path are both missing"),
        ({"base_model": "other/model"}, 400, "'tuneserve/fake'"),
        ({"model_path": "tinker://x/sampler_weights/y"}, 404, "does not exist"),
        ({"model_path": "../../etc/passwd"}, 404, "does not exist"),
        ({"base_model": 3}, 422, "base_model"),
    ],
)
async def test_a_sampling_session_without_a_model_is_refused(
    api: Any, fields: dict[str, Any], status: int, named: str
) -> None:
    request = {"session_id": await api.session(), "sampling_session_seq_id": 0, **fields}
    response = await api.call("POST", "/create_sampling_session", json=request)
    assert (response.status_code, named in response.json()["detail"]) == (status, True)


async def test_a_prompt_may_be_split_anywhere(service: Any, bodies: Any) -> None:
    sampler = await service.sampler(await service.session())
    chunks = [{"type": "encoded_text", "tokens": piece} for piece in ([5], [], [6], [7, 8])]
    body = bodies.asample(sampler, 0, prompt={"chunks": chunks}, prompt_logprobs=True)
    response = await sample(service, body)
    assert len(response.prompt_logprobs) == 4 * 4  # float32 per token


PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
TARGETS = {"data": [1, 2, 3, -1], "dtype": "int64", "shape": [2, 2]}
CSR = {
    "data": [9],
    "dtype": "int64",
    "shape": [2, 4],
    "sparse_crow_indices": [0, 1, 1],
    "sparse_col_indices": [2],
}


async def test_target_logprobs_have_the_layout_of_the_request(service: Any, bodies: Any) -> None:
    sampler = await service.sampler(await service.session())
    dense = bodies.asample(sampler, 0, prompt=PROMPT, target_prompt_logprobs=TARGETS)
    answer = (await sample(service, dense)).target_prompt_logprobs
    assert (list(answer.shape), len(answer.dense)) == ([2, 2], 16)
    sparse = bodies.asample(sampler, 1, prompt=PROMPT, target_prompt_logprobs=CSR)
    csr = (await sample(service, sparse)).target_prompt_logprobs.sparse_csr
    assert struct.unpack("<3q", csr.crow_indices) == (0, 1, 1)
    assert struct.unpack("<q", csr.col_indices) == (2,)


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_logprobs_are_computed_for_as_many_tokens_as_a_training_text_has(
    service: Any, bodies: Any, max_tokens: int
) -> None:
    """A prompt may have one token more than the context of 64. Its last token is a target only."""
    sampler = await service.sampler(await service.session())
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 65}]}
    params = {"max_tokens": max_tokens}
    asked = bodies.asample(sampler, 0, prompt=prompt, prompt_logprobs=True, sampling_params=params)
    answer = await sample(service, asked)
    assert len(answer.prompt_logprobs) == 65 * 4
    (sequence,) = answer.sequences
    assert (sequence.tokens, sequence.logprobs) == (b"", b"")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": {"chunks": []}}, "the prompt has no tokens"),
        ({"prompt": {"chunks": [{"type": "image", "data": "AA==", "format": "png"}]}}, "chunks[0]"),
        ({"prompt": {"chunks": [{"type": "dmel", "dmel": "AA=="}]}}, "encoded_text"),
        ({"prompt": {"chunks": [{"type": "encoded_text"}]}}, "chunks[0].tokens is missing"),
        ({"prompt": {"chunks": [{"tokens": [64]}]}}, "has token 64; token ids are 0 to 63"),
        ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "has token -1"),
        ({"prompt": {"chunks": [{"tokens": [10**40]}]}}, "a number of 133 bits"),
        ({"prompt": {"chunks": [{"tokens": [1] * 64}]}}, "64 tokens; tuneserve/fake has a context"),
        ({"prompt": {"chunks": [{"tokens": [1.5]}]}}, "prompt.chunks.0.tokens.0"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 10**9}, "num_samples is 1000000000"),
        ({"num_samples": "x"}, "num_samples"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens is 0"),
        ({"sampling_params": {"max_tokens": 10**30}}, "max_tokens is a number"),
        ({"sampling_params": {"temperature": -1.0}}, "temperature is -1.0"),
        ({"sampling_params": {"top_p": 0.0}}, "top_p is 0.0"),
        ({"sampling_params": {"top_p": 1.5}}, "top_p is 1.5"),
        ({"sampling_params": {"top_k": -2}}, "top_k is -2"),
        ({"sampling_params": {"seed": -5}}, "seed is -5"),
        ({"sampling_params": {"seed": 2**63}}, "seed is 9223372036854775808"),
        ({"sampling_params": {"stop": ["a", 1]}}, "sampling_params.stop"),
        ({"sampling_params": {"stop": [""]}}, "empty string"),
        ({"sampling_params": {"stop": [-3]}}, "sampling_params.stop has numbers outside"),
        ({"sampling_params": {"stop": [99]}}, "stop token 99"),
        ({"sampling_params": {"stop": ["x"] * 257}}, "257 entries"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs is -1"),
        ({"topk_sample_logprobs": 10**20}, "topk_sample_logprobs is 1000"),
        ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k is -1"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n asks for part"),
        ({"prompt_logprobs_last_n": 2, "prompt_logprobs": True}, "must be 1 to 1"),
        ({"target_prompt_logprobs": {**TARGETS, "shape": [3, 2]}}, "the shape [1, K]"),
        ({"target_prompt_logprobs": {**TARGETS, "shape": [1, 0]}}, "the shape [1, K]"),
        ({"target_prompt_logprobs": {"data": [1]}}, "the shape [1, K]"),
        ({"target_prompt_logprobs": {"data": [-2], "shape": [1, 1]}}, "numbers outside -1"),
        (
            {"target_prompt_logprobs": {**CSR, "shape": [1, 4], "sparse_col_indices": None}},
            "needs both",
        ),
    ],
)
async def test_a_request_that_cannot_be_sampled_says_why(
    service: Any, bodies: Any, fields: dict[str, Any], named: str
) -> None:
    sampler = await service.sampler(await service.session())
    answer = await service.post("/asample", bodies.asample(sampler, 0, **fields))
    assert named in await service.error(answer)


async def test_the_worker_checks_a_request_when_the_api_knows_no_model(
    api: Any, bodies: Any
) -> None:
    sampler = await api.sampler(await api.session())
    body = bodies.asample(sampler, 0, prompt={"chunks": [{"tokens": [64]}]})
    answer = await api.post("/asample", body)
    await api.start_worker()
    assert "64" in await api.error(answer)


async def test_a_sampler_of_live_weights_is_listed_in_its_session(
    service: Any, bodies: Any
) -> None:
    session = await service.session()
    model = await service.model(session)
    request = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "snapshot"}
    answer = await service.post("/save_weights_for_sampler", request)
    result = await service.result(answer)
    assert result["sampling_session_id"] == f"{session}:sample:0"
    await sample(service, bodies.asample(result["sampling_session_id"], 0))
    listed = await service.get(f"/sessions/{session}")
    assert listed["sampler_ids"] == [f"{session}:sample:0"]
    assert listed["training_run_ids"] == [model]


async def test_a_sampler_of_another_base_model_does_not_use_the_served_one(
    service: Any, bodies: Any
) -> None:
    """The operator may have restarted the service with another model."""
    session = await service.session()
    sampler = await service.sampler(session)
    stored = await service.services.store.get_record(SamplerRecord, sampler)
    await service.services.store.put_record(replace(stored, base_model="earlier/model"))
    error = await service.error(await service.post("/asample", bodies.asample(sampler, 0)))
    assert "'earlier/model'" in error and "'tuneserve/fake'" in error


async def test_a_session_that_ends_during_a_samplers_creation_has_no_sampler(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the sampler and the file that it names would never be deleted."""
    session = await api.session()
    store = api.services.store
    put_new = store.put_new_record

    async def overtaken(record: Any) -> Any:
        await store.end_session(session, "interrupted")
        return await put_new(record)

    monkeypatch.setattr(store, "put_new_record", overtaken)
    request = {
        "session_id": session,
        "sampling_session_seq_id": 0,
        "base_model": "tuneserve/fake",
    }
    response = await api.call("POST", "/create_sampling_session", json=request)
    assert (response.status_code, response.json()["code"]) == (410, "session_ended")
    assert (await store.page_of_records(SamplerRecord, tenant=None)).total == 0
