"""A datum that is divided among devices gives what one device gives.

Logprobs and losses have the same bits. A gradient is a sum over the devices' parts, so it differs
in the last bits from that of one device, but not with the company of the datum.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

from tests.engine.conftest import TINY, write_base_model
from tests.support.nightly import at_night
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.memory.footprint import Footprint
from tuneserve_engine.backend.jax.memory.sizes import EngineShape
from tuneserve_engine.backend.jax.mesh import DeviceMesh
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.backend_options import Remat
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData
from tuneserve_engine.worker.execution.packing import PackingRequest, pack, unpack

pytestmark = pytest.mark.bits
CONTEXT = 96
VOCABULARY = TINY["vocab_size"]
GRADIENT = 1e-5
"""The greatest difference of gradients, relative to the largest entry of each matrix."""
BackendOn = Callable[..., JaxBackend]


def backend_for(
    model: Path, shapes: StaticShapes, devices: int, remat: Remat = "dots"
) -> JaxBackend:
    mesh = DeviceMesh(jax.local_devices()[:devices])
    name = str(model)
    return JaxBackend(
        name, name="tiny", tokenizer_id=name, static_shapes=shapes, mesh=mesh, remat=remat
    )


@pytest.fixture(scope="module")
def backend_on(tmp_path_factory: pytest.TempPathFactory) -> BackendOn:
    config = TINY | {"max_position_embeddings": CONTEXT}
    model = write_base_model(tmp_path_factory.mktemp("base"), config)
    made: dict[tuple[int, Remat], JaxBackend] = {}

    def backend(devices: int, remat: Remat = "dots") -> JaxBackend:
        key = devices, remat
        if key not in made:
            shapes = StaticShapes(
                CONTEXT,
                block=4,
                chunk=8,
                requested_tokens=CONTEXT // 4,
                rank_buckets=(8,),
                devices_per_datum=devices,
            )
            made[key] = backend_for(model, shapes, devices, remat)
        return made[key]

    return backend


def datum(length: int, targets: int = 1, *, is_policy: bool = False) -> DecodedDatum:
    random = np.random.default_rng(length)
    tokens = random.integers(0, VOCABULARY, length).astype(np.int32)
    chosen = random.integers(0, VOCABULARY, (length, targets)).astype(np.int32)
    weights = random.normal(0.5, 0.5, (length, targets)).astype(np.float32)
    if not is_policy:
        return DecodedDatum(tokens, chosen, weights, flat=False)
    per_token = {
        "logprobs": random.normal(-4, 0.1, length),
        "advantages": random.normal(0, 1, length),
        "sequence_ratio_mask": np.arange(length) > length // 3,
    }
    per_token = {name: x.astype(np.float32) for name, x in per_token.items()}
    return DecodedDatum(tokens, chosen, 0 * weights, flat=False, per_token=per_token)


def request(name: str, *data: DecodedDatum, loss: str = "cross_entropy") -> PackingRequest:
    clip = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    config = {} if loss == "cross_entropy" else clip
    return PackingRequest(name, 4, TrainingData(loss, config, False, list(data)))


REQUESTS = [
    request("long", datum(93), datum(5), datum(40), datum(30, targets=3)),
    request("short", datum(24), datum(20)),
    request("another", datum(25), datum(96)),
]
GSPO = [
    request("gspo", *(datum(n, is_policy=True) for n in (93, 17)), loss="gspo"),
    # Parts on three of four devices, and parts that are shorter than their room.
    request("less", *(datum(n, is_policy=True) for n in (33, 50)), loss="gspo"),
]


def load_noise(backend: JaxBackend, name: str) -> None:
    """Load an adapter whose matrices have no zeros, the same ones for the same name."""
    backend.create_adapter(name, AdapterConfig(rank=4, alpha=16.0, seed=0))
    random = np.random.default_rng(len(name))
    state = backend.adapter_state(name, optimizer=False)
    weights = {
        key: (0.1 * random.standard_normal(x.shape)).astype(np.float32)
        for key, x in state.weights.items()
    }
    backend.load_adapter(name, AdapterState(state.config, weights))


def run(
    backend: JaxBackend, requests: Sequence[PackingRequest], *, forward_only: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """Return each request's logprobs and loss, and the gradients by adapter."""
    for each in requests:
        load_noise(backend, each.adapter_id)
    asked = [
        PackingRequest(name, rank, TrainingData(data.loss, data.config, forward_only, data.data))
        for name, rank, data in ((x.adapter_id, x.rank, x.data) for x in requests)
    ]
    results: list[Any] = [None] * len(asked)
    at_once = backend.micro_batches_at_once
    for packed in pack(asked, backend.static_shapes, 0, lambda *_: None, at_once):
        result = backend.forward_backward(packed.batch)
        assert all(result.finite)
        for index, member in enumerate(packed.members):
            results[member] = unpack(packed, result.outputs, index, asked[member].data)
    gradients = {}
    for each in asked:
        if not forward_only:
            state = backend.adapter_state(each.adapter_id, optimizer=True, accumulator=True)
            gradients[each.adapter_id] = state.accumulator
        backend.delete_adapter(each.adapter_id)
    return results, gradients


