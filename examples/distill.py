"""On-policy distillation with our own client: a teacher corrects a student's own samples.

The student answers. The reward of each token is how much likelier the teacher finds it than the
student does: the gradient of the reverse KL divergence of each next token, with the text before it
held fixed (Agarwal et al. 2024, arXiv:2306.13649; Gu et al. 2024, arXiv:2306.08543).

``make run``, then ``TUNESERVE_API_KEY=tml-local .venv/bin/python examples/distill.py``
"""

import random

import numpy as np

from tuneserve_client import Client, Datum, Sampler, gather, progress, sft_datum

STEPS, PROMPTS, SAMPLES, RANK = 8, 8, 4, 8
LEARNING_RATE = 2e-3  # for the embedded model; real ones: 2e-4 or less


def question(rng: random.Random) -> tuple[str, str]:
    """Return a prompt, and the answer that the teacher learns."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    said = f"<|im_start|>user\nWhat is {a} plus {b}?<|im_end|>\n<|im_start|>assistant\n"
    return said, f"{a} + {b} = {a + b}<|im_end|>"


def teacher_of(client: Client, tokenizer) -> Sampler:
    """Return a teacher that learns sums first. Any sampler would do: ``client.sampler(path)``."""
    model, rng = client.create_model(rank=RANK, seed=1), random.Random(1)
    for _ in range(16):
        model.forward_backward([sft_datum(tokenizer, *question(rng)) for _ in range(16)])
        model.optim_step(learning_rate=3e-3)
    return model.save_sampler()


def roll_out(student: Sampler, teacher: Sampler, tokenizer, rng: random.Random):
    """Return the samples as data, and the divergence in nats per token."""
    prompts = [tokenizer.encode(question(rng)[0]) for _ in range(PROMPTS)]
    futures = [
        student.sample(prompt, num_samples=SAMPLES, max_tokens=12, seed=rng.getrandbits(31))
        for prompt in prompts
    ]
    drawn = [
        (len(prompt), prompt + sample.tokens, sample.logprobs)
        for prompt, output in zip(prompts, gather(futures), strict=True)
        for sample in output.samples
    ]
    scored = gather([teacher.logprobs(tokens) for _, tokens, _ in drawn])
    data, gaps = [], []
    for (read, tokens, ours), theirs in zip(drawn, scored, strict=True):
        gaps.append(theirs[read:] - ours)
        inputs = {"logprobs": ours, "advantages": gaps[-1]}  # of the sample; 0 on the prompt
        inputs = {name: np.pad(values, (read - 1, 0)) for name, values in inputs.items()}
        data.append(Datum(tokens[:-1], tokens[1:], **inputs))
    return data, -float(np.concatenate(gaps).mean())


def main() -> None:
    """Print how far the student is from the teacher, before and after training."""
    rng = random.Random(0)
    with Client(name="distill") as client:
        tokenizer = client.tokenizer()
        teacher = teacher_of(client, tokenizer)
        model = client.create_model(rank=RANK, seed=0)
        curve = []
        steps = progress(range(STEPS + 1), "training")
        for step in steps:
            data, divergence = roll_out(model.save_sampler(), teacher, tokenizer, rng)
            curve.append(divergence)
            steps.show(kl=divergence)
            if step < STEPS:
                model.forward_backward(data, "importance_sampling")
                model.optim_step(LEARNING_RATE * (1 - step / STEPS))
        print(f"KL divergence {curve[0]:.3f} → {curve[-1]:.3f} nats a token")


if __name__ == "__main__":
    main()
