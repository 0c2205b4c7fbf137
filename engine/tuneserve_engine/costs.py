"""How long jobs will take: a cost that a job's payload tells, times what units of its kind took per
cost so far. Plain Python; the caller measures time."""

import sys
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import msgspec

from tuneserve_client.proto.head import datum_lengths
from tuneserve_engine.backend.base import PROMPT_TOKENS_PER_STEP
from tuneserve_engine.errors import EngineError
from tuneserve_engine.jobs import Job, JobKind
from tuneserve_engine.lattice import ShapeLattice, multiple_from

_REQUEST_TOKENS = 16
"""A gradient of no data would cost about as much as these."""

_MOST_FIELDS = 16_384
"""Fields of a request that are looked at: a thousand datums have fewer."""

_REMEMBERED = 9
"""Units of a kind that count. The median passes over those that had to compile a program."""


@dataclass(frozen=True)
class Cost:
    """What one job costs. Costs compare within a kind only.

    ``work`` adds up over jobs: a tenant is charged by it. A unit of gradients takes less than the
    sum where they share chunks that would be empty: each has ``tokens``, in whole blocks. A sample
    takes a lane for each of its ``sequences``; its work is the most that it can come to.
    """

    work: float
    tokens: int = 0
    sequences: int = 1


class Costs:
    """What jobs cost on a device with this lattice and so many lanes for decoding."""

    def __init__(self, lattice: ShapeLattice | None = None, *, context: int = 4096, lanes: int = 8):
        self._lattice = lattice or ShapeLattice(context)
        self._context = context
        self._lanes = lanes

    def of(self, job: Job) -> Cost:
        try:
            if job.kind == JobKind.FORWARD_BACKWARD:
                return self._of_gradient(datum_lengths(job.payload, _MOST_FIELDS))
            if job.kind == JobKind.SAMPLE:
                return self._of_sample(msgspec.msgpack.decode(job.payload, type=_Asked))
        except (EngineError, msgspec.DecodeError):
            pass  # it will be refused at once
        return Cost(1)

    def of_unit(self, costs: Sequence[Cost]) -> float:
        """What jobs of one kind cost together."""
        if any(cost.tokens for cost in costs):
            return self._of_gradients(costs)
        return sum(cost.work for cost in costs)

    def beside(self, cost: Cost) -> float:
        """What a unit may cost that this job starts: as much as the job alone."""
        return self.of_unit([cost])

    def shared(self, cost: Cost) -> float:
        """What a unit may cost that this job starts and others of other tenants join. A unit of
        gradients costs the device something once, however small it is: a CPU copies each layer's
        weights. So small ones of many tenants share four chunks."""
        if not cost.tokens:
            return self.beside(cost)
        return self._of_gradients([replace(cost, tokens=max(cost.tokens, self._lattice.piece))])

    def is_small(self, cost: Cost) -> bool:
        """Whether the gradient has room in the chunks that small ones of many tenants share."""
        return 0 < cost.tokens <= self._lattice.piece

    @property
    def places(self) -> int:
        """Sequences that may be on their way at once: twice as many as lanes, so that one that is
        free has the next at once."""
        return 2 * self._lanes

    @property
    def slots(self) -> int:
        """Gradients that one pass has room for, if all adapters are of the lowest ranks."""
        return self._lattice.slots(self._lattice.rank_classes[0])

    def full(self, costs: Sequence[Cost]) -> int:
        """How many of a unit's jobs, in this order, fill their chunks, where those behind them
        would have one more to themselves, and not fill it. All, where there are none such."""
        tokens = sum(cost.tokens for cost in costs)
        chunk = self._lattice.chunk
        rest = 0
        for count in range(len(costs) - 1, 0, -1):
            rest += costs[count].tokens
            if rest >= chunk:
                break
            if rest and (tokens - rest) % chunk == 0:
                return count
        return len(costs)

    def _of_gradient(self, lengths: Sequence[int]) -> Cost:
        tokens = multiple_from(sum(lengths), self._lattice.block)
        return Cost(work=_REQUEST_TOKENS + tokens, tokens=tokens)

    def _of_gradients(self, costs: Sequence[Cost]) -> float:
        """Tokens that are computed, padding included, as if one stream had room for all."""
        tokens = sum(cost.tokens for cost in costs)
        return _REQUEST_TOKENS + multiple_from(tokens, self._lattice.chunk)

    def _of_sample(self, asked: "_Asked") -> Cost:
        limit = max(self._context - len(asked.prompt), 1)
        steps = max(min(limit if asked.max_tokens is None else asked.max_tokens, limit), 1)
        sequences = max(asked.num_samples, 1)
        prompt = len(asked.prompt) / PROMPT_TOKENS_PER_STEP
        return Cost(work=prompt + steps * sequences, sequences=sequences)


