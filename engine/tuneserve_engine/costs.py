"""How long jobs will take: a cost that a job's payload tells, times what units of its kind took per
cost so far. Plain Python; the caller measures time."""

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

import msgspec

from tuneserve_engine.jobs import Job, JobKind
from tuneserve_engine.lattice import power_of_two_from

_REQUEST_BYTES = 1024
"""A gradient of no data would cost about as much as this many bytes of it."""

_PROMPT_TOKENS_PER_STEP = 32
"""Tokens of a prompt that cost as much as one decoded token: they run together, those alone."""

_REMEMBERED = 9
"""Units of a kind that count. The median passes over those that had to compile a program."""


class Cost(NamedTuple):
    """``work`` adds up over jobs: a tenant is charged by it. Samples of one ``group`` decode side
    by side, so that the time of a unit is less than the sum."""

    work: float
    prompt: float = 0  # steps before the first token
    steps: int = 0  # decoded one after the other
    sequences: int = 0  # side by side
    group: int = 0


@dataclass(frozen=True)
class Costs:
    """``lanes`` sequences decode side by side; a sample without a limit goes on until the prompt
    and it have ``context_tokens``."""

    lanes: int = 8
    context_tokens: int = 4096

    def of(self, job: Job) -> Cost:
        """What a job costs, by its payload alone. Costs compare within a kind only."""
        if job.kind == JobKind.FORWARD_BACKWARD:
            return Cost(_REQUEST_BYTES + len(job.payload))
        if job.kind != JobKind.SAMPLE:
            return Cost(1)
        try:
            return self._of_sample(msgspec.msgpack.decode(job.payload, type=_Asked))
        except msgspec.DecodeError:
            return Cost(1)  # it will fail at once

    def _of_sample(self, asked: "_Asked") -> Cost:
        limit = max(self.context_tokens - len(asked.prompt), 1)
        steps = max(min(asked.max_tokens or limit, limit), 1)
        sequences = max(asked.num_samples, 1)
        prompt = len(asked.prompt) / _PROMPT_TOKENS_PER_STEP
        group = power_of_two_from(len(asked.prompt) + steps)
        return Cost(prompt + steps * sequences, prompt, steps, sequences, group)

    def of_unit(self, costs: Sequence[Cost]) -> float:
        """What jobs of one kind cost together: their time, where ``work`` is their effort."""
        groups: defaultdict[int, list[Cost]] = defaultdict(list)
        for cost in costs:
            groups[cost.group].append(cost)
        return sum(self._of_group(group) for group in groups.values())

    def beside(self, cost: Cost) -> float:
        """What a unit may cost that this job starts: as much as the job, alone or, if it is a
        sample, with its like in the other lanes."""
        alike = max(self.lanes // cost.sequences, 1) if cost.sequences else 1
        return self.of_unit([cost] * alike)

    def _of_group(self, costs: Sequence[Cost]) -> float:
        decoded = sum(cost.steps * cost.sequences for cost in costs)
        if not decoded:
            return sum(cost.work for cost in costs)
        longest = max(cost.steps for cost in costs)
        return sum(cost.prompt for cost in costs) + max(longest, decoded / self.lanes)


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

    def shares(self, unit: Sequence[Job]) -> list[float]:
        """Each job's part of the unit's time; they add up to 1."""
        work = [self._cost(job).work for job in unit]
        return [each / sum(work) for each in work]

    def learn(self, unit: Sequence[Job], seconds: float) -> None:
        """Takes in what a unit took."""
        cost = self._costs.of_unit([self._cost(job) for job in unit])
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
