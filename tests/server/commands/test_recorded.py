"""``stable_reinforce`` over HTTP: samples are recorded, and training finds the recordings."""

import asyncio
import struct
import threading
import time
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core import recordings
from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.recordings import SampleKey
from tuneserve_engine.core.records import ModelRecord
from tuneserve_server.commands import recorded
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio
PROMPT = [5, 6]
STAND_IN = "tuneserve_truncated_reinforce"
DAY_S = 86_400.0


class Rollout:
    """A session with a model and a sampling session, and the samples drawn in it."""

    def __init__(self, service: Any, bodies: Any) -> None:
        self.service, self.bodies = service, bodies
        self.session = self.model = self.sampler = ""

    async def begin(self, **options: Any) -> None:
        self.session = await self.service.session(**options)
        self.model = await self.service.model(self.session, **options)
        self.sampler = await self.service.sampler(self.session, **options)

    async def submit(self, seq: int = 1, **fields: Any) -> dict[str, Any]:
        fields = {"record_stability_info": True, "num_samples": 2, **fields}
        body = self.bodies.asample(self.sampler, seq, **fields)
        answer: dict[str, Any] = await self.service.post("/asample", body)
        return answer

    async def sample(self, seq: int = 1, **fields: Any) -> dict[str, list[int]]:
        """The tokens of the sequences, by sequence id."""
        answer = await self.submit(seq, **fields)
        response = await self.service.poll(answer["request_id"])
        drawn = wire.SampleResponse.FromString(response.content).sequences
        tokens = [[t for (t,) in struct.iter_unpack("<i", each.tokens)] for each in drawn]
        return dict(zip(answer["sample_sequence_ids"], tokens, strict=True))

    async def train(self, body: bytes, seq: int = 1) -> Any:
        return await self.service.forward_backward(self.model, seq, content=body)

    def body(self, drawn: dict[str, list[int]], seq: int = 1, **fields: Any) -> bytes:
        request = wire.ForwardBackwardRequest(
            model_id=self.model, seq_id=seq, loss_fn="stable_reinforce", **fields
        )
        for sequence_id, tokens in drawn.items():
            request.data.append(datum(sequence_id, tokens))
        return request.SerializeToString()


def datum(sequence_id: str, tokens: list[int]) -> wire.Datum:
    """The prompt and the sampled tokens, as the cookbook's loop sends them. The advantage is 1."""
    text = [*PROMPT, *tokens[:-1]]
    made = wire.Datum(
        model_input=[wire.Chunk(encoded_text=wire.EncodedTextChunk(tokens=ints("<i4", text)))],
        model_input_spans=[
            span("prompt_tokens", sequence_id, 0, len(PROMPT)),
            span("sampled_tokens", sequence_id, 0, len(tokens) - 1),
        ],
        loss_fn_input_spans=[
            span("prompt_tokens", sequence_id, 1, len(PROMPT) - 1),
            span("sampled_tokens", sequence_id, 0, len(tokens)),
        ],
    )
    targets = [0] * (len(PROMPT) - 1) + tokens
    made.loss_fn_inputs["target_tokens"].CopyFrom(
        wire.Tensor(dense=ints("<i8", targets), dtype=wire.DTYPE_INT64, shape=[len(targets)])
    )
    advantages = [0] * (len(PROMPT) - 1) + [1] * len(tokens)
    made.loss_fn_inputs["advantages"].CopyFrom(
        wire.Tensor(dense=ints("<f4", advantages), dtype=wire.DTYPE_FLOAT32)
    )
    return made


def ints(dtype: str, values: list[int]) -> bytes:
    return np.array(values, dtype).tobytes()


def span(kind: str, sequence_id: str, offset: int, length: int) -> wire.ProvenanceSpan:
    arms = {
        "prompt_tokens": wire.PromptProvenanceSpan,
        "sampled_tokens": wire.SampledProvenanceSpan,
    }
    arm = arms[kind](sequence_id=sequence_id, offset=offset, length=length)
    return wire.ProvenanceSpan(**{kind: arm})


@pytest.fixture
async def rollout(service: Any, bodies: Any) -> Rollout:
    made = Rollout(service, bodies)
    await made.begin()
    return made


async def test_recorded_samples_are_trained_on(rollout: Rollout) -> None:
    drawn = await rollout.sample()
    assert list(drawn) == [f"{rollout.sampler}:1:0", f"{rollout.sampler}:1:1"]
    output = await rollout.service.output(await rollout.train(rollout.body(drawn)))
    assert output.metrics[f"{STAND_IN}/sampled_tokens:sum"] == 6
    assert output.metrics[f"{STAND_IN}/truncated_tokens:sum"] == 0
    # The fake sampler's logprobs equal those of the fake trainer.
    assert output.metrics[f"{STAND_IN}/abs_log_ratio:max"] < 1e-6
    assert set(output.metrics) == {
        "loss:sum",
        *(f"{STAND_IN}/{name}:sum" for name in ("sampled_tokens", "truncated_tokens", "log_ratio")),
        f"{STAND_IN}/abs_log_ratio:max",
    }