class Estimates:
    """Seconds, learned from the units that were run."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._known: dict[str, Cost] = {}  # of pending jobs, by request id
        self._rates: defaultdict[JobKind, deque[float]] = defaultdict(_recent)

    def unit_s(self, unit: Sequence[Job]) -> float | None:
        """How long jobs of one kind take together; None before any of the kind ran."""
        rates = self._rates[unit[0].kind]
        if not rates:
            return None
        return median_low(rates) * self._costs.of_unit([self._cost(job) for job in unit])

    def room_s(self, first: Job) -> float:
        """How long a unit may take that this job starts; 0 before any of the kind ran."""
        rates = self._rates[first.kind]
        return median_low(rates) * self._costs.beside(self._cost(first)) if rates else 0.0

    def shared_s(self, first: Job) -> float:
        """The same, where each job that joins is another tenant's."""
        rates = self._rates[first.kind]
        return median_low(rates) * self._costs.shared(self._cost(first)) if rates else 0.0

    def is_long(self, job: Job, slice_s: float) -> bool:
        """Whether the job is a gradient that takes longer than a slice, and is not small."""
        if job.kind != JobKind.FORWARD_BACKWARD or self._costs.is_small(self._cost(job)):
            return False
        return (self.unit_s([job]) or 0.0) > slice_s

    def most(self, first: Job) -> int:
        """Jobs that a unit of this one's kind has room for."""
        return self._costs.slots if first.kind == JobKind.FORWARD_BACKWARD else sys.maxsize

    def full(self, unit: Sequence[Job]) -> int:
        """See ``Costs.full``."""
        return self._costs.full([self._cost(job) for job in unit])

    @property
    def places(self) -> int:
        """See ``Costs.places``."""
        return self._costs.places

    def sequences(self, job: Job) -> int:
        return self._cost(job).sequences

    def shares(self, unit: Sequence[Job], work: Mapping[str, float] | None = None) -> list[float]:
        """Each job's part of the unit's time; they add up to 1. ``work`` is what was done for
        samples, by request id, if that is known."""
        if work and sum(work.values()) > 0:
            parts = [work.get(job.request_id, 0.0) for job in unit]
        else:
            parts = [self._cost(job).work for job in unit]
        return [part / sum(parts) for part in parts]

    def learn(
        self, unit: Sequence[Job], seconds: float, work: Mapping[str, float] | None = None
    ) -> None:
        """Takes in what a unit took. ``work`` as in ``shares``."""
        cost = sum((work or {}).values()) or self._costs.of_unit([self._cost(job) for job in unit])
        self._rates[unit[0].kind].append(seconds / cost)

    def forget_all_but(self, jobs: Collection[Job]) -> None:
        """Frees what is known of others, now and then."""
        if len(self._known) > 2 * len(jobs) + _REMEMBERED:
            ids = {job.request_id for job in jobs}
            self._known = {name: cost for name, cost in self._known.items() if name in ids}

    def _cost(self, job: Job) -> Cost:
        if job.request_id not in self._known:
            self._known[job.request_id] = self._costs.of(job)
        return self._known[job.request_id]


def _recent() -> deque[float]:
    return deque(maxlen=_REMEMBERED)


class _Asked(msgspec.Struct):
    """The part of a ``Sample`` that costs."""

    prompt: list[int]
    num_samples: int = 1
    max_tokens: int | None = None
