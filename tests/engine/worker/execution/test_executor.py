"""Every kind of job on a backend of known numbers, and the neighbours of bad jobs."""

import errno
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyrage
import pytest
from safetensors.numpy import load_file
from tinker import types
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)
from tinker.types.save_weights_for_sampler_response import SaveWeightsForSamplerResponseInternal

from tests.support.fake_backend import FakeBackend
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import DeviceFailed, SampleResult, SamplingRequest, TrainBatch
from tuneserve_engine.core import jobs
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.errors import ServerError
from tuneserve_engine.core.jobs import (
    JSON,
    PROTOBUF,
    CreateModel,
    Job,
    JobKind,
    LoadWeights,
    OptimStep,
    Outcome,
    SampleCommand,
    SaveWeights,
    encode,
)
from tuneserve_engine.core.records import CheckpointKind, CheckpointRecord, SamplerRecord, Update
from tuneserve_engine.store.files import FileStore, new_file_id
from tuneserve_engine.worker.codecs import training
from tuneserve_engine.worker.execution import outcomes
from tuneserve_engine.worker.execution.executor import JobExecutor

CONFIG = AdapterConfig(rank=4, alpha=1.0, seed=7)  # seed 7: every entry of A is 1
RISE = AdamwParams(learning_rate=2**-10, beta1=0.0, beta2=0.0, eps=0.0)
"""One step moves every entry of B by 2^-10, all in the direction of the gradient's sign."""
SHIFT = 240 / 1024
"""The change of every logprob by one such step: scale 1/4 times (7 projections · 2 layers +
unembedding) times 4 ranks times the sums 4 of A and 4/1024 of B.
"""
TRAINING, SAMPLER = CheckpointKind.TRAINING, CheckpointKind.SAMPLER
EXTERNAL = CheckpointKind.EXTERNAL


def training_body(*data: dict[str, Any], loss: str = "cross_entropy", **fields: Any) -> bytes:
    """A ``forward_backward`` body. Keys of a datum: tokens, and any loss inputs."""
    body = wire.ForwardBackwardRequest(loss_fn=loss, **fields)
    for each in data:
        datum = body.data.add()
        inputs = dict(each)
        tokens = np.array(inputs.pop("tokens"), "<i4").tobytes()
        datum.model_input.add().encoded_text.tokens = tokens
        for name, values in inputs.items():
            whole = name == "target_tokens"
            datum.loss_fn_inputs[name].dtype = wire.DTYPE_INT64 if whole else wire.DTYPE_FLOAT32
            datum.loss_fn_inputs[name].dense = np.array(values, "<i8" if whole else "<f4").tobytes()
    return body.SerializeToString()


DATUM = {"tokens": [1, 2], "target_tokens": [2, 3]}  # logprobs -(1+3)/8 and -(1+5)/8
GOOD = training_body(DATUM)


