"""Write the model that benchmarks run: Qwen3-shaped, random weights, any size.

    python benchmarks/bench_model.py FOLDER                        # the bench model
    python benchmarks/bench_model.py FOLDER --layers 28 --hidden 1024 --intermediate 3072 \
        --heads 16 --kv-heads 8 --head-dim 128 --vocab 151936      # the shape of Qwen3-0.6B

Equal arguments produce equal bytes. The tokenizer accepts any text; its tokens have no meaning.
"""

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.weights import expected_tensors

_STD = 0.02
_REPEATED = 2**24 + 43  # a prime, so that no two rows of a weight are alike
_END = "<|endoftext|>"


@dataclass(frozen=True)
class Shape:
    """The shape of a model; by default, that of the bench model."""

    layers: int = 8
    hidden: int = 512
    intermediate: int = 1536
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    vocab: int = 8192
    context: int = 2048
    tied: bool = True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    for field in fields(Shape):
        if field.type is not int:
            continue
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=int, default=field.default, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    folder, seed = args.pop("folder"), args.pop("seed")
    weights = write_model(folder, Shape(**args), seed=seed)
    print(f"{folder}: {weights:,} weights, {4 * weights / 2**20:,.0f} MiB")


def write_model(folder: Path, shape: Shape | None = None, *, seed: int = 0) -> int:
    """Write config, float32 weights and tokenizer, and return the number of weights."""
    shape = shape or Shape()
    if shape.vocab <= 256:
        raise ValueError(f"vocab is {shape.vocab}; the bytes alone are 256, so use 257 or more")
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(shape)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    rng = np.random.default_rng(seed)
    tensors = {
        name: np.ones(place.shape, np.float32)
        if len(place.shape) == 1
        else rng.standard_normal(place.shape, np.float32) * np.float32(_STD)
        for name, place in expected_tensors(ModelConfig.from_hf(config)).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder, shape)
    return sum(tensor.size for tensor in tensors.values())


def write_large_model(folder: Path, shape: Shape) -> None:
    """Write a model as ``write_model`` does, but in bfloat16, one file per layer, and in seconds.

    All weights repeat the same random numbers, so a model of 16 GB takes as long as its files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(shape) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    random = np.random.default_rng(0).standard_normal(_REPEATED, np.float32) * np.float32(_STD)
    numbers = random.astype(ml_dtypes.bfloat16)
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, place in expected_tensors(ModelConfig.from_hf(config)).items():
        layers.setdefault(f"layer-{place.layer}.safetensors", {})[name] = place.shape
    start = 0
    for file, shapes in layers.items():
        tensors = {}
        for name, size in shapes.items():
            tensors[name] = np.resize(np.roll(numbers, -start), size)
            start = (start + tensors[name].size) % _REPEATED
            if len(size) == 1:
                tensors[name] = np.ones_like(tensors[name])
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, shapes in layers.items() for name in shapes}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_tokenizer(folder, shape)


def hf_config(shape: Shape) -> dict[str, object]:
    """Return ``config.json`` as in the Qwen3 files on the hub."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": shape.vocab - 1,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": _STD,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "max_window_layers": shape.layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": shape.vocab - 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10_000.0,
        "sliding_window": None,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    }


def save_tokenizer(folder: Path, shape: Shape) -> None:
    """Save a byte-level BPE with exactly ``shape.vocab`` ids.

    The ids are the bytes, longer and longer strings of them, and the end of text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = list(alphabet), []
    for token in tokens:  # the list grows in the loop
        room = shape.vocab - 1 - len(tokens)
        merges += [(token, byte) for byte in alphabet[:room]]
        tokens += [token + byte for byte in alphabet[:room]]
        if len(tokens) == shape.vocab - 1:
            break
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "pad_token": _END,
        "model_max_length": shape.context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
