"""Downloads a trained adapter with the cookbook, merges it, and scores a text with transformers.

Prints the service's logprobs of the text and those of each downloaded form.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import tinker
import torch
import transformers
from tinker_cookbook import weights
from tinker_cookbook.supervised.common import datum_from_model_input_weights

TEXT = "The king of the moon lives in a small red boat."


def main(base_model: str, base_folder: str) -> None:
    service = tinker.ServiceClient()
    # Without the unembedding: the cookbook cannot merge it if it is tied to the embedding.
    trainer = service.create_lora_training_client(base_model, rank=8, train_unembed=False).result()
    tokens = transformers.AutoTokenizer.from_pretrained(base_folder).encode(TEXT)
    text = tinker.ModelInput.from_ints(tokens)
    datum = datum_from_model_input_weights(text, torch.ones(len(tokens)))
    for _ in range(5):
        trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    base = service.create_sampling_client(base_model=base_model).result()
    facts = {
        "service": sampler.compute_logprobs(text).result()[1:],
        "base": base.compute_logprobs(text).result()[1:],
    }
    training = trainer.save_state("whole").result().path
    external = trainer.save_weights_external("export").result().path
    with tempfile.TemporaryDirectory() as folder:
        # A training checkpoint arrives encrypted for this download alone, an export unchanged.
        for name, path in (("training", training), ("external", external)):
            target = Path(folder) / name
            adapter = weights.download(tinker_path=path, output_dir=str(target / "adapter"))
            merged = str(target / "merged")
            weights.build_hf_model(base_model=base_folder, adapter_path=adapter, output_path=merged)
            facts[name] = score(merged, tokens)
            weights.build_lora_adapter(
                base_model=base_folder, adapter_path=adapter, output_path=str(target / "peft")
            )
            facts[f"{name}_peft"] = peft_tensors(target / "peft")
    print(json.dumps(facts))


def score(folder: str, tokens: list[int]) -> list[float]:
    """Logprobs of every token but the first, by transformers in float32."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def peft_tensors(folder: Path) -> int:
    """The number of tensors in a folder's PEFT adapter."""
    return len(safetensors.torch.load_file(folder / "adapter_model.safetensors"))


if __name__ == "__main__":
    main(*sys.argv[1:])
