"""The cookbook's two numeric checks: trainer against sampler, and logprobs against temperature.

They follow `tests/compare_sampling_training_logprobs.py` and
`tests/validate_temperature_logprobs.py` of its source distribution, on our own text. Prints the
results.
"""

import itertools
import json
import sys
from typing import Any

import tinker
import torch
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.tokenizer_utils import get_tokenizer

DOCUMENT = "def area(width, height):\n    return width * height\n\n\n" * 12
PROMPT = "Explain what the temperature of a sampler is, with a short example."
TEMPERATURES = (0.5, 0.7, 1.0, 1.2, 1.5, 1.8)
DRAWS = 20


def main(base_model: str) -> None:
    tokenizer = get_tokenizer(base_model)
    service = tinker.ServiceClient()
    sampler = service.create_sampling_client(base_model=base_model).result()
    prompt = tokenizer.encode(PROMPT)
    facts = {
        "trainer_sampler_mse": trainer_against_sampler(service, base_model, tokenizer),
        "temperatures": {t: temperature_check(sampler, prompt, t) for t in TEMPERATURES},
        "sequence": sequence_check(sampler, prompt),
    }
    print(json.dumps(facts))


def trainer_against_sampler(service: Any, base_model: str, tokenizer: Any) -> float:
    """Mean squared difference of the logprobs of a document, after three steps on it."""
    document = tinker.ModelInput.from_ints(tokenizer.encode(DOCUMENT))
    weights = torch.ones(document.length)
    weights[0] = 0.0
    datum = datum_from_model_input_weights(document, weights)
    trainer = service.create_lora_training_client(base_model=base_model).result()
    for _ in range(3):
        trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    outputs = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs
    sampler = trainer.save_weights_and_get_sampling_client().result()
    scored = torch.tensor(sampler.compute_logprobs(document).result()[1:])
    return float(((scored - outputs[0]["logprobs"].to_torch()) ** 2).mean())


def draw(sampler: Any, tokens: list[int], temperature: float, seed: int, length: int = 1) -> Any:
    """A future of one sample without stops."""
    params = tinker.SamplingParams(max_tokens=length, temperature=temperature, seed=seed, stop=[])
    return sampler.sample(tinker.ModelInput.from_ints(tokens), 1, params)


def temperature_check(sampler: Any, prompt: list[int], temperature: float) -> dict[str, Any]:
    """Compares differences of logprobs at a temperature with those at 1, divided by it."""
    futures = [draw(sampler, prompt, temperature, 42 + index) for index in range(DRAWS)]
    drawn = {}
    for future in futures:
        sequence = future.result().sequences[0]
        drawn[sequence.tokens[0]] = sequence.logprobs[0]
    at_one = {
        token: sampler.compute_logprobs(tinker.ModelInput.from_ints([*prompt, token]))
        for token in drawn
    }
    base = {token: future.result()[-1] for token, future in at_one.items()}
    errors = [
        abs((drawn[a] - drawn[b]) - (base[a] - base[b]) / temperature)
        for a, b in itertools.combinations(sorted(drawn), 2)
    ]
    return {"pairs": len(errors), "worst": max(errors, default=None)}


def sequence_check(sampler: Any, prompt: list[int]) -> dict[str, Any]:
    """Compares logprobs of a sample with those of its tokens when each is drawn alone."""
    whole = draw(sampler, prompt, 0.5, 42, length=20).result().sequences[0]
    errors = []
    for index, (token, logprob) in enumerate(zip(whole.tokens, whole.logprobs, strict=True)):
        prefix = [*prompt, *whole.tokens[:index]]
        tries = [draw(sampler, prefix, 0.5, 1000 * (index + 1) + n) for n in range(5)]
        alone = [future.result().sequences[0] for future in tries]
        errors += [abs(logprob - s.logprobs[0]) for s in alone if s.tokens[0] == token]
    return {"matches": len(errors), "worst": max(errors, default=None)}


if __name__ == "__main__":
    main(sys.argv[1])
