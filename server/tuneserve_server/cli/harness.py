"""``tuneserve eval``: the tasks of lm-evaluation-harness or inspect-ai, run against ``/v1``.

The harness is a program of its own: in this environment, or in another one on the search path.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tuneserve_client as sdk  # its names are imported on first use
from tuneserve_client.defaults import OPEN_KEY
from tuneserve_engine.core.errors import REFUSED
from tuneserve_server.cli.options import HERE, PATIENT_S, ApiKey, AsJson, Url, What, connected
from tuneserve_server.cli.output import FAILED, end, print_json
from tuneserve_server.cli.resolve import checkpoint_or_base_model

if TYPE_CHECKING:
    from collections.abc import Mapping

Scores = dict[str, dict[str, float]]
"""The metrics of each task."""


class Harness(StrEnum):
    """The program that runs the tasks."""

    LM_EVAL = "lm-eval"
    INSPECT = "inspect"


_PROGRAMS = {Harness.LM_EVAL: "lm_eval", Harness.INSPECT: "inspect"}
_PACKAGES = {
    Harness.LM_EVAL: ("'lm_eval[api]'", "transformers"),
    Harness.INSPECT: ("inspect-ai", "openai"),
}


@dataclass(frozen=True)
class HarnessOptions:
    """The tasks to run, and how."""

    tasks: list[str]
    limit: int | None = None
    fewshot: int | None = None
    chat: bool = False
    concurrency: int = 8
    include: Path | None = None


@dataclass(frozen=True)
class Endpoint:
    """A model on a server."""

    url: str
    api_key: str
    model: str
    base_model: str
    context_length: int | None

    @property
    def environment(self) -> dict[str, str]:
        """The variables in which the harness finds the key: other users could see an option."""
        return {"OPENAI_API_KEY": self.api_key, "TUNESERVE_API_KEY": self.api_key}


def evaluate(  # noqa: PLR0913 - options
    what: What = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(help="Tasks, separated by commas. May be repeated.", metavar="TASKS"),
    ] = None,
    harness: Annotated[
        Harness | None,
        typer.Option(
            help="Program that runs the tasks. Default: inspect for tasks with / or .py, as "
            "inspect_evals/gsm8k or tasks.py@name, and lm-eval for others.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First examples of a task only.")] = None,
    fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples in each prompt; lm-eval only.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Use the chat template; inspect always does.")
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests at once.")] = 8,
    include: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Folder with tasks of your own; lm-eval only."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder for results; each evaluation gets a folder in it.")
    ] = Path("evals"),
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a checkpoint or a base model with lm-evaluation-harness or inspect-ai."""
    names = [name for each in tasks or [] for name in each.split(",") if name]
    if not names:
        end("no tasks are given; name some, for example --tasks arc_easy,gsm8k", REFUSED)
    chosen = harness or _harness_of(names)
    if chosen is Harness.INSPECT and (fewshot is not None or include is not None):
        end("--fewshot and --include are for lm-eval; leave them out for inspect", REFUSED)
    program = _program(chosen)  # before anything is asked of the server
    asked = HarnessOptions(names, limit, fewshot, chat, concurrency, include)
    with connected(url, api_key, deadline_s=PATIENT_S, name="eval") as client:
        endpoint = _endpoint(client, what, url, api_key or OPEN_KEY)
    folder = output / f"{chosen}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder.mkdir(parents=True)
    run = _run_lm_eval if chosen is Harness.LM_EVAL else _run_inspect
    scores = run(program, endpoint, asked, folder.absolute(), to_stderr=as_json)
    found = {
        "model": endpoint.model,
        "base_model": endpoint.base_model,
        "harness": chosen.value,
        "limit": limit,
        "tasks": scores,
    }
    (folder / "scores.json").write_text(json.dumps(found, indent=2) + "\n")
    if as_json:
        print_json(found)
    else:
        typer.echo(f"scores: {folder / 'scores.json'}")


def _harness_of(tasks: list[str]) -> Harness:
    of_inspect = ["/" in task or ".py" in task for task in tasks]
    if any(of_inspect) and not all(of_inspect):
        end(
            f"{', '.join(tasks)} are tasks of lm-eval and of inspect; evaluate them one after the "
            "other, or say --harness",
            REFUSED,
        )
    return Harness.INSPECT if all(of_inspect) else Harness.LM_EVAL


def _program(harness: Harness) -> str:
    """Return the program of the harness; ends this command if there is none."""
    name = _PROGRAMS[harness]
    beside = Path(sys.executable).parent
    found = shutil.which(name, path=os.pathsep.join([str(beside), os.environ.get("PATH", "")]))
    if found is None:
        end(
            f"{_PACKAGES[harness][0]} is not installed: there is no program {name} in {beside} or "
            "on the PATH; in a clone of tuneserve's repository, pip install '.[eval]'; or in an "
            f"environment whose bin is on the PATH, pip install {' '.join(_PACKAGES[harness])}",
            REFUSED,
        )
    return found


