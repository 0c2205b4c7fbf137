"""Estimates of how long jobs take: a job's cost, read from its payload, times the seconds per cost
of past batches of its kind. Plain Python; the caller measures time."""

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import msgspec

from tuneserve_client.wire.proto.scan import read_sizes
from tuneserve_engine.backend.base import PROMPT_TOKENS_PER_STEP
from tuneserve_engine.core.errors import EngineError
from tuneserve_engine.core.jobs import Job, JobKind, snapshot_and_sequences
from tuneserve_engine.core.shapes import StaticShapes, multiple_from

_REQUEST_TOKENS = 16
"""The fixed cost of a gradient request, in tokens (about the cost of one without data)."""

_MOST_FIELDS = 16_384
"""The most fields of a request that are read: a thousand datums have fewer."""

_REMEMBERED = 9
"""The number of past batches of a kind that count; their median ignores those that compiled a
program."""


def sequences_of(job: Job) -> int:
    """Return the number of sequences that a sample asks for; 0 if its payload is invalid."""
    return snapshot_and_sequences(job.payload)[1]


@dataclass(frozen=True)
class Cost:
    """The cost of one job. Costs compare within a kind only.

    ``work`` adds up over jobs, and tenants are charged by it. A batch of gradients costs less than
    the sum of its jobs where they share chunks that would be partly empty: each gradient has
    ``tokens``, in whole blocks. A sample takes a decode slot for each of its ``sequences``; its
    ``work`` is an upper bound.
    """

    work: float
    tokens: int = 0
    sequences: int = 1


class CostModel:
    """The costs of jobs on a device with these static shapes and ``decode_slots`` decode slots."""

    def __init__(
        self,
        static_shapes: StaticShapes | None = None,
        *,
        context: int = 4096,
        decode_slots: int = 8,
    ):
        self._static_shapes = static_shapes or StaticShapes(context)
        self._context = context
        self.small_tokens = self._static_shapes.bin_tokens
        """The most tokens of a gradient that shares its chunks with those of many tenants."""
        self.slots = self._static_shapes.slots(self._static_shapes.rank_buckets[0])
        """The number of gradients that one pass takes if all adapters have the lowest ranks."""
        self.max_sequences = 2 * decode_slots
        """The number of sequences that may be under way at once.

        It is twice the number of decode slots, so that a free slot has its next sequence at once.
        """

    def job_cost(self, job: Job) -> Cost:
        """Return the cost of the job, read from its payload."""
        try:
            if job.kind == JobKind.FORWARD_BACKWARD:
                _, lengths = read_sizes(job.payload, _MOST_FIELDS)
                tokens = multiple_from(sum(lengths), self._static_shapes.block)
                return Cost(work=_REQUEST_TOKENS + tokens, tokens=tokens)
            if job.kind == JobKind.SAMPLE:
                return self._sample_cost(msgspec.msgpack.decode(job.payload, type=_SampleSize))
        except (EngineError, msgspec.DecodeError):
            pass  # the job will be refused at once
        return Cost(1)

    def batch_cost(self, costs: Sequence[Cost]) -> float:
        """Return the cost of jobs of one kind in one batch.

        Gradients cost the computed tokens, padding included, as if one micro-batch had room for
        all.
        """
        tokens = sum(cost.tokens for cost in costs)
        if tokens:
            return _REQUEST_TOKENS + multiple_from(tokens, self._static_shapes.chunk)
        return sum(cost.work for cost in costs)

    def shared_budget(self, cost: Cost) -> float:
        """Return the most that a batch may cost that this job starts and other tenants join.

        A batch of gradients has a fixed cost on the device, however small it is: a CPU copies each
        layer's weights. So small gradients of many tenants share four chunks.
        """
        if cost.tokens:
            cost = replace(cost, tokens=max(cost.tokens, self.small_tokens))
        return self.batch_cost([cost])

    def jobs_in_full_chunks(self, costs: Sequence[Cost]) -> int:
        """Return the length of the longest prefix that fills whole chunks, if dropping the rest
        saves a partly filled chunk; otherwise ``len(costs)``."""
        tokens = sum(cost.tokens for cost in costs)
        chunk = self._static_shapes.chunk
        rest = 0
        for count in range(len(costs) - 1, 0, -1):
            rest += costs[count].tokens
            if rest >= chunk:
                break
            if rest and (tokens - rest) % chunk == 0:
                return count
        return len(costs)

    def _sample_cost(self, asked: "_SampleSize") -> Cost:
        limit = max(self._context - len(asked.prompt), 1)
        steps = max(min(limit if asked.max_tokens is None else asked.max_tokens, limit), 1)
        sequences = max(asked.num_samples, 1)
        prompt = len(asked.prompt) / PROMPT_TOKENS_PER_STEP
        return Cost(work=prompt + steps * sequences, sequences=sequences)


