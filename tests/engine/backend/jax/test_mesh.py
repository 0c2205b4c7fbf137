"""A base model on several devices computes what it computes on one.

Training has the same bits: every device runs whole micro-batches. Samples are compared to 1e-5: a
device multiplies a part of each matrix, for which XLA may choose another kernel.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.engine.conftest import STATIC_SHAPES, TINY, write_base_model
from tests.support.nightly import at_night
from tests.support.small_tokenizer import small_tokenizer
from tuneserve_engine.adapters.kinds import kind_of
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import SamplingRequest
from tuneserve_engine.backend.jax.adapters.arrays import adapter_bytes, target_shapes
from tuneserve_engine.backend.jax.adapters.room import AdapterRoom
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.memory.sizes import EngineShape, Sizes
from tuneserve_engine.backend.jax.mesh import OWN, WHOLE, DeviceMesh
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.grammar import Grammar
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData
from tuneserve_engine.worker.execution.packing import PackedBatch, PackingRequest, pack, unpack

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.bits
NewBackend = Callable[[int], JaxBackend]
END = 60
"""The id of the end of sequence."""
BIASED = TINY | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
CONFIGS = {
    "lora": AdapterConfig(rank=5, alpha=16.0, seed=1),
    "rslora": AdapterConfig(rank=3, alpha=16.0, seed=2, kind="rslora"),
    "osft": AdapterConfig(rank=4, alpha=4.0, seed=3, kind="osft", train_unembed=False),
}
LENGTHS = {"lora": (24, 23, 22, 21, 20, 9, 8, 3, 24, 24), "rslora": (5,), "osft": (24, 24, 24, 11)}
"""The first and the last request have several bins."""
STEP = AdamwParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model with biases, and with a tokenizer of its first tokens."""
    config = BIASED | {"eos_token_id": END}
    folder = write_base_model(tmp_path_factory.mktemp("biased"), config)
    small_tokenizer(END + 1).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def new(model: Path) -> NewBackend:
    """Return backends on so many devices; each number has one backend."""
    made: dict[int, JaxBackend] = {}

    def backend(count: int) -> JaxBackend:
        if count not in made:
            made[count] = backend_on(model, count)
        return made[count]

    return backend


def backend_on(model: Path, count: int, **options: Any) -> JaxBackend:
    return JaxBackend(
        str(model),
        name="tiny",
        tokenizer_id=str(model),
        static_shapes=STATIC_SHAPES,
        mesh=DeviceMesh(jax.local_devices()[:count]),
        **options,
    )


def requests_of(number: int) -> list[PackingRequest]:
    """One request per adapter. Every third datum of the first has 3 targets per token."""
    random = np.random.default_rng(number)
    requests = []
    for name, config in CONFIGS.items():
        data = []
        for index, length in enumerate(LENGTHS[name]):
            k = 3 if name == "lora" and index % 3 == 2 else 1
            tokens = random.integers(0, TINY["vocab_size"], length).astype(np.int32)
            targets = random.integers(0, TINY["vocab_size"], (length, k)).astype(np.int32)
            weights = random.normal(0.5, 0.5, (length, k)).astype(np.float32)
            data.append(DecodedDatum(tokens, targets, weights, flat=False))
        training = TrainingData("cross_entropy", {}, False, data)
        requests.append(PackingRequest(name, config.rank, training))
    return requests


def packed_for(backend: JaxBackend, requests: Sequence[PackingRequest]) -> list[PackedBatch]:
    at_once = backend.micro_batches_at_once
    return pack(requests, backend.static_shapes, 0, lambda *_: None, at_once)


def gradients(backend: JaxBackend, requests: Sequence[PackingRequest]) -> list[Any]:
    """Run the requests, and return the logprobs and the loss of each."""
    found: list[Any] = [None] * len(requests)
    for packed in packed_for(backend, requests):
        result = backend.forward_backward(packed.batch)
        assert all(result.finite)
        for index, member in enumerate(packed.members):
            found[member] = unpack(packed, result.outputs, index, requests[member].data)
    return found