async def test_other_losses_have_no_metrics_of_stable_reinforce(rollout: Rollout) -> None:
    output = await rollout.service.output(await rollout.service.forward_backward(rollout.model, 1))
    assert set(output.metrics) == {"loss:sum"}


async def refused(rollout: Rollout, drawn: dict[str, list[int]], seq: int = 1) -> str:
    message: str = await rollout.service.error(await rollout.train(rollout.body(drawn, seq), seq))
    return message


async def test_training_on_an_unrecorded_sample_says_that_recording_was_off(
    rollout: Rollout,
) -> None:
    drawn = await rollout.sample(record_stability_info=False)
    said = await refused(rollout, drawn)
    assert f"data[0].model_input_spans[0] names sequence '{rollout.sampler}:1:0', " in said
    assert "was sampled without record_stability_info" in said
    # The refused request has used its position: later requests do not wait for it.
    good = await rollout.sample(seq=2)
    output = await rollout.service.output(await rollout.train(rollout.body(good, 2), 2))
    assert f"{STAND_IN}/sampled_tokens:sum" in output.metrics


async def test_training_on_an_unfinished_sample_says_to_wait_for_it(api: Any, bodies: Any) -> None:
    rollout = Rollout(api, bodies)
    await api.start_worker()
    await rollout.begin()
    await api.kill_worker()
    answer = await rollout.submit()
    body = rollout.body({each: [9, 10] for each in answer["sample_sequence_ids"]})
    refusal = await rollout.train(body)
    await api.start_worker()
    assert "still being sampled; wait for its result" in await api.error(refusal)


async def test_training_on_a_failed_sample_says_to_leave_it_out(rollout: Rollout) -> None:
    answer = await rollout.submit(prompt={"chunks": []})
    await rollout.service.error(answer)
    drawn = {each: [9, 10] for each in answer["sample_sequence_ids"]}
    assert "its sample failed; leave it out" in await refused(rollout, drawn)


async def test_training_on_an_unknown_sample_says_to_sample_again(rollout: Rollout) -> None:
    drawn = {f"{rollout.sampler}:99:0": [9, 10]}
    assert "this server does not know (any more); sample again" in await refused(rollout, drawn)


async def test_a_sequence_beyond_those_of_the_sample_is_refused(rollout: Rollout) -> None:
    await rollout.sample()
    drawn = {f"{rollout.sampler}:1:2": [9, 10]}
    assert "has 2 sequences: the last number of a sequence_id is 0 to 1" in await refused(
        rollout, drawn
    )


async def test_a_recording_unused_for_long_is_dropped(rollout: Rollout) -> None:
    drawn = await rollout.sample()
    policy = SweepPolicy(session_ttl_s=1e9, result_ttl_s=1e9, sample_ttl_s=1e9)
    await rollout.service.services.store.sweep(time.time() + DAY_S + 60, policy)
    said = await refused(rollout, drawn)
    assert "because no training used it for 86400 s; sample again" in said


async def test_a_recording_dropped_to_make_room_is_reported(rollout: Rollout) -> None:
    first, second = await rollout.sample(1), await rollout.sample(2)
    await rollout.service.services.store.sweep(time.time(), SweepPolicy(recording_bytes=700))
    said = await refused(rollout, first)
    assert "dropped to make room" in said and "max_recording_bytes" in said
    await rollout.service.output(await rollout.train(rollout.body(second, 2), 2))


async def test_recordings_of_another_session_or_tenant_are_not_found(
    rollout: Rollout, bodies: Any
) -> None:
    """The model belongs to another session, and the sample's id alone is not enough."""
    drawn = await rollout.sample()
    other = Rollout(rollout.service, bodies)
    await other.begin()
    assert "the model is of session" in await refused(other, drawn)
    mine = {each.replace(rollout.session, other.session): t for each, t in drawn.items()}
    assert "which this server does not know" in await refused(other, mine, 2)
    found = await rollout.service.services.store.recordings(
        "b", [SampleKey(f"{rollout.sampler}", 1)]
    )
    assert found == ["unknown"]


async def test_a_resent_request_is_the_same_though_the_recording_is_dropped(
    rollout: Rollout,
) -> None:
    body = rollout.body(await rollout.sample())
    first = await rollout.train(body)
    output = await rollout.service.output(first)
    await drop_recordings(rollout)
    assert await rollout.train(body) == first
    assert await rollout.service.output(first) == output


