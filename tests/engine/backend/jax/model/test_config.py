"""Configurations of base models: supported ones are read, and an unsupported feature is named."""

from typing import Any

import pytest

from tuneserve_engine.backend.jax.model.config import Llama3Scaling, ModelConfig, UnsupportedModel

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 6,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": [3, 5],
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def test_a_llama_config_is_read() -> None:
    assert ModelConfig.from_hf(LLAMA | {"rope_scaling": LLAMA3_SCALING}) == ModelConfig(
        architecture="llama",
        vocab_size=11,
        hidden=8,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=4,
        intermediate=6,
        context_length=32,
        rope_theta=500000.0,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 16),
        rms_eps=1e-5,
        eos_token_ids=(3, 5),
    )


def test_qwen_biases_and_head_sizes_follow_their_architecture() -> None:
    qwen2, qwen3 = ModelConfig.from_hf(QWEN2), ModelConfig.from_hf(QWEN3)
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.attention_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
    assert (qwen2.head_dim, qwen3.head_dim) == (4, 128)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}},
            "rope_type 'yarn'",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 5}, "head_dim is 5"),
        ({"vocab_size": None, "hidden_size": None}, "lacks vocab_size, hidden_size"),
    ],
)
def test_an_unsupported_feature_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_hf(LLAMA | change)


def test_a_sliding_window_that_no_layer_uses_is_accepted() -> None:
    unused = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 16}
    disabled = {"use_sliding_window": False, "sliding_window": 16}
    assert ModelConfig.from_hf(QWEN2 | unused) == ModelConfig.from_hf(QWEN2 | disabled)
