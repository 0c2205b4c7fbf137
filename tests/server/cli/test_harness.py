"""``tuneserve eval``: its arguments, and the results of harnesses as they write them.

``tests/compat/test_eval.py`` runs both harnesses against a real server.
"""

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tuneserve_server.cli import main as cli
from tuneserve_server.cli.harness import inspect_scores, lm_eval_scores

LM_EVAL = """{"results": {
  "colours": {"alias": "colours", "sample_len": 3, "acc,none": 0.66, "acc_stderr,none": 0.33},
  "gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.5, "exact_match,flexible-extract": 1,
            "exact_match_stderr,strict-match": "N/A"}},
 "config": {"model": "local-completions"}}"""
"""As lm_eval 0.4.13 writes it, shortened."""
INSPECT = """{"version": 2, "status": "success", "eval": {"task": "colours"},
 "results": {"total_samples": 2, "scores": [{"name": "includes", "scorer": "includes",
  "metrics": {"accuracy": {"name": "accuracy", "value": 1.0, "params": {}},
              "stderr": {"name": "stderr", "value": 0.0, "params": {}}}}]}}"""
"""As inspect_ai 0.3.285 writes it, shortened."""


def test_the_metrics_of_lm_eval_keep_their_filters() -> None:
    assert lm_eval_scores([json.loads(LM_EVAL)]) == {
        "colours": {"sample_len": 3, "acc": 0.66, "acc_stderr": 0.33},
        "gsm8k": {"exact_match,strict-match": 0.5, "exact_match,flexible-extract": 1},
    }


def test_the_metrics_of_inspect_carry_their_scorer() -> None:
    assert inspect_scores([json.loads(INSPECT)]) == {
        "colours": {"includes/accuracy": 1.0, "includes/stderr": 0.0}
    }


def test_a_task_of_inspect_that_failed_ends_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = {"status": "error", "eval": {"task": "colours"}, "error": {"message": "no model"}}
    with pytest.raises(typer.Exit) as ended:
        inspect_scores([failed])
    assert ended.value.exit_code == 1
    assert "task colours ended with status error: no model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no tasks are given; name some, for example --tasks arc_easy"),
        (["--tasks", ","], "no tasks are given"),
        (["--tasks", "arc_easy,inspect_evals/gsm8k"], "are tasks of lm-eval and of inspect"),
        (["--tasks", "a.py@b", "--fewshot", "2"], "--fewshot and --include are for lm-eval"),
        (["--tasks", "arc_easy"], "pip install 'lm_eval[api]' transformers"),
        (["--tasks", "arc_easy", "--harness", "inspect"], "pip install inspect-ai openai"),
        (["--tasks", "inspect_evals/gsm8k"], "no program inspect in"),
    ],
)
def test_a_wrong_argument_or_a_missing_harness_is_explained_in_one_line(
    arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    ran = CliRunner().invoke(cli.app, ["eval", *arguments])
    assert ran.exit_code == 2
    assert reason in ran.stderr
    assert ran.stderr.startswith("tuneserve: ") and ran.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_a_harness_on_the_path_is_found_before_the_server_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "lm_eval"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    ran = CliRunner().invoke(
        cli.app, ["eval", "--tasks", "arc_easy", "--url", "http://127.0.0.1:9"]
    )
    assert ran.exit_code == 1
    assert "http://127.0.0.1:9" in ran.stderr