async def drop_recordings(rollout: Rollout) -> None:
    policy = SweepPolicy(session_ttl_s=1e9, result_ttl_s=1e9, sample_ttl_s=1e9, park_s=1e9)
    await rollout.service.services.store.sweep(time.time() + 1.5 * DAY_S, policy)


async def test_an_accepted_request_is_replayed_after_the_recording_is_dropped(
    rollout: Rollout,
) -> None:
    """The new worker inherits nothing. A result other than the client's would mark the model as
    diverged.
    """
    service = rollout.service
    await service.output(await rollout.train(rollout.body(await rollout.sample())))
    await service.kill_worker()
    await drop_recordings(rollout)
    await service.start_worker()
    step = {"model_id": rollout.model, "seq_id": 2, "adam_params": {"learning_rate": 1e-3}}
    assert "error" not in await service.result(await service.post("/optim_step", step))
    model = await service.services.store.get_record(ModelRecord, rollout.model)
    assert model is not None and not model.diverged


async def test_a_malformed_body_fails_in_its_future(rollout: Rollout) -> None:
    drawn = await rollout.sample()
    body = rollout.body(drawn) + b"\x1a\x02\x0a\x7f"  # a datum that ends too early
    assert "no ForwardBackwardRequest message" in await rollout.service.error(
        await rollout.train(body)
    )


async def test_a_request_that_names_too_many_bytes_must_be_split(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = await rollout.sample()
    monkeypatch.setattr(recorded, "_MOST_BYTES", 47)  # two sequences of three tokens have 48
    assert "more than 47 bytes together; split the request" in await refused(rollout, drawn)


async def test_many_recordings_are_read_in_several_steps(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, list[int]] = {}
    for seq in range(1, 6):
        drawn |= await rollout.sample(seq, num_samples=1)
    monkeypatch.setattr(recorded, "_AT_ONCE", 2)
    output = await rollout.service.output(await rollout.train(rollout.body(drawn)))
    assert output.metrics[f"{STAND_IN}/sampled_tokens:sum"] == 15


async def test_of_long_sequences_only_the_named_tokens_are_retained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request of some kilobytes names one token of each of 40 MiB.

    Decoding runs in threads, and the recordings of one answer, 4 MiB, are copied meanwhile.
    """
    long = np.full(2**17, 7, np.int32), np.zeros(2**17, np.float32)
    body = recordings.encode(2, [long])
    threads = set()
    decode = recordings.decode

    def decoded(recording: bytes) -> Any:
        threads.add(threading.current_thread())
        return decode(recording)

    class Store:
        async def recordings(self, tenant: str, keys: list[SampleKey]) -> list[bytes]:
            return [bytes(bytearray(body)) for _ in keys[:4]]

    monkeypatch.setattr(recordings, "decode", decoded)
    caller: Any = SimpleNamespace(settings=ApiSettings(), store=Store(), tenant="a")
    request = wire.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="stable_reinforce")
    for seq in range(40):
        request.data.append(datum(f"s:sample:0:{seq}:0", [7]))
    sent = request.SerializeToString()
    model: Any = SimpleNamespace(parent="s")
    tracemalloc.start()
    made = wire.ForwardBackwardRequest.FromString(await recorded.joined(caller, model, sent))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(made.data) == 40
    assert most < 12 * 2**20
    assert threads and threading.main_thread() not in threads


async def test_recordings_are_looked_up_for_one_request_at_a_time(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up takes its memory once."""
    drawn = await rollout.sample()
    store = rollout.service.services.store
    read = store.recordings
    now = most = 0

    async def counted(*asked: Any) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        found = await read(*asked)
        now -= 1
        return found

    monkeypatch.setattr(store, "recordings", counted)
    sent = [rollout.train(rollout.body(drawn, seq), seq) for seq in range(1, 6)]
    for each in await asyncio.gather(*sent):
        await rollout.service.output(each)
    assert most == 1


class TestTurnedOff:
    @pytest.fixture
    def settings(self, tmp_path: Any) -> ApiSettings:
        return ApiSettings(
            data_dir=tmp_path,
            base_model_name="tuneserve/fake",
            poll_s=0.2,
            stable_reinforce=False,
        )

    async def test_a_disabled_loss_is_refused_with_its_alternative(self, rollout: Rollout) -> None:
        drawn = await rollout.sample()
        said = await refused(rollout, drawn)
        assert "'stable_reinforce' is turned off here" in said and "importance_sampling" in said
        key = SampleKey(rollout.sampler, 1)
        assert await rollout.service.services.store.recordings("a", [key]) == ["unknown"]
