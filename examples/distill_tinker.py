"""On-policy distillation with the official SDK; ``distill.py`` explains the method.

``make run``, then, with TINKER_BASE_URL=http://127.0.0.1:8410 TINKER_API_KEY=tml-local:
``.venv/bin/python examples/distill_tinker.py``
"""

import random

import numpy as np
import tinker
from tinker import types

STEPS, PROMPTS, SAMPLES, RANK = 8, 8, 4, 8
LEARNING_RATE = 2e-3  # for the embedded model; real ones: 2e-4 or less


def question(rng: random.Random) -> tuple[str, str]:
    """Return a prompt, and the answer that the teacher learns."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    said = f"<|im_start|>user\nWhat is {a} plus {b}?<|im_end|>\n<|im_start|>assistant\n"
    return said, f"{a} + {b} = {a + b}<|im_end|>"


def datum(tokens: list[int], read: int, **inputs) -> types.Datum:
    """Return a datum with the given loss inputs on the answer and zeros on the prompt."""
    inputs = {name: np.pad(values, (read - 1, 0)).tolist() for name, values in inputs.items()}
    inputs["target_tokens"] = tokens[1:]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def teach(trainer: tinker.TrainingClient, tokenizer) -> tinker.SamplingClient:
    """Return a teacher that learns sums first. Any client of a base model or path would do."""
    rng = random.Random(1)
    for _ in range(16):
        rows = [[tokenizer.encode(text) for text in question(rng)] for _ in range(16)]
        data = [datum(p + a, len(p), weights=np.ones(len(a), np.float32)) for p, a in rows]
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=3e-3))
    return trainer.save_weights_and_get_sampling_client().result()


def roll_out(student, teacher, tokenizer, rng: random.Random):
    """Return the samples as data, and the divergence in nats per token."""
    prompts = [tokenizer.encode(question(rng)[0]) for _ in range(PROMPTS)]
    futures = []
    for prompt in prompts:
        params = types.SamplingParams(max_tokens=12, seed=rng.getrandbits(31))
        futures.append(student.sample(types.ModelInput.from_ints(prompt), SAMPLES, params))
    drawn = [(p, s) for p, f in zip(prompts, futures, strict=True) for s in f.result().sequences]
    scored = [teacher.compute_logprobs(types.ModelInput.from_ints(p + s.tokens)) for p, s in drawn]
    data, gaps = [], []
    for (p, s), future in zip(drawn, scored, strict=True):
        gaps.append(np.array(future.result()[len(p) :]) - s.logprobs)
        data.append(datum(p + s.tokens, len(p), logprobs=s.logprobs, advantages=gaps[-1]))
    return data, -float(np.concatenate(gaps).mean())


def main() -> None:
    """Print how far the student is from the teacher, before and after training."""
    rng, curve = random.Random(0), []
    with tinker.ServiceClient() as service:
        known = tinker.RestClient().get_server_capabilities().result()
        shape = {"base_model": known.supported_models[0].model_name, "rank": RANK}
        trainer = service.create_lora_training_client(**shape, seed=0).result()
        tokenizer = trainer.get_tokenizer()
        teacher = teach(service.create_lora_training_client(**shape, seed=1).result(), tokenizer)
        for step in range(STEPS + 1):
            student = trainer.save_weights_and_get_sampling_client().result()
            data, divergence = roll_out(student, teacher, tokenizer, rng)
            curve.append(divergence)
            if step < STEPS:
                trainer.forward_backward(data, "importance_sampling")
                rate = LEARNING_RATE * (1 - step / STEPS)
                trainer.optim_step(types.AdamParams(learning_rate=rate))
        print(f"KL divergence {curve[0]:.3f} → {curve[-1]:.3f} nats a token")


if __name__ == "__main__":
    main()
