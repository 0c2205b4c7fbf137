"""The costs and effects of requests, as plain data for the worker, the queue and the API."""

from dataclasses import dataclass, field, fields
from typing import Literal

FORWARD_FLOPS = 2
"""FLOPs of a forward pass per parameter and token: a multiplication and an addition (Kaplan et al.
2020, arXiv:2001.08361, section 2.1). The FLOPs of attention and the adapters are left out."""

BACKWARD_FLOPS = 2
"""FLOPs of a backward pass per parameter and token. It would be 4 (ibid.) if weights got gradients
as activations do, but the base model's weights are frozen."""

MOST_POINTS = 2048
"""The most points kept of each kind of a model's curve."""

DAY_S = 86_400

PointKind = Literal["forward_backward", "forward", "optim_step"]


@dataclass(frozen=True)
class Usage:
    """The cost of a request, and how long it took.

    ``device_s`` is the request's share of its batches. ``padded_tokens`` were computed besides its
    own tokens. ``queued_s`` is the time from the request's arrival at the worker until it began,
    ``ran_s`` the time from then until its result: ``packed_s`` of that is before its first batch
    had the device, ``transfer_s`` after its last. ``behind`` is the number of requests that began
    while it was queued, ``behind_own`` the number of these of its own tenant; ``others`` is the
    number of requests that shared its first batch. ``total_s``, from acceptance until the result is
    stored, is set by the store.
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
    """The sums of usage over requests."""

    requests: int = 0
    device_s: float = 0.0
    trained_tokens: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    padded_tokens: int = 0
    flops: float = 0.0

    @classmethod
    def from_usage(cls, usage: Usage) -> "Totals":
        """Return the totals of one request."""
        return cls(1, *(getattr(usage, name) for name in TOTALLED[1:]))

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, name) + getattr(other, name) for name in TOTALLED))


TOTALLED = tuple(each.name for each in fields(Totals))


@dataclass(frozen=True)
class TenantUsage:
    """The usage of a tenant, by the names of its models and of the base models it sampled from.

    Samples count for the base model, whatever adapter they used.
    """

    tenant: str
    by_model: dict[str, Totals] = field(default_factory=dict)

    @property
    def total(self) -> Totals:
        return sum(self.by_model.values(), Totals())


@dataclass(frozen=True)
class CurvePoint:
    """A point of a model's curve, from one of its requests.

    It is the summed loss of a ``forward_backward`` or ``forward``, or an optimizer step.
    ``position`` is the request's position in the model's log. ``weight`` is the sum of the tokens'
    weights, 0 for losses without weights. ``step`` counts from 1. ``time_s`` is set by the store.
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


def loss_count(loss_sum: float | None, weight: float | None, tokens: int | None) -> float:
    """Return the number over which the loss of a request is a mean.

    It is the weight of its tokens or, for a loss without weights, their number. A request whose
    tokens all have the weight 0 has no loss, and does not count.
    """
    if weight:
        return weight
    return float(tokens or 0) if loss_sum else 0.0


def stride(n: int) -> int:
    """Return the stride of the points that are kept of the first ``n + 1`` of a kind.

    Points are kept if their number, from 0, is a multiple of the stride; the newest is kept, too.
    The stride doubles whenever there would be more than ``MOST_POINTS`` points, so that the kept
    points are evenly spaced from the first to the last.
    """
    return 1 if n < MOST_POINTS else 1 << (n // MOST_POINTS).bit_length()


def day_of(unix_s: float) -> int:
    """Return the number of the day since 1970-01-01, in UTC."""
    return int(unix_s // DAY_S)
