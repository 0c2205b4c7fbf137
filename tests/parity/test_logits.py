"""Logits equal those of Hugging Face transformers and PEFT, on random tiny models."""

import copy
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from jax import Array
from transformers import LlamaForCausalLM

from tests.paged_rows import PagedRows
from tuneserve_engine.backend.jax.model.block import Layer, project
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.model.lora import LoraRows
from tuneserve_engine.backend.jax.model.weights import load_base_model, read_config
from tuneserve_engine.backend.jax.programs.registry import compiler_options
from tuneserve_engine.core.adapter import PROJECTIONS, UNEMBED

TOLERANCE = 1e-5  # of the largest logit
TOKENS = np.random.default_rng(0).integers(0, 67, (3, 40)).astype(np.int32)
LLAMA3_ROPE = (
    ("rope_type", "llama3"),
    ("rope_theta", 10_000.0),
    ("factor", 8.0),
    ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0),
    ("original_max_position_embeddings", 16),  # positions up to 39 lie far beyond
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3.1 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, one kv head, biases": (
        "llama",
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, wide heads": ("llama", {"head_dim": 10, "tie_word_embeddings": True}),
    "qwen2.5": ("qwen2", {"rms_norm_eps": 1e-3}),
    "qwen2.5, one kv head, tied": (
        "qwen2",
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, no grouping, biases, tied": (
        "qwen3",
        {
            "head_dim": 2,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3, sharded": ("qwen3", {"head_dim": 16, "max_shard_size": "12KB"}),
}


@jax.jit
def logits_of(model: Decoder, tokens: Array, lora: LoraRows | None) -> Array:
    return model.logits(model(tokens, lora), lora)


def hf_logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS).long()).logits.float().numpy()


def assert_logits_equal(got: Any, want: Any) -> None:
    assert np.abs(np.asarray(got) - want).max() <= TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_hugging_face(reference: Any, name: str) -> None:
    architecture, options = MODELS[name]
    hf = reference(architecture, **options)
    model, _ = load_base_model(str(hf.folder), dtype="float32")
    assert_logits_equal(logits_of(model, TOKENS, None), hf_logits(hf.model))


@pytest.mark.parametrize("name", ["llama 3.1 rope", "qwen2.5, one kv head, tied", "qwen3"])
def test_prefill_and_decode_equal_hugging_face_at_every_position(reference: Any, name: str) -> None:
    architecture, options = MODELS[name]
    hf = reference(architecture, **options)
    model, _ = load_base_model(str(hf.folder), dtype="float32")
    want = hf_logits(hf.model)
    starts = np.array([1, 7, 5], np.int32)  # rows of unequal length share the padded prompt
    paged = PagedRows(model, 3, TOKENS.shape[1], None)
    paged.read(TOKENS[:, :7])
    rows = np.arange(3)
    for step in range(TOKENS.shape[1] - 7):
        at = starts + step
        hidden = paged.write(TOKENS[rows, at], at)
        assert_logits_equal(model.logits(hidden[:, None], None)[:, 0], want[rows, at])