class World:
    """A job executor on a fake device and a real disk, and jobs for it."""

    def __init__(self, root: Path, backend: FakeBackend | None = None, **given: Any) -> None:
        self.backend = backend or FakeBackend()
        self.files = FileStore(root)
        self.executor = JobExecutor(self.backend, self.files, **given)
        self._count = 0

    def job(self, kind: JobKind, payload: bytes = b"", model: str | None = "m") -> Job:
        self._count += 1
        return Job(
            tenant="t",
            kind=kind,
            scope=model or "sampler",
            seq=self._count,
            payload=payload,
            model_id=model,
            position=None if model is None else self._count,
            request_id=f"r{self._count}",
            release=self._count,
        )

    def run(self, *batch: Job) -> list[Outcome]:
        outcomes = self.executor.execute_batch(batch).outcomes()
        assert [outcome.request_id for outcome in outcomes] == [job.request_id for job in batch]
        return outcomes

    def create(self, model: str = "m", config: AdapterConfig = CONFIG) -> Outcome:
        command = CreateModel("tuneserve/fake", config)
        job = self.job(JobKind.CREATE_MODEL, encode(command), model)
        return self.run(replace(job, position=0))[0]

    def gradient(self, payload: bytes = GOOD, model: str = "m") -> Job:
        return self.job(JobKind.FORWARD_BACKWARD, payload, model)

    def step(self, params: AdamwParams = RISE, model: str = "m") -> Outcome:
        return self.run(self.job(JobKind.OPTIM_STEP, encode(OptimStep(params)), model))[0]

    def train(self, model: str = "m") -> None:
        for outcome in self.run(self.gradient(model=model)):
            assert outcome.rejection is None
        assert self.step(model=model).rejection is None

    def save(self, kind: CheckpointKind, file_id: str = "", **fields: Any) -> Outcome:
        file_id = file_id or new_file_id()
        fields = {"checkpoint": record(kind, file_id), **fields}
        command = SaveWeights(kind, file_id, **fields)
        return self.run(self.job(JobKind.SAVE_WEIGHTS, encode(command)))[0]

    def load(self, file_id: str, model: str = "m", **fields: Any) -> Outcome:
        fields = {"optimizer": True, **fields}
        command = LoadWeights(file_id=file_id, path="tinker://m/weights/a", **fields)
        job = self.job(JobKind.LOAD_WEIGHTS, encode(command), model)
        return self.run(replace(job, position=0) if command.config else job)[0]

    def sample(self, file_id: str | None = None, **fields: Any) -> Job:
        fields = {"prompt": [5, 6], "seed": 10, "max_tokens": 3, **fields}
        return self.job(JobKind.SAMPLE, encode(SampleCommand(file_id=file_id, **fields)), None)

    def state(self, model: str = "m") -> AdapterState:
        return self.backend.adapter_state(model, optimizer=True)


def record(kind: CheckpointKind, file_id: str) -> CheckpointRecord:
    return CheckpointRecord(
        key=f"tinker://m/{kind}/a",
        tenant="t",
        parent="m",
        kind=kind,
        name="a",
        file_id=file_id,
        base_model="tuneserve/fake",
        config=CONFIG,
        created_s=1.0,
    )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "files")


@pytest.fixture
def new_world(tmp_path: Path) -> Callable[..., World]:
    """Worlds with separate disks."""
    return lambda backend=None: World(tmp_path / new_file_id(), backend)


def message(outcome: Outcome, category: str = "user") -> str:
    """The reason why the job failed, in the expected category. No record may have changed."""
    assert outcome.rejection is not None
    assert outcome.rejection.category == category
    assert outcome.body == b""
    assert outcome.checkpoint is None and outcome.sampler is None
    return outcome.rejection.message


def body(outcome: Outcome) -> Any:
    assert outcome.rejection is None, outcome.rejection
    assert outcome.content_type == JSON
    return json.loads(outcome.body)


def trained(outcome: Outcome) -> types.ForwardBackwardOutput:
    assert outcome.rejection is None, outcome.rejection
    assert outcome.content_type == PROTOBUF
    return deserialize_forward_backward_output(outcome.body)


def sampled(outcome: Outcome) -> types.SampleResponse:
    assert outcome.rejection is None, outcome.rejection
    assert outcome.content_type == PROTOBUF
    return deserialize_sample_response(outcome.body)


def assert_same(a: AdapterState, b: AdapterState) -> None:
    assert (a.config, a.step) == (b.config, b.step)
    for part in ("weights", "first_moment", "second_moment"):
        mine, theirs = getattr(a, part), getattr(b, part)
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name].tobytes() == theirs[name].tobytes()


# --- each kind of job ----------------------------------------------------------------------------


def test_a_created_model_is_ready_and_answers_as_the_sdk_expects(world: World) -> None:
    outcome = world.create()
    assert types.CreateModelResponse.model_validate(body(outcome)).model_id == "m"
    assert outcome.updates == (Update("model", "m", {"status": "ready"}),)