def step(backend: JaxBackend) -> list[Any]:
    return backend.optim_steps([(name, STEP) for name in CONFIGS])


def trained(backend: JaxBackend, steps: int) -> tuple[Any, dict[str, AdapterState]]:
    """Train new adapters, and return all results and the states."""
    for name, config in CONFIGS.items():
        backend.create_adapter(name, config)
    results = []
    for number in range(steps):
        results.append(gradients(backend, requests_of(number)))
        results.append([metrics["grad_norm"] for metrics in step(backend)])
    gradients(backend, requests_of(steps))
    return results, states(backend)


def states(backend: JaxBackend) -> dict[str, AdapterState]:
    return {name: backend.adapter_state(name, optimizer=True, accumulator=True) for name in CONFIGS}


def bits(tree: Any) -> list[bytes]:
    if isinstance(tree, dict):
        parts = ("step", "weights", "first_moment", "second_moment", "accumulator")
        tree = [[getattr(state, part) for part in parts] for state in tree.values()]
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def on_one(new: NewBackend) -> tuple[list[bytes], list[bytes]]:
    results, found = trained(new(1), 20)
    return bits(results), bits(found)


@pytest.mark.parametrize("devices", [2, at_night(4)])
def test_twenty_steps_on_several_devices_have_the_bits_of_one(
    devices: int, new: NewBackend, on_one: tuple[list[bytes], list[bytes]]
) -> None:
    """Logprobs, losses, norms, weights, moments and accumulators of all kinds of adapters."""
    results, found = trained(new(devices), 20)
    assert bits(results) == on_one[0]
    assert bits(found) == on_one[1]


@pytest.mark.parametrize("devices", [2, at_night(4)])
def test_a_state_goes_on_with_the_same_bits_on_another_number_of_devices(
    devices: int, new: NewBackend
) -> None:
    _, saved = trained(new(devices), 1)
    found = []
    for count in (1, devices):
        backend = new(count)
        for name, state in saved.items():
            backend.load_adapter(name, state)
        step(backend)
        found.append((bits(gradients(backend, requests_of(7))), bits(states(backend))))
    assert found[0] == found[1]
    for name in CONFIGS:
        exported = [bits({name: new(count).exported_adapter(name)}) for count in (1, devices)]
        assert exported[0] == exported[1]


def test_a_batch_that_interrupts_another_changes_no_bit(new: NewBackend) -> None:
    """It takes all slots, so that the sums of the first wait on the host."""
    backend = new(2)
    want, final = trained(new(1), 0)
    trained(backend, 0)
    assert want == [] and bits(states(backend)) == bits(final)
    for name, config in CONFIGS.items():
        backend.create_adapter(name, config)
    for name in "xyz":
        backend.create_adapter(name, CONFIGS["lora"])
    slots = backend.static_shapes.slots(backend.static_shapes.rank_bucket(5))
    others = [PackingRequest("xyz"[i % 3], 5, requests_of(9)[1].data) for i in range(slots)]
    interrupted = []

    def between() -> None:
        interrupted.append(gradients(backend, others))

    for packed in packed_for(backend, requests_of(0)):
        assert all(backend.forward_backward(packed.batch, between).finite)
    assert interrupted
    assert bits(states(backend)) == bits(final)


def test_scores_without_gradients_are_those_of_training(new: NewBackend) -> None:
    """And they change no accumulator."""
    found = []
    for devices in (1, 2):
        backend = new(devices)
        trained(backend, 0)
        before = bits(states(backend))
        scored = [
            replace(request, data=replace(request.data, forward_only=True))
            for request in requests_of(0)
        ]
        found.append(bits(gradients(backend, scored)))
        assert bits(states(backend)) == before
        assert found[-1] == bits(gradients(backend, requests_of(0)))
    assert found[0] == found[1]


