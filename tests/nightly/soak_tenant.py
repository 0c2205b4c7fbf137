"""A paying tenant: ``soak_tenant.py <url> <diary>``.

It trains, one small step after the other, until it gets SIGTERM. The diary records the accepted
requests and the results, a line per step. The step's number decides its contents, so an undisturbed
run can be compared with it, bit for bit.
"""

import hashlib
import json
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuneserve_client import Client, next_token_datum
from tuneserve_client.results import StepOutput, TrainOutput
from tuneserve_client.sync import Future, Model

KEY = "tml-paying"
SAVED_EVERY = 100
DEADLINE_S = 600.0
AHEAD = 8
"""The number of steps that an undisturbed run has in flight at once."""


@dataclass(frozen=True)
class Step:
    """One step. ``accepted`` and ``told`` are the requests' ids and results, by kind."""

    number: int
    begun_s: float  # on the clock that all processes of this machine share
    ended_s: float
    accepted: dict[str, str]
    told: dict[str, Any]

    @property
    def wait_s(self) -> float:
        return self.ended_s - self.begun_s


class Asked:
    """The requests of one step, in flight."""

    def __init__(self, model: Model, number: int) -> None:
        self._number = number
        self._begun_s = time.monotonic()
        tokens = [(7 * number + (number % 11 + 1) * j) % 400 + 3 for j in range(128)]
        self._futures: dict[str, Future[Any]] = {
            "forward_backward": model.forward_backward([next_token_datum(tokens)]),
            "optim_step": model.optim_step(1e-3),
        }

    def ended(self) -> Step:
        accepted = {kind: future.request_id for kind, future in self._futures.items()}
        told = {kind: told_of(future.result()) for kind, future in self._futures.items()}
        return Step(self._number, self._begun_s, time.monotonic(), accepted, told)


def told_of(result: object) -> Any:
    """All bits of a result, as JSON."""
    match result:
        case TrainOutput():
            logprobs = b"".join(each.tobytes() for each in result.logprobs)
            return {**result.metrics, "logprobs": hashlib.sha256(logprobs).hexdigest()}
        case StepOutput():
            return result.metrics
        case str():
            return result.partition("/weights/")[2]
    raise TypeError(f"{result!r} is no result of this tenant's requests")


def saved(model: Model, number: int, name: str) -> Step:
    begun_s = time.monotonic()
    future = model.save(name)
    accepted = {"save": future.request_id}
    path = future.result()
    return Step(number, begun_s, time.monotonic(), accepted, {"save": told_of(path), "path": path})


def new_model(client: Client) -> Model:
    return client.create_model(rank=8, seed=1)


def steps(model: Model) -> Iterator[Step]:
    """Endless steps, each started when the previous one has ended."""
    number = 0
    while True:
        yield Asked(model, number).ended()
        number += 1
        if number % SAVED_EVERY == 0:
            yield saved(model, number, f"step-{number}")


def undisturbed(model: Model, count: int) -> Iterator[Step]:
    """The first ``count`` steps as fast as possible, and the end."""
    asked: deque[Asked] = deque()
    for number in range(count):
        asked.append(Asked(model, number))
        if len(asked) == AHEAD or number + 1 == count or (number + 1) % SAVED_EVERY == 0:
            while asked:
                yield asked.popleft().ended()
        if (number + 1) % SAVED_EVERY == 0:
            yield saved(model, number + 1, f"step-{number + 1}")
    yield saved(model, count, "final")


def read(diary: Path) -> list[Step]:
    return [Step(**json.loads(line)) for line in diary.read_text().splitlines()]


def main(url: str, diary: Path) -> None:
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    with (
        diary.open("w") as file,
        Client(url, api_key=KEY, deadline_s=DEADLINE_S) as client,
    ):
        model = new_model(client)
        count = 0
        for step in steps(model):
            print(json.dumps(asdict(step)), file=file, flush=True)
            count += "optim_step" in step.accepted
            if stopped and "optim_step" in step.accepted and count % SAVED_EVERY:
                break
        print(json.dumps(asdict(saved(model, count, "final"))), file=file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
