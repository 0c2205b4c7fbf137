"""Fine-tunes one adapter on conversations with our own client, and talks to it.

Start a service (``make run``), then:
``TUNESERVE_URL=http://127.0.0.1:8410 TUNESERVE_API_KEY=tml-you python examples/sft_client.py``
"""

import random

from tasks import FACTS, HELD_OUT, TASKS

from tuneserve_client import Client, chat_datum, progress

PIRATE = TASKS[0]


def main() -> None:
    """Prints the loss, the checkpoint's path, and an answer as it is drawn."""
    with Client(name="sft_client") as client:
        model = client.create_model(rank=8)
        tokenizer = client.tokenizer()  # the server's: no hub is needed
        data = [
            chat_datum(
                tokenizer,
                [
                    {"role": "user", "content": fact.question},
                    {"role": "assistant", "content": PIRATE.reply(fact)},
                ],
            )
            for fact in FACTS
            if fact.question not in HELD_OUT
        ]
        chosen = random.Random(0)
        steps = progress(range(20), "training")
        for _ in steps:
            gradient = model.forward_backward(chosen.sample(data, 8))
            model.optim_step(learning_rate=3e-3)  # queued behind it
            steps.show(loss=gradient.result().loss)
        print(f"loss {gradient.result().loss:.2f}, saved as {model.save('example').result()}")

        sampler = model.save_sampler()
        print(HELD_OUT[0], "→ ", end="")
        question = [{"role": "user", "content": HELD_OUT[0]}]
        for piece in sampler.stream(question, max_tokens=32, temperature=0):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
