"""T1: random schedules of crashes, lost messages, resends and restarts, reproducible from a seed.

In every schedule, clients receive the results of an undisturbed run, and models end in the same
state, bit for bit.
"""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.simulation import Faults, play

SEEDS = 500
ROUNDS = 2  # of training per tenant


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence the logs: workers die by the thousand here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return play(0, tmp_path_factory.mktemp("undisturbed") / "data", Faults(), rounds=ROUNDS)[0]


def check(seeds: range, folder: Path, wanted: dict[str, Any], rounds: int = ROUNDS) -> int:
    crashes = 0
    for seed in seeds:
        got, world = play(seed, folder / str(seed), rounds=rounds)
        assert got == wanted, f"seed {seed} gives something else"
        crashes += world.crashes
        shutil.rmtree(folder / str(seed))
    return crashes


@pytest.mark.parametrize("part", range(10))
def test_random_schedules_change_no_bit(
    part: int, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    size = SEEDS // 10
    crashes = check(range(part * size, (part + 1) * size), tmp_path, undisturbed)
    print(f"{size} schedules, {crashes} crashes")
    assert crashes > size


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_twenty_thousand_schedules_change_no_bit(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    crashes = check(range(SEEDS, SEEDS + 20_000), tmp_path, undisturbed)
    print(f"20,000 schedules, {crashes} crashes")


@pytest.mark.nightly
def test_longer_schedules_change_no_bit(tmp_path: Path) -> None:
    wanted = play(0, tmp_path / "calm", Faults(), rounds=3)[0]
    assert check(range(200), tmp_path, wanted, rounds=3) > 200


def test_a_seed_determines_one_schedule(tmp_path: Path) -> None:
    first = play(7, tmp_path / "first")[1]
    second = play(7, tmp_path / "second")[1]
    assert first.crashes > 0
    assert first.trace == second.trace
