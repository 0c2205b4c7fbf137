"""Fine-tunes one adapter with the official SDK, saves it, and samples from it.

Start a service (``make run``), then:
``TINKER_BASE_URL=http://127.0.0.1:8410 TINKER_API_KEY=tml-you python examples/train.py``
"""

from itertools import islice

import tinker
from tasks import HELD_OUT, TASKS, prompt
from tinker import types


def main() -> None:
    """Prints the loss of each step, the checkpoint's path, and an answer."""
    with tinker.ServiceClient() as service:
        models = tinker.RestClient().get_server_capabilities().result().supported_models
        base_model = models[0].model_name
        trainer = service.create_lora_training_client(base_model=base_model, rank=16).result()
        tokenizer = trainer.get_tokenizer()

        def datum(question: str, answer: str) -> types.Datum:
            asked, answered = tokenizer.encode(question), tokenizer.encode(answer)
            tokens = asked + answered
            return types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "weights": [0.0] * (len(asked) - 1) + [1.0] * len(answered),
                },
            )

        examples = TASKS[0].examples(seed=0)
        for step in range(20):
            data = [datum(*pair) for pair in islice(examples, 8)]
            gradient = trainer.forward_backward(data, "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=3e-3))  # queued behind it
            print(f"step {step:2}  loss {gradient.result().metrics['loss:sum']:.2f}")

        print("saved as", trainer.save_state("example").result().path)
        sampler = trainer.save_weights_and_get_sampling_client().result()
        asked = types.ModelInput.from_ints(tokenizer.encode(prompt(HELD_OUT[0])))
        params = types.SamplingParams(max_tokens=32, temperature=0.0)
        tokens = sampler.sample(asked, 1, params).result().sequences[0].tokens
        print(HELD_OUT[0], "→", tokenizer.decode(tokens, skip_special_tokens=True))


if __name__ == "__main__":
    main()
