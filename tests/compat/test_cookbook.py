"""The cookbook's two loops and its DPO, unmodified, against the real service.

Every compatible server is measured by these commands.
"""

import json
import math
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from .client import API_KEY
from .recipes import Recipes, finite_metrics, records, saved_names
from .workdir import MODEL_NAME

MODEL = f"model_name={MODEL_NAME}"

pytestmark = pytest.mark.timeout(2400)  # the first run makes the environment


def test_sl_loop_trains_and_resumes_with_the_same_loss(recipes: Recipes, tmp_path: Path) -> None:
    arguments = (MODEL, "batch_size=8", "max_steps=3", "save_every=2", "lora_rank=8")
    log = tmp_path / "log"
    recipes.run("sl_loop", log, *arguments)
    rows = finite_metrics(log)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert saved_names(log) == ["000002", "final"]

    # As after a crash in the last step: resuming repeats it from step 2's checkpoint.
    checkpoints = log / "checkpoints.jsonl"
    checkpoints.write_text(checkpoints.read_text().splitlines()[0] + "\n")
    recipes.run("sl_loop", log, *arguments)
    again = finite_metrics(log)[len(rows) :]
    assert [row["step"] for row in again] == [2]
    assert again[0]["train_mean_nll"] == rows[2]["train_mean_nll"]
    assert saved_names(log) == ["000002", "000002", "final"]


@pytest.mark.parametrize("loss_fn", ["", "importance_sampling", "cispo", "gspo"])
def test_rl_loop_trains_on_rewards(
    recipes: Recipes, taught: Path, tmp_path: Path, loss_fn: str
) -> None:
    log = tmp_path / "log"
    log.mkdir()
    (log / "checkpoints.jsonl").write_text((taught / "checkpoints.jsonl").read_text())
    printed = recipes.run(
        "rl_loop",
        log,
        *(MODEL, "batch_size=4", "group_size=4", "max_tokens=12", "max_steps=2", "lora_rank=8"),
        *([f"loss_fn={loss_fn}"] if loss_fn else []),  # otherwise the loop's own: stable_reinforce
    )
    rows = finite_metrics(log)
    assert len(rows) == 2
    assert any(0 < row["reward/total"] < 1 for row in rows)
    assert printed.count("skipping training step") < 2
    assert saved_names(log) == ["taught", "final"]


def test_dpo_starts_from_its_reference(recipes: Recipes, tmp_path: Path) -> None:
    log = tmp_path / "log"
    recipes.run(
        "preference.dpo.train",
        log,
        *(MODEL, "batch_size=8", "max_steps=2", "behavior_if_log_dir_exists=delete"),
    )
    rows = finite_metrics(log)
    assert len(rows) == 2
    # A fresh adapter equals its reference, so the first loss is that of a coin toss.
    assert rows[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert saved_names(log) == ["final"]


def test_rolling_checkpoints_are_replaced_and_a_run_resumes(
    recipes: Recipes, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    arguments = (
        *(MODEL, "lora_rank=8", "batch_size=8", "max_length=1024", "eval_every=2"),
        *("save_every=2", "rolling_save_every=1", "rolling_ttl_seconds=3600"),
    )
    recipes.run("chat_sl.train", log, *arguments, "max_steps=4")
    rows = finite_metrics(log)
    saved = records(log / "checkpoints.jsonl")
    lasting = [record for record in saved if not record.get("rolling")]
    assert [record["name"] for record in lasting] == ["000002", "final"]
    assert len(saved) > len(lasting)
    kinds = ("weights", "sampler_weights")
    assert kept(recipes, saved) == {f"{kind}/{r['name']}" for r in lasting for kind in kinds}

    # As after a crash in step 3: the run continues from the checkpoint of step 2.
    (log / "checkpoints.jsonl").write_text(json.dumps(lasting[0]) + "\n")
    resume = "behavior_if_log_dir_exists=resume"
    recipes.run("chat_sl.train", log, *arguments, "max_steps=6", resume)
    again = finite_metrics(log)
    assert [row["step"] for row in again] == [0, 1, 2, 3, 4, 5]
    # The trainer queues the save behind step 2, so that step is taken a second time.
    assert again[2]["train_mean_nll"] < rows[2]["train_mean_nll"]


def kept(recipes: Recipes, saved: list[dict[str, Any]]) -> set[str]:
    """Checkpoints of the run that the server still has."""
    run_id = saved[0]["state_path"].split("/")[2]
    request = urllib.request.Request(
        f"{recipes.client.server.url}/api/v1/training_runs/{run_id}/checkpoints",
        headers={"X-API-Key": API_KEY},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return {each["checkpoint_id"] for each in json.load(answer)["checkpoints"]}