def test_a_gradient_answers_with_logprobs_and_the_summed_loss(world: World) -> None:
    world.create()
    longer = {"tokens": [3, 0, 4], "target_tokens": [0, 4, 3], "weights": [0.0, 2.0, -1.0]}
    (outcome,) = world.run(world.gradient(training_body(DATUM, longer)))
    output = trained(outcome)
    read = [each["logprobs"].to_numpy().tolist() for each in output.loss_fn_outputs]
    assert read == [[-0.5, -0.75], [-0.5, -0.625, -1.0]]
    assert output.metrics == {"loss:sum": 0.5 + 0.75 + 2 * 0.625 - 1.0}


def test_forward_only_leaves_no_gradient_to_step_on(world: World) -> None:
    world.create()
    (outcome,) = world.run(world.gradient(training_body(DATUM, forward_only=True)))
    assert trained(outcome).metrics == {"loss:sum": 1.25}
    assert body(world.step()) == {"metrics": {"grad_norm": 0.0}}
    assert not any(x.any() for name, x in world.state().weights.items() if name.endswith("B"))


def test_a_step_applies_the_accumulated_gradient_and_clears_it(world: World) -> None:
    world.create()
    world.run(world.gradient(), world.gradient(), world.gradient())
    metrics = types.OptimStepResponse.model_validate(body(world.step())).metrics
    # Three gradients of slope -2, times scale 1/4, times 4 (a column of A), in each entry of B.
    entries = sum(x.size for name, x in world.state().weights.items() if name.endswith("B"))
    assert metrics == {"grad_norm": pytest.approx(6 * entries**0.5)}
    (outcome,) = world.run(world.gradient(training_body(DATUM, forward_only=True)))
    assert trained(outcome).metrics == {"loss:sum": 1.25 - 2 * SHIFT}
    assert body(world.step()) == {"metrics": {"grad_norm": 0.0}}


def test_a_training_checkpoint_resumes_bit_for_bit(new_world: Callable[[], World]) -> None:
    world, params = new_world(), AdamwParams(learning_rate=0.01, weight_decay=0.1)
    world.create()
    world.run(world.gradient())
    world.step(params)
    file_id = new_file_id()
    outcome = world.save(TRAINING, file_id)
    assert types.SaveWeightsResponse.model_validate(body(outcome)).path == "tinker://m/weights/a"
    assert outcome.checkpoint is not None and not outcome.overwrite
    (file,) = world.files.path(file_id).iterdir()
    assert outcome.checkpoint.size_bytes == file.stat().st_size
    loaded = world.load(file_id, "copy", config=CONFIG)
    assert types.LoadWeightsResponse.model_validate(body(loaded)).model_id == "copy"
    assert loaded.updates == (Update("model", "copy", {"status": "ready"}),)
    for model in ("m", "copy"):
        world.run(world.gradient(model=model))
        world.step(params, model)
    assert_same(world.state("copy"), world.state("m"))
    assert world.state("copy").step == 2


def test_loading_without_the_optimizer_resets_it(world: World) -> None:
    world.create()
    world.train()
    file_id = new_file_id()
    world.save(TRAINING, file_id)
    weights = world.state().weights
    world.train()
    world.run(world.gradient())  # the load drops the accumulated gradient
    outcome = world.load(file_id, optimizer=False)
    assert outcome.updates == ()  # the model was ready before
    state = world.state()
    assert state.step == 0
    assert not any(x.any() for x in (*state.first_moment.values(), *state.second_moment.values()))
    assert_same(replace(state, weights=weights), state)
    assert body(world.step()) == {"metrics": {"grad_norm": 0.0}}


