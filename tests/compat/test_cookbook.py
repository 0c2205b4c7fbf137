"""The cookbook's recipes, unmodified, against the real service.

The first three commands are the ones every compatible server is measured by; the others reach
what they do not: rolling checkpoints, resuming, asynchronous and streaming rollouts, distilling.
"""

import json
import math
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from .conftest import API_KEY, Client
from .environments import environment
from .workdir import MODEL_NAME

SCRIPTS = Path(__file__).parent / "scripts"
MODEL = f"model_name={MODEL_NAME}"
RL = (MODEL, "lora_rank=8", "max_steps=2", "loss_fn=importance_sampling")
# With arithmetic a tiny model earns nothing, but constant rewards are trained on all the same.
MATH_RL = (*RL, "groups_per_batch=4", "group_size=4", "max_tokens=8")
DISTILL = (MODEL, "lora_rank=8", "max_steps=2", "groups_per_batch=4", "max_tokens=8")

pytestmark = pytest.mark.timeout(2400)  # the environment is made where there is none


class Recipes:
    """Runs recipes in the cookbook's environment, each with a log folder."""

    def __init__(self, client: Client, python: Path) -> None:
        self.client = client
        self.python = python

    def run(self, module: str, log: Path, *arguments: str) -> str:
        return self.client.run(
            self.python, "-m", f"tinker_cookbook.recipes.{module}", *arguments, f"log_path={log}"
        )

    def script(self, name: str, *arguments: str) -> str:
        return self.client.run(self.python, str(SCRIPTS / name), *arguments)


@pytest.fixture(scope="session")
def recipes(client: Client) -> Recipes:
    return Recipes(client, environment("cookbook", torch=True))


@pytest.fixture(scope="session")
def taught(recipes: Recipes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log folder whose one checkpoint is an adapter that answers word problems by a coin toss."""
    log: Path = tmp_path_factory.mktemp("taught")
    recipes.script("teach_answers.py", MODEL_NAME, str(log))
    return log


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def finite_metrics(log: Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl``, in which every number must be finite."""
    rows = records(log / "metrics.jsonl")
    assert rows
    for row in rows:
        bad = {k: v for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        assert not bad, f"step {row.get('step')} of {log} has {bad}"
    return rows


def saved_names(log: Path) -> list[str]:
    """Names of the checkpoints in ``checkpoints.jsonl``; the last one must be complete."""
    saved = records(log / "checkpoints.jsonl")
    assert "/weights/" in saved[-1]["state_path"]
    assert "/sampler_weights/" in saved[-1]["sampler_path"]
    return [record["name"] for record in saved]


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


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "cispo", "gspo"])
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
        f"loss_fn={loss_fn}",
    )
    rows = finite_metrics(log)
    assert len(rows) == 2
    assert any(0 < row["reward/total"] < 1 for row in rows)
    assert printed.count("skipping training step") < 2
    assert saved_names(log) == ["taught", "final"]


def test_dpo_lowers_its_loss(recipes: Recipes, tmp_path: Path) -> None:
    log = tmp_path / "log"
    recipes.run(
        "preference.dpo.train",
        log,
        *(MODEL, "batch_size=8", "max_steps=2", "behavior_if_log_dir_exists=delete"),
    )
    rows = finite_metrics(log)
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

    # As after a crash in step 3: the run goes on from the checkpoint of step 2.
    (log / "checkpoints.jsonl").write_text(json.dumps(lasting[0]) + "\n")
    resume = "behavior_if_log_dir_exists=resume"
    recipes.run("chat_sl.train", log, *arguments, "max_steps=6", resume)
    again = finite_metrics(log)
    assert [row["step"] for row in again] == [0, 1, 2, 3, 4, 5]
    # The trainer queues the save behind step 2, so that step is taken a second time.
    assert again[2]["train_mean_nll"] < rows[2]["train_mean_nll"]


