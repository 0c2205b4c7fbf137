"""Fine-tune an adapter on conversations, with the official SDK.

``make run``, then, with TINKER_BASE_URL=http://127.0.0.1:8410 TINKER_API_KEY=tml-local:
``.venv/bin/python examples/sft_tinker.py``
"""

import json
import random
from pathlib import Path

import tinker
from tinker import types

ROWS = Path(__file__).with_name("rows.jsonl")  # {"messages": […]}, one per line
HELD_OUT = [{"role": "user", "content": "What colour is the sky?"}]
STEPS, BATCH, RANK = 16, 8, 8
LEARNING_RATE = 5e-3  # for the embedded model; real ones: 2e-4 or less


def encode(tokenizer, messages: list[dict[str, str]], *, is_open: bool) -> list[int]:
    """Return the tokens of a conversation; an open one ends where the assistant's answer starts."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_open)
    return tokenizer.encode(text.rstrip() if not is_open else text)


def datum(tokenizer, messages: list[dict[str, str]]) -> types.Datum:
    """Return a datum that learns the last message only. The targets are shifted by one here."""
    read = len(encode(tokenizer, messages[:-1], is_open=True))
    tokens = encode(tokenizer, messages, is_open=False)
    weights = [0.0] * (read - 1) + [1.0] * (len(tokens) - read)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def main() -> None:
    """Print the loss before and after training, the path of a checkpoint, and an answer."""
    with tinker.ServiceClient() as service:
        known = tinker.RestClient().get_server_capabilities().result()
        base_model = known.supported_models[0].model_name
        trainer = service.create_lora_training_client(base_model, rank=RANK, seed=0).result()
        tokenizer = trainer.get_tokenizer()
        rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
        data = [datum(tokenizer, row["messages"]) for row in rows]
        chosen = random.Random(0)
        losses = []
        for step in range(STEPS):
            batch = chosen.sample(data, BATCH)
            gradient = trainer.forward_backward(batch, "cross_entropy")
            rate = LEARNING_RATE * (1 - step / STEPS)
            trainer.optim_step(types.AdamParams(learning_rate=rate))  # queued behind it
            learnt = sum(sum(each.loss_fn_inputs["weights"].data) for each in batch)
            losses.append(gradient.result().metrics["loss:sum"] / learnt)
            print(f"step {step:2}  loss per token {losses[-1]:.3f}")
        print(f"loss per token {losses[0]:.2f} → {losses[-1]:.2f}")
        print("saved as", trainer.save_state("sft").result().path)

        sampler = trainer.save_weights_and_get_sampling_client().result()
        asked = types.ModelInput.from_ints(encode(tokenizer, HELD_OUT, is_open=True))
        params = types.SamplingParams(max_tokens=32, temperature=0.0)
        tokens = sampler.sample(asked, 1, params).result().sequences[0].tokens
        print(HELD_OUT[0]["content"], "→", tokenizer.decode(tokens, skip_special_tokens=True))


if __name__ == "__main__":
    main()