@pytest.mark.parametrize("kind", [SAMPLER, EXTERNAL])
def test_named_saves_answer_with_their_path(world: World, kind: CheckpointKind) -> None:
    world.create()
    outcome = world.save(kind, overwrite=True)
    response = {
        SAMPLER: types.SaveWeightsForSamplerResponse,
        EXTERNAL: types.SaveWeightsExternalResponse,
    }[kind]
    assert response.model_validate(body(outcome)).path == f"tinker://m/{kind}/a"
    assert outcome.overwrite


def test_an_unnamed_sampler_save_answers_with_its_session(world: World) -> None:
    world.create()
    sampler = SamplerRecord("s:sample:1", "t", "s", "tuneserve/fake", 1.0, file_id=new_file_id())
    outcome = world.save(SAMPLER, str(sampler.file_id), checkpoint=None, sampler=sampler)
    response = SaveWeightsForSamplerResponseInternal.model_validate(body(outcome))
    assert (response.path, response.sampling_session_id) == (None, "s:sample:1")
    folder = world.files.path(str(sampler.file_id))
    size = sum(member.stat().st_size for member in folder.iterdir())
    assert (outcome.sampler, outcome.checkpoint) == (replace(sampler, size_bytes=size), None)


@pytest.mark.acceptance("S8")
@pytest.mark.parametrize("kind", CheckpointKind)
def test_a_checkpoint_of_a_model_with_a_gradient_excludes_the_gradient(
    world: World, kind: CheckpointKind
) -> None:
    world.create()
    world.train()
    world.run(world.gradient())
    assert world.backend.adapter_state("m", optimizer=True, accumulator=True).accumulator
    file_id = new_file_id()
    world.save(kind, file_id)
    keys = {
        key.partition("/")[0] if "/" in key else key.rpartition(".lora_")[2]
        for member in world.files.members(file_id)
        if member.endswith(".safetensors")
        for key in load_file(world.files.path(file_id) / member)
    }
    optimizer = {"first_moment", "second_moment"}
    assert (
        keys
        == {
            CheckpointKind.TRAINING: {"weights"} | optimizer,
            CheckpointKind.SAMPLER: {"weights"},
            CheckpointKind.EXTERNAL: {"A.weight", "B.weight"},
        }[kind]
    )


def test_an_export_has_pefts_files_encrypted_on_request(world: World) -> None:
    world.create()
    plain, sealed = new_file_id(), new_file_id()
    world.save(EXTERNAL, plain)
    key = pyrage.x25519.Identity.generate()
    world.save(EXTERNAL, sealed, age_recipients=(str(key.to_public()),))
    names = ["adapter_config.json", "adapter_model.safetensors"]
    assert world.files.members(plain) == names
    assert world.files.members(sealed) == [f"{name}.age" for name in names]
    for name in names:
        data = (world.files.path(sealed) / f"{name}.age").read_bytes()
        assert pyrage.decrypt(data, [key]) == (world.files.path(plain) / name).read_bytes()
    outcome = world.save(EXTERNAL, age_recipients=("nobody",))
    assert "'nobody'" in message(outcome)


def test_the_base_model_is_sampled_without_a_file(world: World) -> None:
    (outcome,) = world.run(world.sample(num_samples=2, prompt_logprobs=True))
    answer = sampled(outcome)
    assert [each.tokens for each in answer.sequences] == [[12, 13, 14], [13, 14, 15]]
    assert answer.sequences[0].logprobs == [-3 / 8, -2 / 8, -4 / 8]  # after 6, 12 and 13
    assert answer.sequences[0].stop_reason == "length"
    assert answer.prompt_logprobs == [None, -4 / 8]


