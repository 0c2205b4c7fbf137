"""Direct preference optimization with the official SDK: prefer the answer in capitals.

This program computes the loss in torch, from the logprobs that the server returns: eq. 7 of
Rafailov et al. 2023, arXiv:2305.18290. For this, the SDK needs ``pip install torch``.

``make run``, then, with TINKER_BASE_URL=http://127.0.0.1:8410 TINKER_API_KEY=tml-local:
``.venv/bin/python examples/dpo_tinker.py``
"""

import json
import random
from pathlib import Path

import tinker
import torch
from tinker import types

PAIRS = Path(__file__).with_name("pairs.jsonl")  # {"prompt", "chosen", "rejected"}, one per line
BETA, HELD_OUT = 0.1, 8
STEPS, BATCH, RANK = 16, 12, 8
LEARNING_RATE = 2e-3  # for the embedded model; real ones: 2e-4 or less


def datum(tokenizer, question: str, answer: str) -> types.Datum:
    """Return a datum whose weights are 1 on the answer and 0 on the prompt."""
    turn = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    asked, answered = tokenizer.encode(turn), tokenizer.encode(f"{answer}<|im_end|>")
    tokens, weights = asked + answered, [0.0] * (len(asked) - 1) + [1.0] * len(answered)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def with_reference(trainer: tinker.TrainingClient, data: list[types.Datum]) -> list[types.Datum]:
    """Add the logprobs of the untrained adapter, which equals the base model, to the data."""
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    for each, output in zip(data, outputs, strict=True):
        each.loss_fn_inputs["reference"] = output["logprobs"]
    return data


def dpo(data: list[types.Datum], logprobs: list[torch.Tensor]):
    """Return the sum of -log(sigmoid(margin)); margin = beta * (chosen moved - rejected moved)."""
    inputs = [each.loss_fn_inputs for each in data]
    moved = torch.stack([
        ((now - known["reference"].to_torch()) * known["weights"].to_torch()).sum()
        for now, known in zip(logprobs, inputs, strict=True)
    ])  # fmt: skip
    margins = BETA * (moved[0::2] - moved[1::2])
    loss = -torch.nn.functional.logsigmoid(margins).sum()
    return loss, {"margin": margins.mean().item(), "right": (margins > 0).float().mean().item()}


def main() -> None:
    """Print the margin of held-out pairs, before and after training."""
    with tinker.ServiceClient() as service:
        known = tinker.RestClient().get_server_capabilities().result()
        base_model = known.supported_models[0].model_name
        trainer = service.create_lora_training_client(base_model, rank=RANK, seed=0).result()
        tokenizer, chosen = trainer.get_tokenizer(), random.Random(0)
        rows = [json.loads(line) for line in PAIRS.read_text().splitlines()]
        texts = [(row["prompt"], row[which]) for row in rows for which in ("chosen", "rejected")]
        data = with_reference(trainer, [datum(tokenizer, *text) for text in texts])
        unseen, pairs = data[: 2 * HELD_OUT], list(zip(data[0::2], data[1::2], strict=True))
        for step in range(STEPS):
            batch = [each for pair in chosen.sample(pairs[HELD_OUT:], BATCH) for each in pair]
            output = trainer.forward_backward_custom(batch, dpo)
            rate = LEARNING_RATE * (1 - step / STEPS)
            trainer.optim_step(types.AdamParams(learning_rate=rate))
            print(f"step {step:2}  margin {output.result().metrics['margin']:.2f}")
        outputs = trainer.forward(unseen, "cross_entropy").result().loss_fn_outputs
        _, figures = dpo(unseen, [output["logprobs"].to_torch() for output in outputs])
        print(f"margin 0.00 → {figures['margin']:.2f}, the right way in {figures['right']:.0%}")


if __name__ == "__main__":
    main()
