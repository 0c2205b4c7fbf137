"""A supervised run equals Hugging Face transformers, PEFT and torch's AdamW, step by step."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import peft
import pytest
import torch

from tests.support.nightly import at_night
from tuneserve_engine.adapters.state import AdapterState, Tensors
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import PROJECTIONS, UNEMBED, AdamwParams, AdapterConfig
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData
from tuneserve_engine.worker.execution.packing import PackingRequest, pack, unpack

CONFIG = AdapterConfig(rank=6, alpha=32, seed=7)  # padded on the device to the rank bucket 8
STEPS = 20
LENGTHS = (5, 16, 11, 30, 2, 17, 9)  # together more than a bin: two micro-batches


def params_of(step: int) -> AdamwParams:
    """A learning rate that changes, weight decay, and clipping that applies at every other step."""
    return AdamwParams(
        learning_rate=5e-3 * (1 - step / (2 * STEPS)),
        weight_decay=0.1,
        grad_clip_norm=10.0 if step % 2 else 0.0,
    )


def micro_batch_of(step: int) -> list[DecodedDatum]:
    """Datums of different lengths with fractional weights, some negative or zero."""
    random = np.random.default_rng(step % 4)
    data = []
    for length in LENGTHS:
        tokens = random.integers(0, 67, length + 1).astype(np.int32)
        weights = random.choice(
            [0.0, -0.25, 0.5, 1.0, 1.75], (length, 1), p=[0.2, 0.1, 0.2, 0.4, 0.1]
        )
        data.append(
            DecodedDatum(tokens[:-1], tokens[1:, None], weights.astype(np.float32), flat=True)
        )
    return data


def start_of(backend: JaxBackend) -> AdapterState:
    """The fresh adapter with B no longer zero: at zero, the gradient of every A would vanish."""
    backend.create_adapter("start", CONFIG)
    state = backend.adapter_state("start", optimizer=False)
    random = np.random.default_rng(1)
    for name, tensor in state.weights.items():
        if name.endswith(".B"):
            tensor[:] = 0.05 * random.standard_normal(tensor.shape)
    return state


def lora_modules(model: Any) -> Iterator[tuple[str, int | None, Any]]:
    """(our target, layer, PEFT's module) of every adapted linear layer."""
    decoder = model.base_model.model
    for layer, block in enumerate(decoder.model.layers):
        for target in PROJECTIONS:
            parent = block.mlp if hasattr(block.mlp, target) else block.self_attn
            yield target, layer, getattr(parent, target)
    yield UNEMBED, None, decoder.lm_head


def peft_model(model: Any, start: Tensors) -> Any:
    """PEFT's own LoRA on the reference, started from the same A and B."""
    targets = [*PROJECTIONS, "lm_head"]
    config = peft.LoraConfig(r=CONFIG.rank, lora_alpha=int(CONFIG.alpha), target_modules=targets)
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for target, layer, module in lora_modules(wrapped):
            for part, linear in (("A", module.lora_A), ("B", module.lora_B)):
                ours = start[f"{target}.{part}"]
                ours = ours if layer is None else ours[layer]
                linear["default"].weight.copy_(torch.from_numpy(ours.T.copy()))
    return wrapped


def torch_loss(model: Any, data: list[DecodedDatum]) -> torch.Tensor:
    """The sum of -w·lp, each datum by itself, without padding."""
    total = torch.zeros(())
    for datum in data:
        logits = model(torch.from_numpy(datum.tokens)[None].long()).logits[0].float()
        lp = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(datum.targets).long())
        total = total - (torch.from_numpy(datum.weights) * lp).sum()
    return total


def torch_step(optimizer: torch.optim.AdamW, params: AdamwParams) -> None:
    group = optimizer.param_groups[0]
    group["lr"], group["betas"] = params.learning_rate, (params.beta1, params.beta2)
    group["eps"], group["weight_decay"] = params.eps, params.weight_decay
    if params.grad_clip_norm > 0:
        torch.nn.utils.clip_grad_norm_(group["params"], params.grad_clip_norm)
    optimizer.step()


def our_loss(backend: JaxBackend, data: list[DecodedDatum]) -> float:
    request = TrainingData("cross_entropy", {}, False, data)
    (packed,) = pack([PackingRequest("run", CONFIG.rank, request)], backend.static_shapes)
    assert len(packed.batch.micro_batches) == 2
    result = backend.forward_backward(packed.batch)
    assert result.finite == (True,)
    return unpack(packed, result.outputs, 0, request)[1]


def assert_same_gradients(backend: JaxBackend, model: Any, beta1: float) -> None:
    """After one step, the first moment is (1 - beta1) times the gradient."""
    moments = backend.adapter_state("run", optimizer=True).first_moment
    for target, layer, module in lora_modules(model):
        for part, linear in (("A", module.lora_A), ("B", module.lora_B)):
            ours = moments[f"{target}.{part}"] / (1 - beta1)
            ours = ours if layer is None else ours[layer]
            theirs = linear["default"].weight.grad.numpy().T
            scale = np.abs(theirs).max()
            assert scale > 0
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * scale)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.:UserWarning")
@pytest.mark.parametrize("tied", [at_night(False), True])
def test_twenty_steps_on_every_projection_and_the_head_give_the_same_losses(reference, tied: bool):
    source = reference("qwen3", head_dim=16, tie_word_embeddings=tied)
    backend = JaxBackend(
        str(source.folder),
        name="tiny",
        tokenizer_id="none",
        static_shapes=StaticShapes(64, block=8, chunk=16, requested_tokens=64),
    )
    start = start_of(backend)
    backend.load_adapter("run", start)
    model = peft_model(source.model, start.weights)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    losses = []
    for step in range(STEPS):
        data, params = micro_batch_of(step), params_of(step)
        optimizer.zero_grad()
        loss = torch_loss(model, data)
        loss.backward()
        losses.append((our_loss(backend, data), loss.item()))
        torch_step(optimizer, params)
        (metrics,) = backend.optim_steps([("run", params)])
        assert not isinstance(metrics, Exception)
        if step == 0:
            assert_same_gradients(backend, model, params.beta1)
    ours, theirs = np.array(losses).T
    np.testing.assert_allclose(ours, theirs, rtol=8e-7)
    assert theirs[-4:].sum() < 0.9 * theirs[:4].sum(), "the run must have learnt something"