def test_both_spellings_of_rope_options_give_one_config(reference: Any, tmp_path: Any) -> None:
    hf = reference("llama", rope_parameters=LLAMA3_ROPE)
    config = json.loads((hf.folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(hf.folder / "generation_config.json", tmp_path)
    assert read_config(tmp_path) == read_config(hf.folder)


def test_sharded_and_single_files_hold_the_same_model(reference: Any) -> None:
    sharded = reference("qwen3", head_dim=16, max_shard_size="12KB").folder
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, _ = load_base_model(str(reference("qwen3", head_dim=16).folder), dtype="float32")
    many, _ = load_base_model(str(sharded), dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(one), nnx.state(many))


def test_bfloat16_weights_load_bit_for_bit_and_are_as_exact_as_hugging_face(
    reference: Any, tmp_path: Any
) -> None:
    copy.deepcopy(reference("llama").model).bfloat16().save_pretrained(tmp_path)
    # Read back: .bfloat16() rounds the RoPE frequencies too, and from_pretrained does not.
    half, exact = (
        LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    model, _ = load_base_model(str(tmp_path), dtype="bfloat16")
    stored = exact.model.layers[1].mlp.up_proj.weight.detach().numpy().T
    assert model.layers["up_proj"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(model.layers["up_proj"][1], np.float32), stored)

    want = hf_logits(exact)
    wide, _ = load_base_model(str(tmp_path), dtype="float32")
    assert_logits_equal(logits_of(wide, TOKENS, None), want)
    ours = np.asarray(logits_of(model, TOKENS, None))
    assert ours.dtype == np.float32
    assert np.abs(ours - want).mean() <= np.abs(hf_logits(half) - want).mean()


def peft_model(base: Any) -> Any:
    """Two adapters of different rank and alpha on every projection and the head, all random."""
    torch.manual_seed(1)
    targets = [*PROJECTIONS, "lm_head"]
    first = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets)
    second = peft.LoraConfig(r=8, lora_alpha=32, target_modules=targets)
    model = peft.get_peft_model(copy.deepcopy(base), first, adapter_name="first")
    model.add_adapter("second", second)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def peft_logits(model: Any, adapter: str | None) -> Any:
    if adapter is None:
        with model.disable_adapter():
            return hf_logits(model)
    model.set_adapter(adapter)
    return hf_logits(model)


def lora_rows(model: Any, *, layers: int, slot: list[int]) -> LoraRows:
    """Slot 0 is the base model, and 1 and 2 are PEFT's adapters, padded to rank 8."""

    def slots(module: Any, side: str) -> np.ndarray[Any, Any]:
        """[3, d_in, 8] of A or [3, 8, d_out] of B. PEFT stores [r, d_in] and [d_out, r]."""
        sides = getattr(module, f"lora_{side}")
        out = []
        for name in ("first", "second"):
            weight = sides[name].weight.detach().numpy().T
            room = (0, 8 - min(weight.shape))
            out.append(np.pad(weight, ((0, 0), room) if side == "A" else (room, (0, 0))))
        return np.stack([np.zeros_like(out[0]), *out])

    base = model.base_model.model
    sides: dict[str, dict[str, Array]] = {"A": {}, "B": {}}
    for side, arrays in sides.items():
        for name in PROJECTIONS:
            part = "self_attn" if name in PROJECTIONS[:4] else "mlp"
            modules = [getattr(getattr(base.model.layers[i], part), name) for i in range(layers)]
            arrays[name] = jnp.asarray(np.stack([slots(module, side) for module in modules]))
        arrays[UNEMBED] = jnp.asarray(slots(base.lm_head, side))
    scale = jnp.asarray([0.0, 6 / 3, 32 / 8], jnp.float32)
    return LoraRows(sides["A"], sides["B"], scale, jnp.asarray(slot, jnp.int32))


# PEFT asks transformers 5.23 for a property under its old name.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "architecture,options", [("qwen3", {"head_dim": 16}), ("llama", {"head_dim": 10})]
)
def test_rows_of_two_adapters_and_the_base_equal_peft(
    reference: Any, architecture: str, options: dict[str, Any]
) -> None:
    hf = reference(architecture, **options)
    model, config = load_base_model(str(hf.folder), dtype="float32")
    theirs = peft_model(hf.model)
    lora = lora_rows(theirs, layers=config.layers, slot=[2, 0, 1])
    got = logits_of(model, TOKENS, lora)
    for row, adapter in enumerate(("second", None, "first")):
        assert_logits_equal(got[row], peft_logits(theirs, adapter)[row])

    rows = jnp.asarray([2, 0, 1], jnp.int32)
    one_slot_per_row = LoraRows(
        a={name: x[rows] if name == UNEMBED else x[:, rows] for name, x in lora.a.items()},
        b={name: x[rows] if name == UNEMBED else x[:, rows] for name, x in lora.b.items()},
        scale=lora.scale[rows],
    )
    np.testing.assert_array_equal(logits_of(model, TOKENS, one_slot_per_row), got)


@pytest.mark.parametrize("adapter", [False, True])
def test_in_bfloat16_a_projection_with_a_bias_is_as_exact_as_in_peft(adapter: bool) -> None:
    """Both against float64 with the same numbers."""
    torch.manual_seed(0)
    x = torch.randn(1, 256, 64).bfloat16()
    plain = torch.nn.Sequential(torch.nn.Linear(64, 512)).bfloat16()
    torch.nn.init.normal_(plain[0].bias, std=3)
    weights = {"q_proj": plain[0].weight.T, "q_proj_bias": plain[0].bias}
    exact = x.double() @ weights["q_proj"].double() + weights["q_proj_bias"].double()
    config = peft.LoraConfig(r=8, lora_alpha=32, target_modules=["0"])
    theirs = peft.get_peft_model(plain, config)
    sides = [theirs.base_model.model[0].get_parameter(f"lora_{n}.default.weight") for n in "AB"]
    for side in sides:
        torch.nn.init.normal_(side, std=0.2 if adapter else 0.0)
    exact += x.double() @ sides[0].T.double() @ sides[1].T.double() * (32 / 8)

    def numpy(tensor: torch.Tensor) -> Any:
        return tensor.detach().double().numpy()

    a, b = ({"q_proj": jnp.asarray(numpy(side).T[None], jnp.float32)} for side in sides)
    ours = jax.jit(
        lambda x, layer: project(x, "q_proj", layer), compiler_options=compiler_options()
    )(
        jnp.asarray(numpy(x), jnp.bfloat16),
        Layer(
            {name: jnp.asarray(numpy(part), jnp.bfloat16) for name, part in weights.items()},
            LoraRows(a, b, jnp.asarray([32 / 8], jnp.float32)),
        ),
    )
    assert ours.dtype == jnp.bfloat16
    mine, others = (
        float(np.sqrt(((found - numpy(exact)) ** 2).mean()))
        for found in (np.asarray(ours, np.float64), numpy(theirs(x)))
    )
    assert mine <= (0.95 if adapter else 1.001) * others