class Noting(FakeBackend):
    """Notes whose requests it samples."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: list[str] = []

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SampleResult]:
        self.owners += [each.owner for each in requests]
        return super().sample(requests)


def test_a_sample_belongs_to_the_tenant_that_asked_for_it(
    new_world: Callable[..., World],
) -> None:
    """A backend shares the pages of a prompt among the samples of one owner only."""
    backend = Noting()
    world = new_world(backend)
    world.run(world.sample(), replace(world.sample(), tenant="another"))
    assert backend.owners == ["t", "another"]


def test_a_sampler_keeps_the_weights_of_its_save(world: World) -> None:
    world.create()
    world.train()
    file_id = new_file_id()
    world.save(SAMPLER, file_id)
    (before,) = world.run(world.sample(file_id, prompt_logprobs=True))
    assert sampled(before).prompt_logprobs == [None, -0.5 + SHIFT]
    world.train()
    (after,) = world.run(world.sample(file_id, prompt_logprobs=True))
    assert after.body == before.body


def test_a_batch_may_sample_more_snapshots_than_fit(new_world: Callable[..., World]) -> None:
    world = new_world(FakeBackend(max_snapshots=2))
    world.create()
    files = [new_file_id() for _ in range(4)]
    for file_id in files:
        world.train()
        world.save(SAMPLER, file_id)
    jobs = [world.sample(file_id, prompt_logprobs=True) for file_id in files]
    alone = [world.run(job)[0].body for job in jobs]
    assert len(set(alone)) == 4
    assert [outcome.body for outcome in world.run(*jobs)] == alone


def test_an_unloaded_model_is_gone_and_unloading_again_is_harmless(world: World) -> None:
    world.create()
    for _ in range(2):
        assert body(world.run(world.job(JobKind.UNLOAD_MODEL))[0]) == {}
    with pytest.raises(ServerError):
        world.state()
    (outcome,) = world.run(world.gradient())
    assert "model m is not loaded" in message(outcome)


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        (replace(CONFIG, rank=0), ["rank is 0", "1 to 32"]),
        (replace(CONFIG, rank=33), ["rank is 33", "1 to 32"]),
        (
            replace(CONFIG, train_attn=False, train_mlp=False, train_unembed=False),
            ["trains nothing", "at least one"],
        ),
    ],
)
def test_a_failed_creation_fails_the_model_and_its_later_jobs(
    world: World, config: AdapterConfig, fragments: list[str]
) -> None:
    outcome = world.create(config=config)
    text = message(outcome)
    assert all(fragment in text for fragment in fragments), text
    assert outcome.updates == (Update("model", "m", {"status": "failed"}),)
    followers = [world.run(world.gradient())[0], world.step(), world.save(TRAINING)]
    for follower in followers:
        assert "its creation failed; create a new model" in message(follower)
        assert follower.updates == ()


def test_a_creation_from_a_missing_file_fails_the_model(world: World) -> None:
    outcome = world.load(new_file_id(), config=CONFIG)
    assert "deleted or has expired" in message(outcome)
    assert outcome.updates == (Update("model", "m", {"status": "failed"}),)


def test_a_load_into_another_shape_is_refused_and_changes_nothing(world: World) -> None:
    small = replace(CONFIG, rank=2, train_mlp=False)
    world.create("m")
    world.create("small", small)
    world.train("m")
    file_id = new_file_id()
    world.save(TRAINING, file_id)
    before = world.state("small")
    text = message(world.load(file_id, "small"))
    assert "tinker://m/weights/a has rank 4" in text and "rank 2" in text
    assert "create a new model from the checkpoint" in text
    assert_same(world.state("small"), before)


def test_an_optimizer_that_was_not_saved_cannot_be_loaded(world: World) -> None:
    world.create()
    world.train()
    file_id = new_file_id()
    world.save(SAMPLER, file_id)
    before = world.state()
    assert "has no optimizer state; load it without" in message(world.load(file_id))
    assert_same(world.state(), before)
    assert body(world.load(file_id, optimizer=False))["path"] == "tinker://m/weights/a"


def test_a_damaged_checkpoint_is_a_server_error_and_changes_nothing(world: World) -> None:
    world.create()
    file_id = new_file_id()
    world.files.write(file_id, {"adapter.safetensors": b"torn"})
    before = world.state()
    assert "damaged" in message(world.load(file_id), "server")
    assert_same(world.state(), before)
    good, bad = world.run(world.sample(), world.sample(file_id))
    assert "damaged" in message(bad, "server")
    assert sampled(good).sequences[0].tokens == [12, 13, 14]


def test_a_full_disk_fails_the_save_alone_and_the_file_can_be_written_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create()
    world.train()
    kept, file_id = new_file_id(), new_file_id()
    world.save(TRAINING, kept)
    with monkeypatch.context() as full:

        def no_space(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr("tuneserve_engine.store.files._write_synced", no_space)
        text = message(world.save(TRAINING, file_id), "server")
    assert "No space left on device" in text and "earlier checkpoints are intact" in text
    assert world.files.ids() == {kept}
    assert body(world.save(TRAINING, file_id)) == {"path": "tinker://m/weights/a"}
    assert body(world.load(kept))["model_id"] == "m"


def test_a_save_has_the_state_of_its_turn_whenever_its_file_is_written(world: World) -> None:
    world.create()
    world.train()
    saved, file_id = world.state(), new_file_id()
    command = SaveWeights(TRAINING, file_id, record(TRAINING, file_id))
    executed = world.executor.execute_batch([world.job(JobKind.SAVE_WEIGHTS, encode(command))])
    world.train()
    world.executor.forget_model("m")
    assert world.files.ids() == set()  # the device has not waited for the disk
    (outcome,) = executed.outcomes()
    assert body(outcome) == {"path": "tinker://m/weights/a"}
    world.load(file_id, "copy", config=CONFIG)
    assert_same(world.state("copy"), saved)


def test_a_device_failure_during_a_save_is_not_reported_as_the_jobs_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> AdapterState:
        raise DeviceFailed("it fell off the bus")

    world.create()
    monkeypatch.setattr(world.backend, "adapter_state", lost)
    with pytest.raises(DeviceFailed):
        world.save(TRAINING)


def test_a_save_without_a_target_is_a_server_error(world: World) -> None:
    world.create()
    assert "neither" in message(world.save(SAMPLER, checkpoint=None), "server")


@pytest.mark.parametrize("kind", list(JobKind))
def test_a_payload_that_cannot_be_decoded_ends_in_an_error(world: World, kind: JobKind) -> None:
    world.create()
    outcome = world.run(world.job(kind, b"\xc1"))[0]
    if kind != JobKind.UNLOAD_MODEL:  # it has no payload
        message(outcome, "user" if kind == JobKind.FORWARD_BACKWARD else "server")


# --- neighbours ----------------------------------------------------------------------------------


def poisoned(world: World, model: str) -> None:
    """Make the model's logprobs infinite."""
    world.create(model)
    world.run(world.gradient(model=model))
    world.step(replace(RISE, learning_rate=1e38), model)


