"""Reinforcement learning with a verifiable reward and the official SDK: sums, asked in words.

A right answer has reward 1. Answers above their group's mean become likelier (GRPO: ``rl.py``).

``make run``, then, with TINKER_BASE_URL=http://127.0.0.1:8410 TINKER_API_KEY=tml-local:
``.venv/bin/python examples/rl_tinker.py``
"""

import random

import numpy as np
import tinker
from tinker import types

STEPS, PROMPTS, SAMPLES, RANK = 8, 8, 16, 8
LEARNING_RATE = 2e-3  # for the embedded model; real ones: 2e-4 or less


def question(rng: random.Random) -> tuple[str, str]:
    """Return a prompt, and the only answer that is rewarded."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    said = f"<|im_start|>user\nWhat is {a} plus {b}?<|im_end|>\n<|im_start|>assistant\n"
    return said, f"{a} + {b} = {a + b}"


def roll_out(tokenizer, sampler: tinker.SamplingClient, rng: random.Random):
    """Return prompts, the sequences of each, and the rewards, [PROMPTS, SAMPLES]."""
    asked, right = zip(*(question(rng) for _ in range(PROMPTS)), strict=True)
    prompts = [tokenizer.encode(text) for text in asked]
    futures = []
    for prompt in prompts:  # one request for all samples of a prompt: one prefill
        params = types.SamplingParams(max_tokens=12, seed=rng.getrandbits(31))
        futures.append(sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params))
    groups = [future.result().sequences for future in futures]
    rewards = [
        [tokenizer.decode(each.tokens, skip_special_tokens=True) == answer for each in sequences]
        for answer, sequences in zip(right, groups, strict=True)
    ]
    return prompts, groups, np.array(rewards, float)


def datum(prompt: list[int], sequence, advantage: float) -> types.Datum:
    """Return the sample with the logprobs of its draw; the prompt has no part in the loss."""
    tokens, read = prompt + sequence.tokens, [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": read + sequence.logprobs,
            "advantages": read + [advantage] * len(sequence.tokens),
        },
    )


def main() -> None:
    """Print the mean reward before, at each step, and after training."""
    rng = random.Random(0)
    with tinker.ServiceClient() as service:
        known = tinker.RestClient().get_server_capabilities().result()
        base_model = known.supported_models[0].model_name
        trainer = service.create_lora_training_client(base_model, rank=RANK, seed=0).result()
        tokenizer = trainer.get_tokenizer()
        means = []
        for step in range(STEPS + 1):  # a new sampler for new weights: no old samples
            sampler = trainer.save_weights_and_get_sampling_client().result()
            prompts, groups, rewards = roll_out(tokenizer, sampler, rng)
            means.append(rewards.mean())
            print(f"step {step:2}  reward {means[-1]:.2f}")
            better = rewards - rewards.mean(axis=1, keepdims=True)
            data = [datum(prompts[p], groups[p][s], better[p, s]) for p, s in np.argwhere(better)]
            if data and step < STEPS:  # no data if every group is all right or all wrong
                trainer.forward_backward(data, "importance_sampling")
                rate = LEARNING_RATE * (1 - step / STEPS)
                trainer.optim_step(types.AdamParams(learning_rate=rate))
        print(f"reward {means[0]:.2f} → {means[-1]:.2f}")


if __name__ == "__main__":
    main()
