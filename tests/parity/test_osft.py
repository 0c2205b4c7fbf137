"""OSFT equals its own definition, written out on a Hugging Face model.

The definition has frozen strong triples, U, S and V as torch's parameters, gradients by autograd,
torch's AdamW, and projections by whole bases.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch.func import functional_call

from tests.parity.test_sft import micro_batch_of, our_loss, torch_loss, torch_step
from tuneserve_engine.adapters import checkpoint
from tuneserve_engine.adapters.merge import merge
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import ATTENTION, PROJECTIONS, AdamwParams, AdapterConfig
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData
from tuneserve_engine.worker.execution.packing import PackingRequest, pack

RATIO = 0.3
CONFIG = AdapterConfig(
    7, 0.0, 0, train_unembed=False, kind="osft", options={"unfreeze_ratio": str(RATIO)}
)
STEPS = 8
PARAMS = AdamwParams(learning_rate=2e-2, weight_decay=0.1, eps=1e-3, grad_clip_norm=1.0)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.:UserWarning"),
]


class Factored:
    """One weight W [N, M] as its triples in float64. The strong ones are frozen."""

    def __init__(self, weight: torch.Tensor, start: dict[str, np.ndarray]) -> None:
        u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
        high = len(s) - max(1, min(round(RATIO * len(s)), len(s) - 1))
        self.u_high, self.v_high = u[:, :high], v[:high]
        self.frozen = self.u_high * s[:high] @ self.v_high
        # Signs are free, so they are taken from the compared adapter.
        self.low = {
            name: torch.from_numpy(x).double().requires_grad_() for name, x in start.items()
        }
        rebuilt = self.weight().detach()
        torch.testing.assert_close(rebuilt, weight.double(), rtol=0, atol=1e-5)

    def weight(self) -> torch.Tensor:
        return self.frozen + (self.low["U"].T * self.low["S"]) @ self.low["V"]

    def project_(self, u: torch.Tensor, v: torch.Tensor) -> None:
        with torch.no_grad():
            u -= self.u_high @ (self.u_high.T @ u)
            v -= (v @ self.v_high.T) @ self.v_high


def names() -> Iterator[tuple[str, int, str]]:
    for target in PROJECTIONS:
        block = "self_attn" if target in ATTENTION else "mlp"
        for layer in range(2):
            yield target, layer, f"model.layers.{layer}.{block}.{target}.weight"


class Reference:
    """The model with every projection factored."""

    def __init__(self, model: Any, start: dict[str, np.ndarray]) -> None:
        self.model = copy.deepcopy(model).double()
        parameters = dict(self.model.named_parameters())
        self.factored = {
            name: Factored(
                parameters[name].detach(),
                {part: start[f"{target}.{part}"][layer] for part in "USV"},
            )
            for target, layer, name in names()
        }
        low = [x for each in self.factored.values() for x in each.low.values()]
        self.optimizer = torch.optim.AdamW(low)

    def __call__(self, tokens: torch.Tensor) -> Any:
        weights = {name: each.weight() for name, each in self.factored.items()}
        return functional_call(self.model, weights, (tokens,))

    def step(self, data: list[DecodedDatum]) -> float:
        self.optimizer.zero_grad()
        loss = torch_loss(self, data)
        loss.backward()
        for each in self.factored.values():
            each.project_(each.low["U"].grad.T, each.low["V"].grad)
        torch_step(self.optimizer, PARAMS)
        for each in self.factored.values():
            each.project_(each.low["U"].T, each.low["V"])
        return loss.item()


@pytest.fixture(scope="module")
def source(reference: Any) -> Any:
    return reference("qwen3", head_dim=16)


@pytest.fixture(scope="module")
def trained(source: Any) -> tuple[JaxBackend, Reference, list[tuple[float, float]]]:
    """The engine and the reference after the same steps, and their losses."""
    backend = JaxBackend(
        str(source.folder),
        name="tiny",
        tokenizer_id="none",
        static_shapes=StaticShapes(64, block=8, chunk=16, requested_tokens=64),
    )
    backend.create_adapter("run", CONFIG)
    theirs = Reference(source.model, backend.adapter_state("run", optimizer=False).weights)
    losses = []
    for step in range(STEPS):
        data = micro_batch_of(step)
        losses.append((our_loss(backend, data), theirs.step(data)))
        (metrics,) = backend.optim_steps([("run", PARAMS)])
        assert not isinstance(metrics, Exception)
    return backend, theirs, losses


def test_losses_and_factors_equal_those_of_the_factored_model_in_torch(trained):
    backend, theirs, losses = trained
    ours, expected = np.array(losses).T
    np.testing.assert_allclose(ours, expected, rtol=3e-7)
    state = backend.adapter_state("run", optimizer=True)
    for target, layer, name in names():
        for part, x in theirs.factored[name].low.items():
            mine = state.weights[f"{target}.{part}"][layer]
            np.testing.assert_allclose(mine, x.detach().numpy(), rtol=0, atol=1.5e-6, err_msg=name)


def logprobs(model: Any, datum: DecodedDatum) -> np.ndarray:
    """Logprobs of the datum's targets, in float64."""
    with torch.no_grad():
        logits = model(torch.from_numpy(datum.tokens)[None].long()).logits[0].double()
        taken = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(datum.targets).long())
    return taken.numpy()


