"""Adapters as plain data for the queue, the worker and every backend."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from tuneserve_engine.core.errors import UserError

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = PROJECTIONS[:4]
MLP = PROJECTIONS[4:]
UNEMBED = "unembed"

_LARGEST = (2 - 2**-23) * 2.0**127  # of all float32


@dataclass(frozen=True)
class AdapterConfig:
    """The shape and the initial state of an adapter.

    LoRA: ``scale = alpha / rank``; ``seed`` fixes the initial A. ``options`` are those of the kind,
    see ``kinds``; targets may have lower ranks than ``rank``. ``frozen`` names the state that an
    adapter of some kinds shares with others, and without which it has no meaning.
    """

    rank: int
    alpha: float
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    kind: str = "lora"
    options: Mapping[str, str] = field(default_factory=dict)
    frozen: str = ""

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the weights that this adapter trains, in storage order."""
        attn = ATTENTION if self.train_attn else ()
        mlp = MLP if self.train_mlp else ()
        return attn + mlp + ((UNEMBED,) if self.train_unembed else ())


@dataclass(frozen=True)
class AdamwParams:
    """The hyper-parameters of one ``optim_step``, as in ``torch.optim.AdamW``.

    A ``grad_clip_norm`` of 0 means no clipping.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


def check_adam_params(params: AdamwParams) -> None:
    """Raise ``UserError`` for hyper-parameters that torch refuses, or that are too large.

    They are too large if a step's own numbers would not be finite in float32.
    """
    for name, value in asdict(params).items():
        if not abs(value) <= _LARGEST:
            raise UserError(f"adam_params.{name} is {value}; it must be a finite float32")
    for name in ("beta1", "beta2"):
        value = getattr(params, name)
        if not 0 <= value < 1:
            raise UserError(f"adam_params.{name} is {value}; it must be at least 0 and below 1")
    for name in ("learning_rate", "eps", "weight_decay"):
        value = getattr(params, name)
        if value < 0:
            raise UserError(f"adam_params.{name} is {value}; it must be at least 0")
    rate = params.learning_rate
    if rate / (1 - params.beta1) > _LARGEST:
        raise UserError(
            f"adam_params.learning_rate is {rate} with a beta1 of {params.beta1}; the first step "
            "would not be a finite float32; lower it"
        )
    if rate * params.weight_decay > _LARGEST:
        raise UserError(
            f"adam_params.learning_rate is {rate} and weight_decay {params.weight_decay}; their "
            "product must be a finite float32; lower them"
        )


@dataclass(frozen=True)
class BaseModelInfo:
    """The facts about a loaded base model that clients and validation need.

    ``name`` is the name under which the model is served; ``tokenizer_id`` is a hub id or a local
    directory. ``parameters`` counts the parameters by which every token is multiplied, so not the
    embedding, which is a table. ``target_shapes`` are [L, D, F] of every weight that LoRA can
    train, in storage order, and [D, F] of the unembedding; empty from a worker of an older release.
    ``revision`` is the commit of a base model from the hub; empty for a directory, and from an
    older release. ``client_tokenizer_id`` is the hub id or path from which clients load the
    tokenizer; if empty, that is ``tokenizer_id``.
    """

    name: str
    architecture: str
    vocab_size: int
    context_length: int
    max_rank: int
    tokenizer_id: str
    eos_token_ids: tuple[int, ...] = ()
    parameters: int = 0
    target_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    revision: str = ""
    client_tokenizer_id: str = ""


def check_targets(config: AdapterConfig) -> None:
    """Raise ``UserError`` for an adapter without targets."""
    if not config.targets:
        raise UserError(
            "lora_config trains nothing: train_attn, train_mlp and train_unembed are all false; "
            "set at least one to true"
        )


def check_same_shape(config: AdapterConfig, loaded: AdapterConfig, path: str) -> None:
    """Raise ``UserError`` if a model of ``config`` cannot take the weights of ``loaded``."""
    kinds = (config.kind, dict(config.options)), (loaded.kind, dict(loaded.options))
    if kinds[0] != kinds[1]:
        raise UserError(
            f"{path} is of kind {_shown(*kinds[1])}; this model is of kind {_shown(*kinds[0])}; "
            "create a new model from the checkpoint instead"
        )
    ours, theirs = (config.rank, config.targets), (loaded.rank, loaded.targets)
    if ours != theirs:
        raise UserError(
            f"{path} has rank {theirs[0]} on {', '.join(theirs[1])}; this model has rank {ours[0]} "
            f"on {', '.join(ours[1])}; create a new model from the checkpoint instead"
        )


def _shown(kind: str, options: Mapping[str, str]) -> str:
    return " ".join([kind, *(f"{name}={value}" for name, value in options.items())])
