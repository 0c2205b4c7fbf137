"""Trains, saves, resumes and samples through the installed tinker SDK, and prints the results.

It runs in a separate environment and imports nothing of this project.
"""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import tinker
from tinker import types

TEXTS = ("The sky is as red as a rose today.", "The king lives in a small red boat.")
ADAM = types.AdamParams(learning_rate=5e-3)


def main(base_model: str) -> None:
    service = tinker.ServiceClient()
    trainer = service.create_lora_training_client(base_model=base_model, rank=8, seed=1)
    tokenizer = trainer.get_tokenizer()
    tokens = [tokenizer.encode(text) for text in TEXTS]
    data = [datum(each) for each in tokens]
    facts: dict[str, Any] = {"version": tinker.__version__, "models": served(service)}

    facts["losses"] = [step(trainer, data) for _ in range(8)]
    at_save = logprobs(trainer, data)
    saved = trainer.save_state("middle").result().path
    facts["state_path"] = saved
    facts["went_on"] = [step(trainer, data) for _ in range(3)]

    resumed = service.create_training_client_from_state_with_optimizer(saved)
    facts["resumed"] = [step(resumed, data) for _ in range(3)]
    fresh = service.create_training_client_from_state(saved)
    facts["weights_only"] = [step(fresh, data) for _ in range(3)]

    trainer.load_state_with_optimizer(saved).result()
    facts["loaded"] = [step(trainer, data) for _ in range(3)]
    trainer.load_state(saved).result()
    facts["at_save"], facts["after_load"] = at_save, logprobs(trainer, data)

    facts["refused"] = refusal(trainer, data)
    facts["after_refusal"] = logprobs(trainer, data)
    facts |= sampling(service, trainer, tokens[0], data)
    facts |= housekeeping(service, trainer)
    facts |= downloads(service, [saved, facts["sampler_path"]])
    print(json.dumps(facts))


def datum(tokens: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def served(service: Any) -> list[str]:
    return [model.model_name for model in service.get_server_capabilities().supported_models]


def step(trainer: Any, data: list[types.Datum]) -> float:
    """The loss before an optimizer step that is sent without waiting."""
    passed = trainer.forward_backward(data, "cross_entropy")
    stepped = trainer.optim_step(ADAM)
    loss: float = passed.result().metrics["loss:sum"]
    stepped.result()
    return loss


def logprobs(trainer: Any, data: list[types.Datum]) -> list[list[float]]:
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    return [output["logprobs"].to_numpy().tolist() for output in outputs]


def refusal(trainer: Any, data: list[types.Datum]) -> str:
    """The message of a request that the server must refuse."""
    try:
        trainer.forward_backward(data, "no_such_loss").result()
    except tinker.TinkerError as error:
        return str(error)
    return ""


def sampling(
    service: Any, trainer: Any, tokens: list[int], data: list[types.Datum]
) -> dict[str, Any]:
    """Samples from live weights, from a named snapshot and from the base model."""
    prompt = types.ModelInput.from_ints(tokens)
    short = types.ModelInput.from_ints(tokens[:3])
    params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    live = trainer.save_weights_and_get_sampling_client()
    named = trainer.save_weights_for_sampler("frozen").result().path
    trained = logprobs(trainer, data)[0]
    step(trainer, data)
    answer = live.sample(
        prompt=short,
        num_samples=2,
        sampling_params=params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
    ).result()
    greedy = types.SamplingParams(max_tokens=len(tokens) - 3, temperature=0.0)
    base = service.create_sampling_client(base_model=trainer.get_info().model_data.model_name)
    return {
        "sampler_path": named,
        "trained_logprobs": trained,
        "live_logprobs": live.compute_logprobs(prompt).result(),
        "named_logprobs": service.create_sampling_client(model_path=named)
        .compute_logprobs(prompt)
        .result(),
        "base_logprobs": base.compute_logprobs(prompt).result(),
        "samples": [
            {"tokens": each.tokens, "logprobs": each.logprobs, "stop_reason": each.stop_reason}
            for each in answer.sequences
        ],
        "short_logprobs": answer.prompt_logprobs,
        "topk": answer.topk_prompt_logprobs,
        "prompt": tokens,
        "greedy": live.sample(short, 1, greedy).result().sequences[0].tokens,
    }


def housekeeping(service: Any, trainer: Any) -> dict[str, Any]:
    rest = service.create_rest_client()
    run = rest.get_training_run(trainer.model_id).result()
    checkpoints = rest.list_checkpoints(trainer.model_id).result().checkpoints
    return {
        "run": [run.training_run_id, run.base_model, run.lora_rank],
        "checkpoints": sorted(each.checkpoint_id for each in checkpoints),
    }


def downloads(service: Any, paths: list[str]) -> dict[str, Any]:
    """Fetch checkpoints as this version does, if it has a way that needs no new export."""
    rest = service.create_rest_client()
    if not hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        return {"archives": None}
    archives = {}
    for path in paths:
        found = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
        with urllib.request.urlopen(found.url, timeout=60) as answer:
            content = io.BytesIO(answer.read())
        with tarfile.open(fileobj=content) as archive:
            archives[path] = archive.getnames()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tinker.cli", "checkpoint", "download"]
        subprocess.run([*command, paths[0], "--output", folder], check=True)
        files = [each for each in Path(folder).rglob("*") if each.is_file()]
        digests = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in files}
    return {"archives": archives, "downloaded": digests}


if __name__ == "__main__":
    main(sys.argv[1])
