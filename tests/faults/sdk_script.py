"""A user's script with the official SDK only: supervised training, then reinforcement learning,
checkpoints, and continuing from one. It prints a line of JSON per round.

``sdk_script.py <base model> <rounds>``; the service's address and key are in the environment.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import tinker
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-2)


def supervised(round_: int) -> list[types.Datum]:
    tokens = [1 + (3 * round_ + n) % 40 for n in range(8)]
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 7},
        )
        for _ in range(2)
    ]


def reinforced(prompt: list[int], sequence: types.SampledSequence) -> types.Datum:
    tokens = [*prompt, *sequence.tokens]
    logprobs = [0.0] * (len(prompt) - 1) + list(sequence.logprobs or [])
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": logprobs,
            "advantages": [float(token % 3 - 1) for token in tokens[1:]],
        },
    )


def train(trainer: tinker.TrainingClient, data: list[types.Datum], loss: str) -> Any:
    """Two gradients and a step, all in flight at once."""
    gradients = [trainer.forward_backward(data, loss) for _ in range(2)]
    step = trainer.optim_step(ADAM)
    outputs = [gradient.result() for gradient in gradients]
    return [output.metrics for output in outputs], step.result().metrics


def rounds(service: tinker.ServiceClient, base_model: str, count: int) -> Iterator[Any]:
    trainer = service.create_lora_training_client(base_model=base_model, rank=4, seed=7).result()
    for number in range(count):
        if number % 2 == 0:
            yield train(trainer, supervised(number), "cross_entropy")
            continue
        sampler = trainer.save_weights_and_get_sampling_client().result()
        prompt = [1 + number, 2, 3]
        params = types.SamplingParams(max_tokens=4, seed=number, stop=[])
        samples = [sampler.sample(types.ModelInput.from_ints(prompt), 2, params) for _ in range(2)]
        sequences = [each for future in samples for each in future.result().sequences]
        data = [reinforced(prompt, each) for each in sequences]
        drawn = [(each.tokens, each.logprobs) for each in sequences]
        saved = trainer.save_state(f"round-{number}").result().path
        yield drawn, train(trainer, data, "importance_sampling"), saved.partition("/weights/")[2]
        if number % 6 == 5:
            trainer = service.create_training_client_from_state_with_optimizer(saved).result()


def main(base_model: str, count: int) -> None:
    service = tinker.ServiceClient()
    for round_ in rounds(service, base_model, count):
        print(json.dumps(round_), flush=True)
    listed = tinker.RestClient().list_user_checkpoints().result().checkpoints
    print(json.dumps(sorted(each.checkpoint_id for each in listed)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    os._exit(0)  # otherwise, in one of forty processes, the SDK's thread (0.38.0) aborts
