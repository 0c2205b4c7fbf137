"""In bfloat16 a policy has one set of logprobs, bit for bit, from every program."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.engine.conftest import STATIC_SHAPES, TINY
from tests.support.nightly import at_night
from tuneserve_engine.adapters.kinds.osft import FORMS
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import SampledSequence, SampleResult, SamplingRequest
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.weights import expected_tensors
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.backend_options import Remat
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData
from tuneserve_engine.worker.execution.device_timer import DeviceTimer
from tuneserve_engine.worker.execution.packing import PackingRequest, pack, unpack
from tuneserve_engine.worker.execution.rescoring import Rescoring

ARCHITECTURES = {
    "qwen3": {},  # norms of queries and keys
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},  # biases
}
LENGTHS = (23, 5, 20, 1, 9, 13)
"""Packed, most datums start inside a block of 8, and some cross two borders."""
REMATS = get_args(Remat)
"""``auto`` is one of these."""
BY_DAY = ("dots", "attention")
"""The choices of a CPU and of a GPU; with the others, at night."""
LORA = AdapterConfig(rank=5, alpha=32, seed=3)
RSLORA = AdapterConfig(rank=4, alpha=8, seed=4, kind="rslora", train_unembed=False)
OSFT = [
    AdapterConfig(8, 0.0, 0, train_unembed=False, kind="osft", options={"form": form, **more})
    for form in FORMS
    for more in ({"unfreeze_ratio": "0.3"}, {})  # 2 to 5 directions, and the whole rank bucket
]


def base_model(folder: Path, architecture: str) -> Path:
    config = {**TINY, **ARCHITECTURES[architecture], "head_dim": 4}
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    tensors = {
        name: (("norm" in name) + 0.3 * random.standard_normal(place.shape)).astype(
            ml_dtypes.bfloat16
        )
        for name, place in expected_tensors(ModelConfig.from_hf(config)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def backend_of(folder: Path, remat: Remat = "dots") -> JaxBackend:
    static_shapes = replace(STATIC_SHAPES, rank_buckets=(8,))
    return JaxBackend(
        str(folder),
        name="t",
        tokenizer_id="t",
        dtype="bfloat16",
        static_shapes=static_shapes,
        remat=remat,
    )


def texts() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.integers(0, TINY["vocab_size"], n + 1).astype(np.int32) for n in LENGTHS]


def load(backend: JaxBackend, name: str, config: AdapterConfig) -> None:
    """Load the adapter with random weights in place of a new one's."""
    backend.create_adapter(name, config)
    state = backend.adapter_state(name, optimizer=False)
    backend.delete_adapter(name)
    random = np.random.default_rng(config.seed)
    weights = {
        part: (0.2 * random.standard_normal(x.shape)).astype(np.float32)
        for part, x in state.weights.items()
    }
    backend.load_adapter(name, replace(state, weights=weights))


def logprobs(
    backend: JaxBackend, name: str, some: Sequence[np.ndarray], *, forward_only: bool
) -> list[np.ndarray]:
    """The logprobs of one request with these texts."""
    datums = [
        DecodedDatum(text[:-1], text[1:, None], np.ones((len(text) - 1, 1), np.float32), flat=True)
        for text in some
    ]
    data = TrainingData("cross_entropy", {}, forward_only, datums)
    (packed,) = pack([PackingRequest(name, 5, data)], backend.static_shapes)
    result = backend.forward_backward(packed.batch)
    assert result.finite == (True,)
    return unpack(packed, result.outputs, 0, data)[0]


def rescored(backend: JaxBackend, name: str, text: np.ndarray) -> np.ndarray:
    """The logprobs of all tokens but the first, as if the rest had been sampled."""
    rescoring = Rescoring(
        backend, DeviceTimer(time.monotonic, lambda: 0.0), lambda _: exported(backend, name)
    )
    request = SamplingRequest(text[:1], name, seed=0, num_samples=1, max_tokens=len(text) - 1)
    drawn = SampledSequence(text[1:], np.zeros(len(text) - 1, np.float32), "length")
    result = rescoring.rescore({"one": request}, {"one": SampleResult((drawn,))})["one"]
    assert isinstance(result, SampleResult)
    return result.sequences[0].logprobs


def exported(backend: JaxBackend, name: str) -> AdapterState:
    """The weights to sample from, which a saved copy of the adapter gives too."""
    live = backend.exported_adapter(name)
    saved = backend.exported(backend.adapter_state(name, optimizer=True))
    assert live.config == saved.config and live.config.kind == "lora"
    assert live.weights.keys() == saved.weights.keys()
    for part, x in live.weights.items():
        np.testing.assert_array_equal(x, saved.weights[part], err_msg=part)
    return live