def assert_equal(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


def assert_near(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.any(y)
        np.testing.assert_allclose(x, y, rtol=0, atol=GRADIENT * np.abs(y).max())


@pytest.mark.parametrize("devices", [at_night(2), 4])
def test_logprobs_have_the_bits_of_one_device_and_gradients_nearly(
    devices: int, backend_on: BackendOn
) -> None:
    for requests in (REQUESTS, GSPO):
        want, of_one = run(backend_on(1), requests)
        got, gradients = run(backend_on(devices), requests)
        assert_equal(got, want)
        for name, gradient in of_one.items():
            check = assert_equal if name == "short" else assert_near
            check(gradients[name], gradient)


@pytest.mark.parametrize("remat", [at_night("attention"), "full"])
def test_the_same_holds_where_attention_is_computed_again(
    remat: Remat, backend_on: BackendOn
) -> None:
    want, of_one = run(backend_on(1, remat), REQUESTS[2:])
    got, gradients = run(backend_on(4, remat), REQUESTS[2:])
    assert_equal(got, want)
    assert_near(gradients, of_one)


def test_bits_depend_only_on_the_request(backend_on: BackendOn) -> None:
    want, gradients = run(backend_on(4), REQUESTS)
    for index, each in enumerate(REQUESTS):
        got, mine = run(backend_on(4), [each])
        assert_equal(got, want[index : index + 1])
        assert_equal(mine[each.adapter_id], gradients[each.adapter_id])
    scores, _ = run(backend_on(4), REQUESTS, forward_only=True)
    assert_equal(scores, want)


LONG = TINY | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


@pytest.mark.parametrize("tokens", [2048, at_night(65_536)])
def test_logprobs_equal_those_of_hugging_face(tokens: int, tmp_path: Path) -> None:
    model = write_base_model(tmp_path / "base", LONG | {"max_position_embeddings": tokens})
    shapes = StaticShapes(
        tokens, requested_tokens=tokens // 4, rank_buckets=(8,), devices_per_datum=4
    )
    assert shapes.micro_batch_tokens == tokens // 4
    random = np.random.default_rng(0)
    text = random.integers(0, VOCABULARY, tokens + 1)
    weights = np.ones((tokens, 1), np.float32)
    given = text[:-1].astype(np.int32), text[1:, None].astype(np.int32), weights
    backend = backend_for(model, shapes, 4)
    backend.create_adapter("new", AdapterConfig(rank=4, alpha=16.0, seed=0))
    asked = request("new", DecodedDatum(*given, flat=True))
    (packed,) = pack([asked], shapes, 0, lambda *_: None, 4)
    assert [x.part for x in packed.batch.micro_batches] == [0, 1, 2, 3]
    result = backend.forward_backward(packed.batch)
    (logprobs,), _ = unpack(packed, result.outputs, 0, asked.data)

    reference = transformers.Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        scores = reference(torch.tensor(text[None, :-1])).logits[0].log_softmax(-1)
    want = scores[torch.arange(tokens), torch.tensor(text[1:])].numpy()
    np.testing.assert_allclose(logprobs, want, rtol=0, atol=2e-4)


def test_four_devices_train_64k_tokens_in_the_memory_of_16k_on_one(tmp_path: Path) -> None:
    """The compiled bytes of a device, within 15 %; the rest is what the planner counts for it."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 8, "intermediate_size": 192}
    config = LONG | sizes | {"num_attention_heads": 4, "max_position_embeddings": 65_536}
    model = write_base_model(tmp_path / "base", config)

    def device_bytes(context: int, devices: int, program: str) -> int:
        shapes = StaticShapes(
            context, requested_tokens=16_384, rank_buckets=(8,), devices_per_datum=devices
        )
        assert shapes.micro_batch_tokens == 16_384
        backend = backend_for(model, shapes, devices)
        backend._trainer.declare()
        (shape,) = (
            each for each in backend.programs.shapes() if each.name.startswith(f"{program} (8, 1,")
        )
        memory = shape.compiled().memory_analysis()
        used = memory.argument_size_in_bytes + memory.output_size_in_bytes
        return int(used + memory.temp_size_in_bytes - memory.alias_size_in_bytes)

    on_one = device_bytes(16_384, 1, "train_micro_batch")
    on_four = device_bytes(65_536, 4, "train_divided_datum")
    assert on_one <= on_four <= 1.15 * on_one
    shapes = StaticShapes(65_536, requested_tokens=16_384, rank_buckets=(8,), devices_per_datum=4)
    counted = Footprint(
        ModelConfig.from_hf(config), EngineShape(shapes, "dots", 8, 1, "float32", "cpu", 8, 4)
    )
    (line,) = counted.divided
    assert 0.7 * line.bytes <= on_four - on_one <= line.bytes + counted.gathered.bytes