def test_a_request_of_nan_on_one_device_leaves_the_others_bits(new: NewBackend) -> None:
    """Both requests have bins on both devices."""
    backend = new(2)
    _, want = trained(new(1), 0)
    trained(backend, 0)
    for name in ("lora", "sick"):
        backend.create_adapter(name, CONFIGS["lora"])
    sick = backend.adapter_state("sick", optimizer=False)
    weights = {name: np.full_like(x, np.nan) for name, x in sick.weights.items()}
    backend.load_adapter("sick", replace(sick, weights=weights))
    requests = requests_of(0)
    requests.insert(1, replace(requests[0], adapter_id="sick"))
    finite = {}
    for packed in packed_for(backend, [requests[0], requests[1]]):
        result = backend.forward_backward(packed.batch)
        finite |= zip(packed.batch.adapter_ids, result.finite, strict=True)
    assert finite == {"lora": True, "sick": False}
    found = backend.adapter_state("lora", optimizer=True, accumulator=True)
    assert bits({"lora": found}) == bits({"lora": want["lora"]})
    backend.delete_adapter("sick")


PROMPT = np.arange(2, 14, dtype=np.int32)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logit_bias": {7: 2.0}, "frequency_penalty": 1.0},
        {"grammar": Grammar("regex", "[a-f]{3}-[0-9]{9}")},
    ],
    ids=["plain", "edits", "grammar"],
)
@pytest.mark.parametrize("devices", [2, at_night(4)])
def test_samples_on_several_devices_are_those_of_one(
    devices: int, changes: dict[str, Any], new: NewBackend
) -> None:
    """With four devices, keys and values are whole on each: the model has two heads of them."""
    found = []
    for count in (1, devices):
        backend = new(count)
        backend.load_adapter("lora", state_of_noise(backend))
        backend.load_snapshot("noise", backend.adapter_state("lora", optimizer=False))
        asked = SamplingRequest(
            PROMPT,
            "noise",
            seed=5,
            num_samples=2,
            max_tokens=8,
            prompt_logprobs=True,
            topk_sample=3,
            **changes,
        )
        found.append(backend.sample([asked])[0])
    one, several = found
    np.testing.assert_allclose(several.prompt_logprobs, one.prompt_logprobs, rtol=1e-5, atol=1e-5)
    for want, got in zip(one.sequences, several.sequences, strict=True):
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got.topk.token_ids, want.topk.token_ids)


def state_of_noise(backend: JaxBackend) -> AdapterState:
    backend.create_adapter("lora", CONFIGS["lora"])
    fresh = backend.adapter_state("lora", optimizer=False)
    random = np.random.default_rng(4)
    noise = {
        name: (0.1 * random.standard_normal(x.shape)).astype(np.float32)
        for name, x in fresh.weights.items()
    }
    return AdapterState(fresh.config, noise)


def collectives(backend: JaxBackend, name: str) -> Iterator[tuple[str, int]]:
    """Yield the kind and the largest shape's elements of each exchange in the compiled program."""
    for shape in backend.programs.shapes():
        if not shape.name.startswith(name) or not shape.is_compiled:
            continue
        for line in shape.executable.as_text().splitlines():
            if "/of_all/" in line:  # the losses and logprobs of tokens
                continue
            if found := re.search(r"= (\S.*?) (all-\w+|collective-\w+|reduce-scatter)\(", line):
                sizes = re.findall(r"\[([\d,]*)\]", found[1])
                elements = [np.prod([int(x) for x in each.split(",") if x]) for each in sizes]
                yield found[2], int(max(elements))


