"""What requests cost and did, in plain data: known to the worker, the queue and the API."""

from dataclasses import dataclass, field, fields
from typing import Literal

FORWARD_FLOPS = 2
"""Per parameter and token: a multiplication and an addition (Kaplan et al. 2020, arXiv:2001.08361,
section 2.1). What attention and the adapters add is left out."""

BACKWARD_FLOPS = 2
"""The same once more. It would be twice as much (ibid.) if weights got gradients as activations do;
the base model's are frozen."""

MOST_POINTS = 2048
"""Of each kind of a model's curve, that are kept."""

DAY_S = 86_400

PointKind = Literal["forward_backward", "forward", "optim_step"]


@dataclass(frozen=True)
class Usage:
    """What a request cost, and how long it took.

    ``device_s`` is its part of the units that it was in. ``padded_tokens`` were computed beside its
    own. ``queued_s`` is from when the worker had it until it began, ``ran_s`` from then until there
    was a result: ``packed_s`` of it before its first unit had the device, ``transfer_s`` after its
    last. ``behind`` requests began while it was queued, ``behind_own`` of them its tenant's;
    ``others`` shared its first unit. ``total_s``, from its acceptance until the result was stored,
    is for the store to say.
    """

    device_s: float = 0.0
    trained_tokens: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    padded_tokens: int = 0
    flops: float = 0.0
    queued_s: float = 0.0
    ran_s: float = 0.0
    others: int = 0
    total_s: float = 0.0
    packed_s: float = 0.0
    transfer_s: float = 0.0
    behind: int = 0
    behind_own: int = 0


@dataclass(frozen=True)
class Totals:
    """Sums over requests."""

    requests: int = 0
    device_s: float = 0.0
    trained_tokens: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    padded_tokens: int = 0
    flops: float = 0.0

    @classmethod
    def of(cls, usage: Usage) -> "Totals":
        """Of one request."""
        return cls(1, *(getattr(usage, name) for name in TOTALLED[1:]))

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, name) + getattr(other, name) for name in TOTALLED))


TOTALLED = tuple(each.name for each in fields(Totals))


@dataclass(frozen=True)
class TenantUsage:
    """What a tenant used, by the names of its models, and of the base models that it sampled from
    (the adapter, if any, is not told apart)."""

    tenant: str
    by_model: dict[str, Totals] = field(default_factory=dict)

    @property
    def total(self) -> Totals:
        return sum(self.by_model.values(), Totals())


@dataclass(frozen=True)
class CurvePoint:
    """What one request of a model did: the loss of a gradient (or of a mere ``forward``), summed as
    the loss is, or an optimizer step.

    ``position`` is the request's in the model's log. ``weight`` is the sum of the tokens' weights,
    0 for losses that have none. ``step`` counts from 1. ``time_s`` is for the store to say.
    """

    kind: PointKind
    position: int
    loss_sum: float | None = None
    tokens: int | None = None
    weight: float | None = None
    step: int | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    time_s: float = 0.0


def stride(n: int) -> int:
    """Which points are kept of the first ``n + 1`` of a kind: those whose number, from 0, is a
    multiple of this. It doubles whenever there would be more than ``MOST_POINTS``, so that what is
    kept is even from the first to the last."""
    return 1 if n < MOST_POINTS else 1 << (n // MOST_POINTS).bit_length()


def day_of(unix_s: float) -> int:
    """The number of the day, in UTC."""
    return int(unix_s // DAY_S)
