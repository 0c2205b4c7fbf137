"""``tuneserve eval`` with lm-evaluation-harness and inspect-ai, in an environment of their own.

Expected values are by transformers, with the same weights.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tuneserve_engine.settings.common import TINY_MODEL

from .client import API_KEY, Client
from .environments import ROOT, environment

pytestmark = pytest.mark.timeout(2400)  # the first run makes the environment

ROWS: list[dict[str, Any]] = [
    {"question": "The sky is", "choices": [" blue", " green", " a very old man"]},
    {"question": "Grass is", "choices": [" red and not blue", " green", " blue"]},
    {"question": "Snow is", "choices": [" white", " black", " a colour of grass"]},
    {"question": "Ada asks: what is", "choices": [" that", " it", " the sky"]},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
target_delimiter: ""
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{{target}}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 6}}
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""
INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import exact

ROWS = {rows!r}

@task
def said():
    return Task(
        dataset=[Sample(input=asked, target=target) for asked, target in ROWS],
        scorer=exact(),
        config=GenerateConfig(temperature=0.0, max_tokens=16, frequency_penalty=0.0),
    )
"""


class Reference:
    """The base model by transformers."""

    def __init__(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(TINY_MODEL)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_MODEL)

    def likelihood(self, question: str, answer: str) -> float:
        context = len(self.tokenizer.encode(question))
        tokens = torch.tensor([self.tokenizer.encode(question + answer)])
        with torch.no_grad():
            logprobs = self.model(tokens).logits[0].log_softmax(-1)
        return sum(float(logprobs[at - 1, tokens[0, at]]) for at in range(context, tokens.shape[1]))

    def said(self, tokens: list[int], count: int) -> str:
        found = self.model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)
        text: str = self.tokenizer.decode(found[0, len(tokens) :], skip_special_tokens=True)
        return text


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def evaluated(client: Client, folder: Path, *arguments: str) -> dict[str, Any]:
    """The output of ``tuneserve eval --json``. The harness is found on the PATH."""
    programs = environment("eval").parent
    ran = subprocess.run(
        [sys.executable, "-m", "tuneserve_server", "eval", "--json", *arguments],
        cwd=folder,
        env={
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in PACKAGES),
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
            "NO_PROXY": "127.0.0.1",
            "TUNESERVE_URL": client.server.url,
            "TUNESERVE_API_KEY": API_KEY,
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    (written,) = (folder / "evals").glob("*/scores.json")
    assert json.loads(written.read_text()) == found
    return found


PACKAGES = ("clients", "engine", "server")


def test_tasks_of_lm_eval_have_the_scores_of_transformers(
    client: Client, reference: Reference, tmp_path: Path
) -> None:
    for row in ROWS:
        each = [reference.likelihood(row["question"], answer) for answer in row["choices"]]
        row["best"] = each.index(max(each))
        said = reference.said(reference.tokenizer.encode(row["question"]), 6)
        row["said"] = said.split("\n")[0]
    rows = [
        {**row, "label": row["best"] if number else (row["best"] + 1) % 3}  # the first is wrong
        for number, row in enumerate(ROWS)
    ]
    rows[-1]["said"] += " not"
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, kind, target, metric in (
        ("choices", "multiple_choice", "label", "acc"),
        ("texts", "generate_until", "said", "exact_match"),
    ):
        text = TASK.format(name=name, kind=kind, target=target, metric=metric, data=data)
        text += 'doc_to_choice: "{{choices}}"' * (metric == "acc")
        (tasks / f"{name}.yaml").write_text(text)
    found = evaluated(
        client, tmp_path, "--tasks", "choices,texts", "--include", str(tasks), "--concurrency", "3"
    )
    assert found["harness"] == "lm-eval"
    assert found["tasks"]["choices"]["acc"] == 0.75
    assert found["tasks"]["texts"]["exact_match"] == 0.75


def test_a_task_of_inspect_has_the_score_of_transformers(
    client: Client, reference: Reference, tmp_path: Path
) -> None:
    rows = []
    for row in ROWS:
        messages = [{"role": "user", "content": row["question"]}]
        tokens = reference.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        # inspect takes reasoning out of answers.
        said = reference.said(tokens, 16).split("</think>")[-1]
        rows.append((row["question"], said.strip()))
    rows[0] = (rows[0][0], "something else")
    (tmp_path / "said.py").write_text(INSPECT_TASK.format(rows=rows))
    found = evaluated(client, tmp_path, "--tasks", "said.py@said")
    assert found["harness"] == "inspect"
    assert found["tasks"]["said"]["exact/mean"] == 0.75