BAD: dict[str, tuple[Callable[[World], Job], str]] = {
    "bytes": (lambda w: w.gradient(b"\xff"), "ForwardBackwardRequest"),
    "token": (
        lambda w: w.gradient(training_body({"tokens": [64], "target_tokens": [1]})),
        "token 64 at position 0",
    ),
    "length": (
        lambda w: w.gradient(training_body({"tokens": [1] * 65, "target_tokens": [1] * 65})),
        "65 tokens",
    ),
    "NaN": (
        lambda w: w.gradient(training_body({**DATUM, "weights": [1.0, np.nan]})),
        "nan at position 1",
    ),
    "loss": (lambda w: w.gradient(training_body(DATUM, loss="mse")), "'mse'"),
    "overflow": (
        lambda w: w.gradient(training_body({**DATUM, "weights": [3e38, 3e38]})),
        "not finite; nothing was accumulated",
    ),
    "model": (lambda w: w.gradient(model="ghost"), "ghost is not loaded"),
    "poison": (lambda w: w.gradient(model="sick"), "not finite; nothing was accumulated"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_bad_gradient_fails_alone_and_changes_no_bit_of_others(
    new_world: Callable[[], World], case: str, place: int
) -> None:
    bodies, states = [], []
    for company in (False, True):
        world = new_world()
        for model in ("m", "a", "b"):
            world.create(model)
        poisoned(world, "sick")
        two = training_body(DATUM, {"tokens": [9] * 20, "target_tokens": [8] * 20})
        batch = [world.gradient(model="a"), world.gradient(two, "b"), world.gradient(model="a")]
        if company:
            batch.insert(place, BAD[case][0](world))
        outcomes = world.run(*batch)
        if company:
            assert BAD[case][1] in message(outcomes.pop(place))
        bodies.append([outcome.body for outcome in outcomes])
        assert all(bodies[-1])
        for model in ("m", "a", "b"):
            world.step(AdamwParams(), model)
        states.append([world.state(model) for model in ("m", "a", "b")])
    assert bodies[0] == bodies[1]
    for alone, together in zip(*states, strict=True):
        assert_same(alone, together)


def test_a_bad_sample_fails_alone(world: World) -> None:
    good = [world.sample(seed=1), world.sample(seed=2)]
    alone = [outcome.body for outcome in world.run(*good)]
    bad = [
        world.sample(prompt=[64]),
        world.sample(file_id=new_file_id()),
        world.sample(top_p=0.0),
    ]
    first, one, two, three, last = world.run(good[0], *bad, good[1])
    assert [first.body, last.body] == alone
    assert "token 64" in message(one)
    assert "deleted or has expired" in message(two)
    assert "top_p is 0.0" in message(three)


def test_a_diverged_sampler_fails_alone_and_says_so(world: World) -> None:
    world.create()
    state = world.state()
    state.weights["q_proj.B"][:] = math.nan
    world.backend.load_adapter("m", state)
    file_id = new_file_id()
    assert world.save(SAMPLER, file_id).rejection is None
    (alone,) = world.run(world.sample())
    good, bad = world.run(world.sample(), world.sample(file_id))
    assert good.body == alone.body
    assert "not finite" in message(bad) and "before the training diverged" in message(bad)


def test_a_checkpoint_of_another_base_model_is_neither_loaded_nor_sampled(
    new_world: Callable[..., World],
) -> None:
    here = new_world()
    here.create()
    file_id = new_file_id()
    here.save(SAMPLER, file_id)
    chat = FakeBackend(replace(here.backend.info, name="org/chat"))
    there = JobExecutor(chat, here.files)
    sample = here.sample(file_id)
    load = LoadWeights(file_id, "tinker://m/weights/a", optimizer=False, config=CONFIG)
    for job in (sample, here.job(JobKind.LOAD_WEIGHTS, encode(load))):
        (outcome,) = there.execute_batch([job]).outcomes()
        assert "trained on 'tuneserve/fake' and this server runs 'org/chat'" in message(outcome)


class Fragile(FakeBackend):
    """A backend that raises for every batch with ``victim`` in it."""

    victim: Any = None
    calls = 0

    def forward_backward(self, batch: TrainBatch, *between: Any) -> Any:
        self.calls += 1
        if self.victim in batch.adapter_ids:
            raise RuntimeError("RESOURCE_EXHAUSTED: 3 secrets at 0x7f")
        return super().forward_backward(batch, *between)

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SampleResult]:
        self.calls += 1
        if self.victim in {request.seed for request in requests}:
            raise RuntimeError("RESOURCE_EXHAUSTED: 3 secrets at 0x7f")
        return super().sample(requests)


def test_when_a_batch_fails_each_gradient_runs_alone(
    new_world: Callable[..., World],
) -> None:
    states = []
    for victim in (None, "b"):
        world = new_world(Fragile())
        for model in ("a", "b", "c"):
            world.create(model)
        world.backend.victim = victim
        outcomes = world.run(*[world.gradient(model=model) for model in ("a", "b", "c", "a")])
        if victim:
            text = message(outcomes[1], "server")
            assert "internal error" in text and "secret" not in text
            assert world.backend.calls == 1 + 4
        for model in ("a", "c"):
            world.step(AdamwParams(), model)
        states.append([world.state(model) for model in ("a", "c")])
        for at in (0, 2, 3):
            assert trained(outcomes[at]).metrics == {"loss:sum": 1.25}
    for without, with_victim in zip(*states, strict=True):
        assert_same(without, with_victim)


def test_when_a_batch_fails_each_sample_runs_alone(
    new_world: Callable[..., World],
) -> None:
    world = new_world(Fragile())
    world.backend.victim = 2
    one, two, three = world.run(*[world.sample(seed=seed) for seed in (1, 2, 3)])
    assert "internal error" in message(two, "server")
    assert sampled(one).sequences[0].tokens == [3, 4, 5]
    assert sampled(three).sequences[0].tokens == [5, 6, 7]


def test_a_job_that_fails_alone_is_not_retried(new_world: Callable[..., World]) -> None:
    world = new_world(Fragile())
    world.create()
    world.backend.victim = "m"
    (outcome,) = world.run(world.gradient())
    message(outcome, "server")
    assert world.backend.calls == 1


def test_an_answer_that_cannot_be_encoded_does_not_repeat_the_batchs_gradients(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create("a")
    world.create("b")
    encode_output = training.encode_output

    def fail_long(logprobs: Sequence[Any], *more: Any) -> bytes:
        if len(logprobs) > 1:
            raise MemoryError
        return encode_output(logprobs, *more)

    monkeypatch.setattr(training, "encode_output", fail_long)
    good, bad = world.run(
        world.gradient(model="a"), world.gradient(training_body(DATUM, DATUM), "b")
    )
    message(bad, "server")
    assert trained(good).metrics == {"loss:sum": 1.25}
    entries = sum(x.size for name, x in world.state("a").weights.items() if name.endswith("B"))
    norm = body(world.step(model="a"))["metrics"]["grad_norm"]
    assert norm == pytest.approx(2 * entries**0.5)  # one gradient of slope -2, not two


def test_a_result_too_large_to_store_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "MAX_BODY_BYTES", 100)
    small, large = world.run(world.sample(), world.sample(max_tokens=40))
    sampled(small)
    assert "the limit is 100; ask for fewer" in message(large)


def test_the_largest_gradient_answer_fits() -> None:
    """Otherwise it would be refused after its gradient was added."""
    logprobs = [np.zeros((1, 1), np.float32)] * training.MAX_DATUMS
    overhead = len(training.encode_output(logprobs, 0.0)) - 4 * training.MAX_DATUMS
    assert 4 * training.MAX_TARGET_CELLS + 4 * overhead < jobs.MAX_BODY_BYTES


def test_a_metric_that_json_cannot_hold_is_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step was taken, so it must not be reported as failed."""
    world.create()
    metrics = {"grad_norm": math.inf, "other": math.nan, "kept": 1.5}
    monkeypatch.setattr(world.backend, "optim_steps", lambda _: [metrics])
    outcome = world.step()
    assert outcome.rejection is None
    assert json.loads(outcome.body) == {"metrics": {"kept": 1.5}}


def test_a_step_after_a_failed_gradient_applies_the_rest_and_logs_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.create()
    bad = training_body({"tokens": [1, 2], "target_tokens": [2]})
    good, failed = world.run(world.gradient(), world.gradient(bad))
    assert (good.rejection is None, failed.rejection is None) == (True, False)
    assert world.step().rejection is None
    assert "m steps although a forward_backward before it failed" in caplog.text
    caplog.clear()
    world.train()
    assert "although" not in caplog.text