class TimeEstimator:
    """An estimator of seconds, learned from the batches that were run."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self.max_gradients = costs.slots
        """The number of gradients that a batch has room for."""
        self.max_sequences = costs.max_sequences
        """The number of sequences that may be under way at once."""
        self._known: dict[str, Cost] = {}  # of pending jobs, by request id
        self._rates: defaultdict[JobKind, deque[float]] = defaultdict(_recent)

    def batch_s(self, batch: Sequence[Job]) -> float | None:
        """Return how long jobs of one kind take together; None before any of the kind ran."""
        rates = self._rates[batch[0].kind]
        if not rates:
            return None
        return median_low(rates) * self._costs.batch_cost([self._cost(job) for job in batch])

    def shared_s(self, first: Job) -> float:
        """Return how long a batch may take that this job starts and only other tenants join.

        It is 0 before any job of the kind ran.
        """
        rates = self._rates[first.kind]
        return median_low(rates) * self._costs.shared_budget(self._cost(first)) if rates else 0.0

    def is_long(self, job: Job, slice_s: float) -> bool:
        """Return whether the job is a gradient that takes longer than a slice and is not small."""
        if job.kind != JobKind.FORWARD_BACKWARD:
            return False
        if 0 < self._cost(job).tokens <= self._costs.small_tokens:
            return False
        return (self.batch_s([job]) or 0.0) > slice_s

    def jobs_in_full_chunks(self, batch: Sequence[Job]) -> int:
        """See ``CostModel.jobs_in_full_chunks``."""
        return self._costs.jobs_in_full_chunks([self._cost(job) for job in batch])

    def sequences(self, job: Job) -> int:
        return self._cost(job).sequences

    def shares(self, batch: Sequence[Job], work: Mapping[str, float] | None = None) -> list[float]:
        """Return each job's share of the batch's time; the shares add up to 1.

        ``work`` is the work done for each sample, by request id, if it is known.
        """
        if work and sum(work.values()) > 0:
            parts = [work.get(job.request_id, 0.0) for job in batch]
        else:
            parts = [self._cost(job).work for job in batch]
        return [part / sum(parts) for part in parts]

    def learn(
        self, batch: Sequence[Job], seconds: float, work: Mapping[str, float] | None = None
    ) -> None:
        """Learn from a batch that took ``seconds``; ``work`` is as in ``shares``."""
        cost = sum((work or {}).values()) or self._costs.batch_cost(
            [self._cost(job) for job in batch]
        )
        self._rates[batch[0].kind].append(seconds / cost)

    def forget_all_but(self, jobs: Collection[Job]) -> None:
        """Free the remembered costs of other jobs once there are many."""
        if len(self._known) > 2 * len(jobs) + _REMEMBERED:
            ids = {job.request_id for job in jobs}
            self._known = {name: cost for name, cost in self._known.items() if name in ids}

    def _cost(self, job: Job) -> Cost:
        if job.request_id not in self._known:
            self._known[job.request_id] = self._costs.job_cost(job)
        return self._known[job.request_id]


def _recent() -> deque[float]:
    return deque(maxlen=_REMEMBERED)


class _SampleSize(msgspec.Struct):
    """The fields of a ``SampleCommand`` that determine its cost."""

    prompt: list[int]
    num_samples: int = 1
    max_tokens: int | None = None
