"""What an adapter is, in plain data: known to the queue, the worker and every backend."""

from dataclasses import dataclass

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = PROJECTIONS[:4]
MLP = PROJECTIONS[4:]
UNEMBED = "unembed"


@dataclass(frozen=True)
class AdapterConfig:
    """A LoRA adapter's shape and start: ``scale = alpha / rank``; ``seed`` fixes the initial A."""

    rank: int
    alpha: float
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the weights that this adapter trains, in storage order."""
        attn = ATTENTION if self.train_attn else ()
        mlp = MLP if self.train_mlp else ()
        return attn + mlp + ((UNEMBED,) if self.train_unembed else ())


@dataclass(frozen=True)
class AdamParams:
    """Hyper-parameters of one ``optim_step``, as in ``torch.optim.AdamW``; clip norm 0 = none."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class BaseModelInfo:
    """The facts about a loaded base model that clients and validation need.

    ``name`` is the name it is served under; ``tokenizer_id`` is a hub id or a local directory.
    """

    name: str
    architecture: str
    vocab_size: int
    context_length: int
    max_rank: int
    tokenizer_id: str
    eos_token_ids: tuple[int, ...] = ()