def one_set_of_logprobs(backend: JaxBackend, name: str) -> np.ndarray:
    """The logprobs of a request's forward_backward, once all others are found to be equal."""
    trained = logprobs(backend, name, texts(), forward_only=False)
    forward = logprobs(backend, name, texts(), forward_only=True)
    for text, want, scored in zip(texts(), trained, forward, strict=True):
        ways = {
            "forward": scored,
            "forward alone": logprobs(backend, name, [text], forward_only=True)[0],
            "forward_backward alone": logprobs(backend, name, [text], forward_only=False)[0],
            "rescored": rescored(backend, name, text),
        }
        for way, got in ways.items():
            np.testing.assert_array_equal(got, want, err_msg=f"{way}, {len(text) - 1} tokens")
    whole = texts()[0]
    for count in (9, 16):  # a token's logprob does not depend on what follows it
        (start,) = logprobs(backend, name, [whole[:count]], forward_only=False)
        np.testing.assert_array_equal(start, trained[0][: count - 1], err_msg=f"{count} tokens")
    return np.concatenate(trained)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def halves(qwen3: Path) -> dict[Remat, JaxBackend]:
    """A backend for every ``remat``; they compile what they need when they need it."""
    return {remat: backend_of(qwen3, remat) for remat in REMATS}


def same_under(backends: Mapping[Remat, JaxBackend]) -> None:
    for name, config in {"lora": LORA, "rslora": RSLORA}.items():
        found = {}
        for remat, each in backends.items():
            load(each, name, config)
            found[remat] = one_set_of_logprobs(each, name)
        for remat, logprobs in found.items():
            np.testing.assert_array_equal(logprobs, found["dots"], err_msg=f"{name}, {remat}")


@pytest.mark.parametrize("remats", [BY_DAY, at_night(REMATS)])
def test_every_program_and_every_remat_gives_the_same_bits(
    remats: tuple[Remat, ...], halves: dict[Remat, JaxBackend]
) -> None:
    same_under({remat: halves[remat] for remat in remats})


@pytest.mark.parametrize("remats", [("dots",), at_night(("dots", "full"))])
def test_a_model_with_biases_gives_the_same_bits_too(
    tmp_path: Path, remats: tuple[Remat, ...]
) -> None:
    folder = base_model(tmp_path, "qwen2")
    same_under({remat: backend_of(folder, remat) for remat in remats})


@pytest.mark.parametrize(
    "remat", [remat if remat in BY_DAY else at_night(remat) for remat in REMATS]
)
def test_osft_adapters_have_one_set_of_logprobs_too(
    remat: Remat, halves: dict[Remat, JaxBackend]
) -> None:
    backend = halves[remat]
    for config in OSFT if remat == "dots" else OSFT[-1:]:  # ``remat`` changes no pair
        name = " ".join(config.options.values())
        backend.create_adapter(name, config)
        before = logprobs(backend, name, texts(), forward_only=False)
        (step,) = backend.optim_steps([(name, AdamwParams(learning_rate=0.05))])
        assert not isinstance(step, Exception), step
        after = one_set_of_logprobs(backend, name)
        assert np.abs(after - np.concatenate(before)).max() > 0.01


def test_in_float32_a_datum_has_the_same_bits_alone_and_packed(backend: JaxBackend) -> None:
    load(backend, "one set", LORA)
    one_set_of_logprobs(backend, "one set")


UNROUNDED = """
import jax, jax.numpy as jnp, ml_dtypes, numpy as np
from tuneserve_engine.backend.jax.programs.registry import compiler_options

x = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(ml_dtypes.bfloat16)
for product in (lambda x: x[0] @ x[1], lambda x: x[0] * x[1]):
    for options in (None, compiler_options()):
        wide = jax.jit(lambda x: product(x).astype(jnp.float32), compiler_options=options)(x)
        print(np.count_nonzero(wide != np.asarray(wide).astype(ml_dtypes.bfloat16)))
"""


def test_xla_rounds_where_the_programs_say_under_any_flags() -> None:
    """Counts the bfloat16 products that were never rounded, without our option and with it.

    Without it, JAX 0.10 rounds neither kind of product, and JAX 0.12 only those of matrices.
    """
    flags = {"XLA_FLAGS": "--xla_allow_excess_precision=true", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", UNROUNDED],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        check=True,
    )
    matrix, with_option, elements, these_with_option = map(int, ran.stdout.split())
    assert max(matrix, elements) > 3000
    assert with_option == these_with_option == 0
