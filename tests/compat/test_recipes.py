"""Further recipes of the cookbook that can run offline, and its tools and numeric checks.

They cover more than the loops: asynchronous and streaming rollouts, distillation, games of many
turns, graders and downloads. The cookbook's own smoke tests run eleven recipes. Nine of them are
here or in ``test_cookbook``; ``text_arena`` needs another package, and ``vlm_classifier`` images.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuneserve_engine.settings.common import TINY_MODEL

from .recipes import Recipes, finite_metrics, saved_names
from .workdir import MODEL_NAME

MODEL = f"model_name={MODEL_NAME}"
CHEAP = (MODEL, "lora_rank=8", "max_steps=2")
# A tiny model earns nothing with arithmetic, but constant rewards are trained on too. Unless set
# otherwise, the loss is the recipe's own, stable_reinforce.
MATH_RL = (*CHEAP, "groups_per_batch=4", "group_size=4", "max_tokens=8")
DISTILL = (*CHEAP, "groups_per_batch=4", "max_tokens=8")
NO_ROBOTS = "tinker_cookbook.recipes.chat_sl.chat_datasets:NoRobotsBuilder"
GSM8K = "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder"

RECIPES = {
    # The two basic recipes build their data set. Parts of it cannot be replaced, so it is written
    # out again.
    "sl_basic": (
        "sl_basic",
        *(*CHEAP, f"dataset_builder={NO_ROBOTS}"),
        *("dataset_builder.common_config.batch_size=8", "eval_every=2"),
        *("dataset_builder.common_config.max_length=1024",),
        f"dataset_builder.common_config.model_name_for_tokenizer={MODEL_NAME}",
        "dataset_builder.common_config.renderer_name=qwen3",
    ),
    "rl_basic": (
        "rl_basic",
        *(*CHEAP, "max_tokens=8", f"dataset_builder={GSM8K}"),
        *("dataset_builder.batch_size=4", "dataset_builder.group_size=4"),
        f"dataset_builder.model_name_for_tokenizer={MODEL_NAME}",
        "dataset_builder.renderer_name=qwen3",
    ),
    "math_rl": ("math_rl.train", *MATH_RL),
    "importance_sampling": ("math_rl.train", *MATH_RL, "loss_fn=importance_sampling"),
    "kl_coeff": ("math_rl.train", *MATH_RL, "loss_fn_config.kl_coeff=0.01"),
    "asynchronous": ("math_rl.train", *MATH_RL, "max_steps_off_policy=2"),
    "streaming": (
        "math_rl.train",
        *(*MATH_RL, "stream_minibatch_config.groups_per_batch=4"),
        "stream_minibatch_config.num_minibatches=2",
    ),
    "substeps": ("math_rl.train", *MATH_RL, "num_substeps=2", "compute_post_kl=true"),
    "on_policy_distillation": (
        "distillation.on_policy_distillation",
        *(*DISTILL, f"teacher_model={MODEL_NAME}"),
    ),
    "two_teachers": (
        "distillation.on_policy_multi_teacher",
        *(*CHEAP, "max_tokens=8", "deepmath_groups_per_batch=2", "tulu3_groups_per_batch=2"),
        *(f"deepmath_teacher_model={MODEL_NAME}", f"tulu3_teacher_model={MODEL_NAME}"),
    ),
    "off_policy_reasoning": (
        "distillation.off_policy_reasoning",
        *(*CHEAP, "renderer_name=qwen3", "batch_size=8", "max_length=1024"),
        *("max_prompts=64", "buffer_size=64"),
    ),
    # Its evaluation passes tuples to code that takes lists, with any server.
    "self_distillation": (
        "sdft.train",
        *(*DISTILL, "max_context_length=1024", "topk=8", "eval_every=0"),
    ),
    "prompt_distillation": (
        "prompt_distillation.train",
        *(*CHEAP, "file_path=HuggingFaceH4/no_robots/data/train.jsonl", "batch_size=8"),
    ),
    "shorter": (
        "preference.shorter.train",
        *(MODEL, "renderer_name=qwen3", "max_steps=2", "batch_size=2", "group_size=4"),
    ),
    # Its test set takes minutes: 124 numbers, played four times each.
    "guess_number": (
        "multiplayer_rl.guess_number.train",
        *(MODEL, "renderer_name=qwen3", "max_steps=1", "batch_size=1", "group_size=2"),
        *("max_tokens=8", "eval_every=0"),
    ),
    "rubric": (
        "rubric.train",
        *(*CHEAP, "renderer_name=qwen3", "groups_per_batch=2", "train_group_size=2"),
        *(f"grader_llm_name={MODEL_NAME}", "grader_renderer_name=qwen3", "max_tokens=8"),
        *("train_jsonl_path=rubric.jsonl", "test_jsonl_path=rubric.jsonl"),
    ),
}

# They score their samples before they take a step, so sampler and trainer have equal weights.
ON_POLICY = {
    *("rl_basic", "math_rl", "importance_sampling", "kl_coeff", "streaming"),
    *("on_policy_distillation", "two_teachers", "shorter", "guess_number", "rubric"),
}

pytestmark = pytest.mark.timeout(2400)  # the first run makes the environment


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_and_saves(recipes: Recipes, tmp_path: Path, name: str) -> None:
    module, *arguments = RECIPES[name]
    log = tmp_path / "log"
    recipes.run(module, log, *arguments)
    rows = finite_metrics(log)
    if name in ON_POLICY:
        assert sampler_gap(rows) < 1e-9
    assert saved_names(log)[-1] == "final"


def test_twenty_questions_are_played(recipes: Recipes, tmp_path: Path) -> None:
    recipes.script("twenty_questions.py", MODEL_NAME, str(tmp_path))
    assert sampler_gap(finite_metrics(tmp_path)) < 1e-9
    assert saved_names(tmp_path)[-1] == "final"


def sampler_gap(rows: list[dict[str, Any]]) -> float:
    """Half the largest mean squared difference between sampler's and trainer's logprobs."""
    key = "optim/kl_sample_train_v2"
    gap: float = max(row[key] for row in rows if key in row)
    return gap


@pytest.mark.parametrize("loss", ["ppo", "dro"])
def test_math_rl_trains_on_rewards(
    recipes: Recipes, taught_state: str, tmp_path: Path, loss: str
) -> None:
    log = tmp_path / "log"
    options = [*CHEAP, "env=gsm8k", "groups_per_batch=4", "group_size=4", "max_tokens=12"]
    if loss == "dro":
        options.append("loss_fn_config.beta=0.05")
    recipes.run(
        "math_rl.train", log, *options, f"loss_fn={loss}", f"load_checkpoint_path={taught_state}"
    )
    rows = finite_metrics(log)
    assert any(0 < row.get("env/all/correct", 0) < 1 for row in rows)
    assert sampler_gap(rows) < 1e-9


def test_the_rlhf_pipeline_passes_from_stage_to_stage(recipes: Recipes) -> None:
    recipes.module(
        "preference.rlhf.rlhf_pipeline",
        *(f"base_model={MODEL_NAME}", "short_name=tiny", "lora_rank=8", "max_length=1024"),
        *("batch_size=8", "rl_max_tokens=8", "rl_group_size=2", "max_steps=1"),
    )
    runs = recipes.client.folder / "home" / "tinker-runs" / "rlhf-tiny"
    for stage in ("sft", "rm", "rl"):
        assert finite_metrics(runs / stage)
        assert saved_names(runs / stage) == ["final"]


def test_decisions_score_given_choices(recipes: Recipes) -> None:
    printed = recipes.module("decisions.demo", MODEL, stdin="How do I pick a learning rate?\n\n")
    scores = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    assert sum(scores.values()) == pytest.approx(1.0, abs=1e-3)


def test_sampler_and_trainer_agree_at_every_temperature(recipes: Recipes) -> None:
    seen = recipes.script("logprob_checks.py", MODEL_NAME)
    assert seen["trainer_sampler_mse"] < 1e-8
    for temperature, check in seen["temperatures"].items():
        assert check["pairs"] >= 1, f"too few different tokens at temperature {temperature}"
        assert check["worst"] < 1e-3
    assert seen["sequence"]["matches"] >= 5
    assert seen["sequence"]["worst"] < 1e-3


def test_a_downloaded_adapter_merged_by_the_cookbook_gives_the_services_logprobs(
    recipes: Recipes,
) -> None:
    seen = recipes.script("export_checks.py", MODEL_NAME, str(TINY_MODEL))
    assert sum(seen["service"]) > sum(seen["base"]) + 10
    for form in ("training", "external"):
        np.testing.assert_allclose(seen[form], seen["service"], atol=3e-6)
        # A and B of seven projections in each of four layers.
        assert seen[f"{form}_peft"] == 2 * 7 * 4