def live(backend: JaxBackend, adapter_ids: list[str], datum: DecodedDatum) -> list[np.ndarray]:
    """Logprobs under each of these adapters, all in one batch."""
    request = TrainingData("cross_entropy", {}, True, [datum])
    (packed,) = pack(
        [PackingRequest(name, 8, request) for name in adapter_ids], backend.static_shapes
    )
    result = backend.forward_backward(packed.batch)
    found: dict[int, np.ndarray] = {}
    for micro_batch, out in zip(packed.batch.micro_batches, result.outputs, strict=True):
        request_of = np.repeat(
            micro_batch.block_request,
            len(micro_batch.segment_ids) // len(micro_batch.block_request),
        )
        for i in set(micro_batch.block_request.tolist()) - {-1}:
            found[i] = out.logprobs[(request_of == i) & (micro_batch.segment_ids >= 0)]
    return [found[i] for i in range(len(adapter_ids))]


@pytest.mark.acceptance("O11")
def test_a_batch_of_all_kinds_gives_each_tenant_its_dense_models_logprobs(trained, source):
    backend, theirs, _ = trained
    others = {
        "base": AdapterConfig(1, 1.0, 0),
        "lora": AdapterConfig(6, 32.0, 1),
        "rslora": AdapterConfig(4, 32.0, 2, kind="rslora"),
        "short": replace(CONFIG, options={**CONFIG.options, "form": "short_fixed"}),
        "core": replace(CONFIG, options={**CONFIG.options, "form": "core"}),
    }
    scales = {"base": 1.0, "lora": 32 / 6, "rslora": 32 / 2}
    models = {"run": theirs}
    for name, config in others.items():
        backend.create_adapter(name, config)
        for step in range(3 if name != "base" else 0):
            request = TrainingData("cross_entropy", {}, False, micro_batch_of(step))
            (packed,) = pack([PackingRequest(name, config.rank, request)], backend.static_shapes)
            assert backend.forward_backward(packed.batch).finite == (True,)
            backend.optim_steps([(name, PARAMS)])
        state = backend.adapter_state(name, optimizer=False)
        changes = low_rank_changes(state.weights, scales[name]) if name in scales else None
        if changes is None:
            changes = subspace_changes(source.model, state.weights)
        models[name] = dense(source.model, changes)
    datum = micro_batch_of(1)[3]
    ours = live(backend, list(models), datum)
    base = ours[list(models).index("base")]
    for name, mine in zip(models, ours, strict=True):
        expected = logprobs(models[name], datum)
        np.testing.assert_allclose(mine, expected, rtol=0, atol=7.5e-6, err_msg=name)
        assert name == "base" or np.abs(mine - base).max() > 0.01


def low_rank_changes(weights: Any, scale: float) -> dict[str, np.ndarray]:
    """scale (A B)ᵀ of every weight that HF names, in float64."""
    changes = {
        name: scale * (weights[f"{target}.A"][layer].astype(float) @ weights[f"{target}.B"][layer])
        for target, layer, name in names()
    }
    head = scale * (weights["unembed.A"].astype(float) @ weights["unembed.B"])
    return {name: x.T for name, x in (changes | {"lm_head.weight": head}).items()}


