"""A decoder's shape as a Hugging Face ``config.json`` states it; other options are refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
_QWEN3_HEAD_DIM = 128  # the default of transformers if a Qwen3 config leaves head_dim out
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_RMS_EPS = 1e-6


class UnsupportedModel(ValueError):
    """The configuration asks for something that the decoder does not compute."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the low RoPE frequencies (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder; hashable, so that it can be a static part of a compiled program."""

    architecture: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context_length: int
    rope_theta: float = _DEFAULT_ROPE_THETA
    rope_scaling: Llama3Scaling | None = None
    rms_eps: float = _DEFAULT_RMS_EPS
    tied_embeddings: bool = False
    attention_bias: bool = False
    """Whether the q, k and v projections have a bias."""
    output_bias: bool = False
    """Whether the o projection has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether q and k are RMS-normalised per head before RoPE (Qwen3)."""
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UnsupportedModel(
                f"{self.heads} attention heads cannot share {self.kv_heads} key/value heads; "
                "num_attention_heads must be a multiple of num_key_value_heads"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim is {self.head_dim}; rotary positions need it even")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """Read a parsed ``config.json``. Raises ``UnsupportedModel`` with the refused option."""
        architecture = _architecture(hf)
        missing = [name for name in _REQUIRED if hf.get(name) is None]
        if missing:
            raise UnsupportedModel(f"config.json lacks {', '.join(missing)}; it is incomplete")
        _refuse_unsupported(hf)
        heads = int(hf["num_attention_heads"])
        rope = _rope_parameters(hf)
        bias = bool(hf.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=int(hf["vocab_size"]),
            hidden=int(hf["hidden_size"]),
            layers=int(hf["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(hf.get("num_key_value_heads") or heads),
            head_dim=_head_dim(hf, architecture),
            intermediate=int(hf["intermediate_size"]),
            context_length=int(hf["max_position_embeddings"]),
            rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or _DEFAULT_ROPE_THETA),
            rope_scaling=_rope_scaling(rope, hf),
            rms_eps=float(hf.get("rms_norm_eps", _DEFAULT_RMS_EPS)),
            tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
            # Qwen2 has no such option: its q, k, v always carry a bias and its o never does.
            attention_bias=architecture == "qwen2" or bias,
            output_bias=architecture != "qwen2" and bias,
            mlp_bias=architecture == "llama" and bool(hf.get("mlp_bias", False)),
            qk_norm=architecture == "qwen3",
            eos_token_ids=token_ids(hf.get("eos_token_id")),
        )

    def with_eos(self, eos_token_ids: tuple[int, ...]) -> "ModelConfig":
        """Return the same model with other end-of-sequence tokens."""
        return replace(self, eos_token_ids=eos_token_ids)


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return Hugging Face's ``eos_token_id`` (absent, one id or a list) as a tuple."""
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)


def _architecture(hf: Mapping[str, Any]) -> str:
    names = [str(name) for name in hf.get("architectures") or ()]
    architecture = str(hf.get("model_type"))
    known = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    if architecture not in known or (names and known[architecture] not in names):
        raise UnsupportedModel(
            f"model_type {architecture!r}, architectures {names} is not supported; "
            f"supported: {', '.join(known.values())}"
        )
    return architecture


def _head_dim(hf: Mapping[str, Any], architecture: str) -> int:
    if hf.get("head_dim") is not None:
        return int(hf["head_dim"])
    if architecture == "qwen3":
        return _QWEN3_HEAD_DIM
    return int(hf["hidden_size"]) // int(hf["num_attention_heads"])


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported; only 'silu' is")
    if hf.get("quantization_config"):
        raise UnsupportedModel(
            "quantization_config is set; serve the unquantised float32 or bfloat16 weights instead"
        )
    layers = int(hf["num_hidden_layers"])
    windowed = [kind for kind in hf.get("layer_types") or () if kind != "full_attention"]
    full_layers = int(hf.get("max_window_layers", 0))
    if windowed or (hf.get("use_sliding_window") and full_layers < layers):
        kind = windowed[0] if windowed else "use_sliding_window"
        raise UnsupportedModel(f"{kind} is not supported; every layer must use full attention")


def _rope_parameters(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the RoPE options under either of their names (transformers 4, transformers 5).

    If both are set, ``rope_scaling`` wins, as in transformers.
    """
    return hf.get("rope_scaling") or hf.get("rope_parameters") or {}


def _rope_scaling(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> Llama3Scaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported; only 1.0 is")
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModel(f"rope_type {kind!r} is not supported; 'default' and 'llama3' are")
    needed = ("factor", "low_freq_factor", "high_freq_factor")
    missing = [name for name in needed if rope.get(name) is None]
    if missing:
        raise UnsupportedModel(f"the llama3 RoPE options lack {', '.join(missing)}")
    original = rope.get("original_max_position_embeddings")
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context_length=int(original or hf["max_position_embeddings"]),
    )