def _endpoint(client: "sdk.Client", what: str | None, url: str, api_key: str) -> Endpoint:
    chosen = None if what is None else checkpoint_or_base_model(client, what)
    sampler = client.sampler(chosen)
    lengths = {each.model_name: each.max_context_length for each in client.base_models()}
    model = sampler.path or chosen or sampler.base_model
    length = lengths.get(sampler.base_model)
    return Endpoint(url.rstrip("/"), api_key, model, sampler.base_model, length)


def _run_lm_eval(
    program: str,
    endpoint: Endpoint,
    asked: HarnessOptions,
    folder: Path,
    *,
    to_stderr: bool,
) -> Scores:
    """Run the tasks; the prompts are tokenized by the server's own tokenizer files."""
    with tempfile.TemporaryDirectory() as tokenizer:
        _fetch_tokenizer(endpoint, Path(tokenizer))
        model = {
            "model": endpoint.model,
            "base_url": f"{endpoint.url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": tokenizer,
            "num_concurrent": asked.concurrency,
        }
        if endpoint.context_length is not None:
            model["max_length"] = endpoint.context_length
        command = [program, "--model", "local-completions"]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
        command += ["--tasks", ",".join(asked.tasks), "--output_path", str(folder)]
        options = ("limit", asked.limit), ("num_fewshot", asked.fewshot)
        for name, value in (*options, ("include_path", asked.include)):
            command += [] if value is None else [f"--{name}", str(value)]
        command += ["--apply_chat_template"] if asked.chat else []
        _run(command, endpoint.environment, to_stderr=to_stderr)
    return lm_eval_scores(_read(folder, "results_*.json"))


def _run_inspect(
    program: str,
    endpoint: Endpoint,
    asked: HarnessOptions,
    folder: Path,
    *,
    to_stderr: bool,
) -> Scores:
    command = [program, "eval", *asked.tasks]
    command += ["--model", f"openai-api/tuneserve/{endpoint.model}"]
    command += ["--model-base-url", f"{endpoint.url}/v1", "--display", "plain"]
    command += ["--max-connections", str(asked.concurrency)]
    command += ["--log-dir", str(folder), "--log-format", "json"]
    command += [] if asked.limit is None else ["--limit", str(asked.limit)]
    _run(command, endpoint.environment, to_stderr=to_stderr)
    return inspect_scores(_read(folder, "*.json"))


def _fetch_tokenizer(endpoint: Endpoint, folder: Path) -> None:
    """Write the base model's tokenizer files into the folder."""
    import httpx

    from tuneserve_client.wire.tokenizer import FILES

    for file in FILES:
        answer = httpx.get(
            f"{endpoint.url}/api/v1/tokenizer",
            params={"base_model": endpoint.base_model, "file": file},
            headers={"X-API-Key": endpoint.api_key},
            timeout=60,
        )
        if answer.is_success:
            (folder / file).write_bytes(answer.content)
        elif file == FILES[0]:
            end(f"the server did not give its tokenizer: {answer.text[:500]}", FAILED)


def _run(command: list[str], variables: "Mapping[str, str]", *, to_stderr: bool) -> None:
    """Run the harness, which prints its table. Ends this command if it fails."""
    ran = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdout=sys.stderr if to_stderr else None,
        check=False,
    )
    if ran.returncode:
        end(f"{Path(command[0]).name} ended with status {ran.returncode}; see above", FAILED)


def _read(folder: Path, pattern: str) -> list[Any]:
    found = [json.loads(path.read_text()) for path in sorted(folder.rglob(pattern))]
    if not found:
        end(f"the harness wrote no results into {folder}; see its messages above", FAILED)
    return found


def lm_eval_scores(results: list[Any]) -> Scores:
    """Return the metrics in lm-eval's result files. A filter's name follows that of its metric."""
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in metrics.items()
            if isinstance(value, int | float)
        }
        for result in results
        for task, metrics in result["results"].items()
    }


def inspect_scores(logs: list[Any]) -> Scores:
    """Return the metrics in inspect's logs, each behind its scorer's name.

    Ends the command if a task did not succeed.
    """
    scores: Scores = {}
    for log in logs:
        task = log["eval"]["task"]
        if log["status"] != "success":
            message = (log.get("error") or {}).get("message", "")
            end(f"task {task} ended with status {log['status']}: {message}", FAILED)
        scores[task] = {
            f"{score['name']}/{name}": metric["value"]
            for score in log["results"]["scores"]
            for name, metric in score["metrics"].items()
        }
    return scores
