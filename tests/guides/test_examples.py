"""Each file of ``examples/`` runs against the real service and learns what it claims, on both
SDKs, including those that README.md runs.

Thresholds are far from the results of these seeds: 0.05 nats a token, 0.95, 4.3, and 0.014 nats.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.nightly import at_night

FOLDER = Path(__file__).parents[2] / "examples"


def learnt_the_rows(said: str) -> bool:
    before, after = map(float, re.findall(r"loss per token (\S+) → (\S+)", said)[0])
    return (
        before > 2
        and after < 0.1
        and said.rstrip().endswith("Arr, matey! the sky be blue, yo ho ho!")
    )


def earns_its_reward(said: str) -> bool:
    before, after = map(float, re.findall(r"reward (\S+) → (\S+)", said)[0])
    return before < 0.5 and after > 0.8


def prefers_the_chosen(said: str) -> bool:
    margin, share = re.findall(r"margin 0.00 → (\S+), the right way in (\d+)%", said)[0]
    return float(margin) > 2 and int(share) == 100


def came_close_to_the_teacher(said: str) -> bool:
    before, after = map(float, re.findall(r"KL divergence (\S+) → (\S+) nats", said)[0])
    return before > 0.5 and after < before / 10


def went_on_where_it_was(said: str) -> bool:
    losses = list(map(float, re.findall(r"^losses (.*)", said, re.M)[0].split()))
    is_killed = "the first process ended with status -9" in said
    is_same = "the same bits as without the kill: True" in said
    return is_killed and is_same and len(losses) == 8 and losses[-1] < losses[0] / 3


USES = {
    "sft": learnt_the_rows,
    "rl": earns_its_reward,
    "dpo": prefers_the_chosen,
    "distill": came_close_to_the_teacher,
    "resume": went_on_where_it_was,
}


EXAMPLES = {name for use in USES for name in (use, f"{use}_tinker")}
BY_DAY = {"sft", "sft_tinker", "rl", "dpo_tinker", "distill", "resume_tinker"}
"""The examples of README.md, and each other use on one SDK."""


def is_ours(name: str) -> bool:
    """Whether the example uses our SDK."""
    return not name.endswith("_tinker")


def test_every_use_has_a_file_on_each_sdk() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == EXAMPLES


RUN = """
import os, runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path]
    print("--- ", path, flush=True)
    runpy.run_path(path, run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""
"""Several programs in one process, because importing the official SDK takes seconds.

The process ends at once: otherwise, in one of forty processes, the SDK's thread (0.38.0) aborts
everything.
"""


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, environment: dict[str, str]) -> dict[str, str]:
    """The output of each chosen example. Both SDKs run at once, as two tenants would."""

    def run(names: list[str]) -> list[str]:
        paths = [str(FOLDER / f"{name}.py") for name in names]
        ran = subprocess.run(
            [sys.executable, "-c", RUN, *paths],
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout.split("--- ")[1:]

    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_an_example_learns"
    ]
    sdks = [[name for name in chosen if is_ours(name) == ours] for ours in (True, False)]
    with ThreadPoolExecutor() as pool:
        outputs = [text for texts in pool.map(run, sdks) for text in texts]
    return dict(zip([*sdks[0], *sdks[1]], outputs, strict=True))


@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else at_night(name) for name in sorted(EXAMPLES)]
)
def test_an_example_learns(name: str, said: dict[str, str]) -> None:
    is_learnt: Callable[[str], bool] = USES[name.removesuffix("_tinker")]
    assert is_learnt(said[name]), said[name]