def test_training_exchanges_weights_alone_and_keeps_its_buffers_in_place(new: NewBackend) -> None:
    """Neither the tape nor adapters. Donated buffers are those of the results."""
    backend = new(2)
    trained(backend, 0)
    found = list(collectives(backend, "train_micro_batch"))
    config = TINY
    largest = config["hidden_size"] * config["intermediate_size"]
    assert found and {kind for kind, _ in found} == {"all-gather"}
    assert max(size for _, size in found) <= largest
    (shape, *_) = (
        each
        for each in backend.programs.shapes()
        if each.name.startswith("train_micro_batch") and each.is_compiled
    )
    memory = shape.executable.memory_analysis()
    donated = [backend._trainer._space, backend._trainer._slots[8].gradient_slots]
    each = sum(x.nbytes // 2 for x in jax.tree.leaves(donated))
    assert memory.alias_size_in_bytes >= each


@pytest.mark.parametrize("devices", [1, 2, at_night(4)])
def test_a_device_has_its_part_of_the_weights(devices: int, new: NewBackend) -> None:
    """The part that the planner counts, and no other device's."""
    arrays = new(devices).programs._programs[0]._bound[0]
    shape = EngineShape(STATIC_SHAPES, "dots", 8, 1, "float32", "cpu", 8, devices)
    sizes = Sizes(ModelConfig.from_hf(BIASED), shape)
    assert sum(x.addressable_data(0).size for x in arrays) == sizes.own_parameters
    assert sum(x.size for x in arrays) == sizes.parameters


def test_a_backend_that_only_samples_declares_no_training_and_exports_what_others_trained(
    model: Path, new: NewBackend, tmp_path: Path
) -> None:
    """Checkpoints of training, whose arrays are those of their kind, are sampled from, too."""
    trainer = new(1)
    trained(trainer, 0)
    config = CONFIGS["osft"]
    room = adapter_bytes(target_shapes(ModelConfig.from_hf(BIASED)), 8, kind_of(config))
    shared = trainer._svd.bytes
    sampler = backend_on(
        model,
        1,
        trains=False,
        room=AdapterRoom(
            device_bytes=room + shared, decompositions=trainer._svd.decomposition._folder.parent
        ),
    )
    names = {shape.name.split()[0] for shape in sampler.programs.shapes()}
    assert {"prefill", "decode"} <= names and "train_micro_batch" not in names
    assert "empty_slots" not in names and "adamw_step" not in names
    sampler.prepare(config)
    state = trainer.adapter_state("osft", optimizer=True)
    got, wanted = sampler.exported(state), trainer.exported_adapter("osft")
    assert bits([got.weights]) == bits([wanted.weights])


def test_a_restart_on_several_devices_compiles_nothing(model: Path, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        backend = backend_on(model, 2, compile_cache_dir=tmp_path)
        backend.create_adapter("rslora", CONFIGS["rslora"])
        found.append(bits(gradients(backend, requests_of(0)[1:2])))
    assert backend.programs.kept.loaded == len(list(tmp_path.iterdir()))
    assert found[0] == found[1]


def test_eight_devices_have_the_bits_of_one_in_bfloat16(model: Path) -> None:
    """In a process of its own, which has eight devices, and compiles without optimisation."""
    code = f"from {__name__} import compare; compare({str(model)!r}, 8)"
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": "8",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


def compare(model: str, devices: int) -> None:
    made = (backend_on(Path(model), count, dtype="bfloat16") for count in (1, devices))
    one, several = (trained(backend, 3) for backend in made)
    assert [bits(each) for each in one] == [bits(each) for each in several]


def test_the_parts_of_devices() -> None:
    one, four = DeviceMesh(), DeviceMesh(jax.local_devices()[:4])
    assert one.count == 1 and one.part_of((8, 4), 4) == WHOLE
    assert four.part_of((2, 8, 4), 4) == jax.P(None, None, "devices")
    assert four.part_of((8, 4), 2) == four.part_of((8, 4), None) == WHOLE
    placed = four.put({"x": np.arange(8)}, OWN)["x"]
    assert [x.data.tolist() for x in placed.addressable_shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]