def kept(recipes: Recipes, saved: list[dict[str, Any]]) -> set[str]:
    """Checkpoints that the server still has of the run they were saved from."""
    run_id = saved[0]["state_path"].split("/")[2]
    request = urllib.request.Request(
        f"{recipes.client.server.url}/api/v1/training_runs/{run_id}/checkpoints",
        headers={"X-API-Key": API_KEY},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return {each["checkpoint_id"] for each in json.load(answer)["checkpoints"]}


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        pytest.param(
            "rl_basic",
            (
                *(MODEL, "lora_rank=8", "max_steps=2", "max_tokens=8"),
                # Named anew: parts of the recipe's own builder cannot be replaced.
                "dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
                *("dataset_builder.batch_size=4", "dataset_builder.group_size=4"),
                f"dataset_builder.model_name_for_tokenizer={MODEL_NAME}",
                "dataset_builder.renderer_name=qwen3",
            ),
            id="rl_basic",
        ),
        pytest.param("math_rl.train", MATH_RL, id="math_rl"),
        pytest.param("math_rl.train", (*MATH_RL, "max_steps_off_policy=2"), id="asynchronous"),
        pytest.param(
            "math_rl.train",
            (
                *MATH_RL,
                "stream_minibatch_config.groups_per_batch=4",
                "stream_minibatch_config.num_minibatches=2",
            ),
            id="streaming",
        ),
        pytest.param(
            "math_rl.train", (*MATH_RL, "num_substeps=2", "compute_post_kl=true"), id="substeps"
        ),
        pytest.param(
            "distillation.on_policy_distillation",
            (*DISTILL, f"teacher_model={MODEL_NAME}"),
            id="on_policy_distillation",
        ),
        pytest.param(
            "distillation.off_policy_reasoning",
            (
                *(MODEL, "lora_rank=8", "max_steps=2", "renderer_name=qwen3", "batch_size=8"),
                *("max_prompts=64", "buffer_size=64", "max_length=1024"),
            ),
            id="off_policy_reasoning",
        ),
        pytest.param(
            "sdft.train",
            (*DISTILL, "max_context_length=1024", "topk=8", "eval_every=0"),
            id="self_distillation",
        ),
        pytest.param(
            "preference.shorter.train",
            (MODEL, "renderer_name=qwen3", "max_steps=2", "batch_size=2", "group_size=4"),
            id="shorter",
        ),
        pytest.param(
            "multiplayer_rl.guess_number.train",
            (
                *(MODEL, "renderer_name=qwen3", "max_steps=1", "batch_size=1", "group_size=2"),
                *("max_tokens=8", "eval_every=0"),
            ),
            id="guess_number",
        ),
    ],
)
def test_recipe_runs_and_saves(
    recipes: Recipes, tmp_path: Path, module: str, arguments: tuple[str, ...]
) -> None:
    log = tmp_path / "log"
    recipes.run(module, log, *arguments)
    for row in finite_metrics(log):
        # Sampler and trainer score the same tokens with the same weights.
        assert abs(row.get("optim/kl_sample_train_v1", 0.0)) < 1e-3
    assert saved_names(log)[-1] == "final"


def test_decisions_score_given_choices(recipes: Recipes) -> None:
    printed = recipes.client.run(
        recipes.python,
        *("-m", "tinker_cookbook.recipes.decisions.demo", f"model_name={MODEL_NAME}"),
        stdin="How do I pick a learning rate?\n\n",
    )
    scores = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    assert sum(scores.values()) == pytest.approx(1.0, abs=1e-3)


def test_sampler_and_trainer_agree_at_every_temperature(recipes: Recipes) -> None:
    seen = json.loads(recipes.script("logprob_checks.py", MODEL_NAME).splitlines()[-1])
    assert seen["trainer_sampler_mse"] < 1e-8
    for temperature, check in seen["temperatures"].items():
        assert check["pairs"] >= 1, f"too few different tokens at temperature {temperature}"
        assert check["worst"] < 1e-3
    assert seen["sequence"]["matches"] >= 5
    assert seen["sequence"]["worst"] < 1e-3