def subspace_changes(model: Any, weights: Any) -> dict[str, np.ndarray]:
    """B V0 or U0 C' of ``short_fixed``, U0 C V0 of ``core``, with bases of NumPy's own."""
    parameters = dict(model.named_parameters())
    changes = {}
    for target, layer, name in names():
        weight = parameters[name].detach().double().numpy()
        u, _, v = np.linalg.svd(weight, full_matrices=False)
        if f"{target}.C" in weights:
            c = weights[f"{target}.C"][layer].astype(float)
            rank = len(c)
            changes[name] = u[:, ::-1][:, :rank] @ c @ v[::-1][:rank]
            continue
        x = weights[f"{target}.X"][layer].astype(float)
        outputs, inputs = weight.shape
        if outputs >= inputs:
            changes[name] = x.T @ v[::-1][: len(x)]
        else:
            changes[name] = u[:, ::-1][:, : len(x)] @ x
    return changes


def dense(model: Any, changes: dict[str, np.ndarray]) -> Any:
    """The reference with the changes added to its weights, in float64."""
    copied = copy.deepcopy(model).double()
    parameters = dict(copied.named_parameters())
    with torch.no_grad():
        for name, change in changes.items():
            parameters[name] += torch.from_numpy(change)
    return copied


@pytest.mark.acceptance("O12")
def test_peft_loads_the_export_and_gives_the_live_tenants_logprobs(trained, source, tmp_path):
    backend, _, _ = trained
    exported(backend, tmp_path)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(source.model), tmp_path).double()
    datum = micro_batch_of(2)[3]
    (mine,) = live(backend, ["run"], datum)
    np.testing.assert_allclose(mine, logprobs(model, datum), rtol=0, atol=2.6e-6)
    ranks = {name: x.shape[0] for name, x in model.named_parameters() if "lora_A" in name}
    assert set(ranks.values()) == {7}, "the highest rank of all weights: 0.3 of 24"


@pytest.mark.acceptance("O12")
def test_the_change_has_no_more_directions_than_the_adapters_rank(trained):
    backend, theirs, _ = trained
    state = backend.exported(backend.adapter_state("run", optimizer=False))
    for target, layer, name in names():
        low = {part: x.detach().numpy() for part, x in theirs.factored[name].low.items()}
        rank = len(low["S"])
        a, b = (state.weights[f"{target}.{part}"][layer].astype(float) for part in "AB")
        mine = backend.adapter_state("run", optimizer=False).weights
        u, s, v = (mine[f"{target}.{part}"][layer].astype(float) for part in "USV")
        weight = dict(theirs.model.named_parameters())[name].detach().numpy()
        full_u, full_s, full_v = np.linalg.svd(weight, full_matrices=False)
        start = (full_u[:, -rank:] * full_s[-rank:]) @ full_v[-rank:]
        sizes = np.linalg.svd((u.T * s) @ v - start, compute_uv=False)
        assert sizes[rank] / sizes[0] <= 1e-6
        np.testing.assert_allclose((a @ b).T, (u.T * s) @ v - start, rtol=0, atol=1e-7)


@pytest.mark.acceptance("O15")
def test_a_merged_plain_model_gives_the_live_tenants_logprobs(trained, source, tmp_path):
    backend, _, _ = trained
    exported(backend, tmp_path / "adapter")
    (tmp_path / "merged").mkdir()
    merge(tmp_path / "adapter", source.folder, tmp_path / "merged")
    plain = type(source.model).from_pretrained(tmp_path / "merged").double()
    datum = micro_batch_of(0)[3]
    (mine,) = live(backend, ["run"], datum)
    np.testing.assert_allclose(mine, logprobs(plain, datum), rtol=0, atol=3.3e-6)


def exported(backend: JaxBackend, folder: Path) -> None:
    """The adapter in PEFT's layout."""
    folder.mkdir(exist_ok=True)
    state = backend.exported(backend.adapter_state("run", optimizer=False))
    for name, content in checkpoint.peft_members(state, "base").items():
        (folder / name).write_bytes(content)
