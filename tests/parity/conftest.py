"""Random tiny Hugging Face models, the reference of the parity tests."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: no test goes online

import pytest
import torch
import transformers

torch.set_num_threads(1)

_SHAPE = {
    "vocab_size": 67,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


@dataclass(frozen=True)
class Reference:
    """A Hugging Face model in float32, and the folder where it was saved."""

    model: Any
    folder: Path


def _random_model(architecture: str, options: dict[str, Any]) -> Any:
    """Every parameter is random: biases of 0 and norms of 1 would hide mistakes."""
    config_class, model_class = _CLASSES[architecture]
    torch.manual_seed(0)
    model = model_class(config_class(**_SHAPE | options)).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """``reference("llama", max_shard_size="20KB", hidden_size=32, ...)``, saved once per session.

    Tests share the model. A test that changes it works on a copy.
    """

    @cache
    def make(architecture: str, *, max_shard_size: str = "1GB", **options: Any) -> Reference:
        model = _random_model(architecture, _thawed(options))
        folder = tmp_path_factory.mktemp(architecture)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return Reference(model, folder)

    return make


def _thawed(options: dict[str, Any]) -> dict[str, Any]:
    """Options arrive hashable: a tuple of pairs stands for a dictionary."""
    return {k: dict(v) if isinstance(v, tuple) else v for k, v in options.items()}
