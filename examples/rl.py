"""Reinforcement learning with a verifiable reward and our own client: sums, asked in words.

The model answers each question sixteen times. A right answer with nothing else has reward 1.
Answers above their group's mean become likelier, the others less likely (GRPO, Shao et al. 2024,
arXiv:2402.03300, without its division by the spread: Liu et al. 2025, arXiv:2503.20783).

``make run``, then ``TUNESERVE_API_KEY=tml-local .venv/bin/python examples/rl.py``
"""

import random

import numpy as np

from tuneserve_client import Client, Datum, Sample, Sampler, gather, progress

STEPS, PROMPTS, SAMPLES, RANK = 8, 8, 16, 8
LEARNING_RATE = 2e-3  # for the embedded model; real ones: 2e-4 or less


def question(rng: random.Random) -> tuple[str, str]:
    """Return a question, and the only answer that is rewarded."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    return f"What is {a} plus {b}?", f"{a} + {b} = {a + b}"


def roll_out(tokenizer, sampler: Sampler, rng: random.Random):
    """Return prompts, the samples of each, and the rewards, [PROMPTS, SAMPLES]."""
    asked, right = zip(*(question(rng) for _ in range(PROMPTS)), strict=True)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": q}]) for q in asked]
    futures = [  # one request for all samples of a prompt: one prefill
        sampler.sample(prompt, num_samples=SAMPLES, max_tokens=12, seed=rng.getrandbits(31))
        for prompt in prompts
    ]
    groups = [output.samples for output in gather(futures)]
    rewards = [
        [tokenizer.decode(sample.tokens) == answer for sample in samples]
        for answer, samples in zip(right, groups, strict=True)
    ]
    return prompts, groups, np.array(rewards, float)


def datum(prompt: list[int], sample: Sample, advantage: float) -> Datum:
    """Return the sample with the logprobs of its draw; the prompt has no part in the loss."""
    tokens, read = prompt + sample.tokens, [0.0] * (len(prompt) - 1)
    return Datum(
        tokens[:-1],
        tokens[1:],
        logprobs=[*read, *sample.logprobs],
        advantages=read + [advantage] * len(sample.tokens),
    )


def main() -> None:
    """Print the mean reward before and after training."""
    rng = random.Random(0)
    with Client(name="rl") as client:
        tokenizer = client.tokenizer()
        model = client.create_model(rank=RANK, seed=0)
        means = []
        steps = progress(range(STEPS + 1), "training")
        for step in steps:
            # New weights need a new sampler: the trained policy must have drawn the samples.
            prompts, groups, rewards = roll_out(tokenizer, model.save_sampler(), rng)
            means.append(rewards.mean())
            steps.show(reward=means[-1])
            advantages = rewards - rewards.mean(axis=1, keepdims=True)
            data = [
                datum(prompts[p], groups[p][s], advantages[p, s])
                for p, s in np.argwhere(advantages)  # a group all right or all wrong has no signal
            ]
            if data and step < STEPS:
                model.forward_backward(data, "importance_sampling")
                model.optim_step(LEARNING_RATE * (1 - step / STEPS))
        print(f"reward {means[0]:.2f} → {means[-1]:.2f}")


if __name__ == "__main__":
    main()
