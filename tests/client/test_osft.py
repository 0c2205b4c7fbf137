"""OSFT on the real service: train beside LoRA, save, sample, export, merge and load."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from tests.client.test_peft_import import MOVED, TOKENS, base_model, our_logprobs, peft_logprobs
from tuneserve_client import Adapter, Client, RequestFailed, next_token_datum
from tuneserve_engine.adapters.merge import merge

TASK = [next_token_datum([3 + 7 * i % 90 for i in range(start, start + 24)]) for start in range(4)]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


def trained(client: Client, adapter: Adapter | None, steps: int = 4) -> Any:
    model = client.create_model(rank=8, adapter=adapter)
    before = our_logprobs(model)
    for _ in range(steps):
        model.forward_backward(TASK)
        model.optim_step(learning_rate=2e-2).result()
    assert np.abs(our_logprobs(model) - before).max() > MOVED
    return model


@pytest.mark.parametrize("form", ["factors", "short_fixed", "core"])
def test_a_new_model_equals_the_base_model_and_peft_loads_its_export(
    client: Client, tmp_path: Path, form: str
) -> None:
    adapter = Adapter(kind="osft", unfreeze_ratio=0.25, form=form)
    new, lora = client.create_model(adapter=adapter), client.create_model(rank=4)
    np.testing.assert_array_equal(our_logprobs(new), our_logprobs(lora))
    model = trained(client, adapter)
    live = our_logprobs(model)
    client.download(model.save("learnt").result(), tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (32, 32), "a quarter of 128 directions"
    loaded = peft.PeftModel.from_pretrained(base_model(), tmp_path / "peft")
    np.testing.assert_allclose(live, peft_logprobs(loaded), rtol=2e-6, atol=0)


def test_a_merged_adapter_is_a_plain_model(client: Client, tmp_path: Path) -> None:
    from tuneserve_engine.settings.common import TINY_MODEL

    model = trained(client, Adapter(kind="osft", rank=20))
    client.download(model.save("plain").result(), tmp_path / "peft")
    (tmp_path / "plain").mkdir()
    merge(tmp_path / "peft", Path(TINY_MODEL), tmp_path / "plain")
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32
    )
    np.testing.assert_allclose(our_logprobs(model), peft_logprobs(plain), rtol=2e-6, atol=0)


def test_a_loaded_checkpoint_trains_and_samples_with_the_same_bits(
    client: Client,
) -> None:
    model = trained(client, Adapter(kind="osft", unfreeze_ratio=0.25))
    path, weights = model.save("here").result(), model.save_sampler("here").path
    again = client.load_model(path)
    assert (again.adapter, again.rank) == ("osft", model.rank)
    for each in (model, again):
        each.forward_backward(TASK)
        each.optim_step(learning_rate=2e-2).result()
    np.testing.assert_array_equal(our_logprobs(model), our_logprobs(again))
    drawn = [
        client.sampler(each).sample(TOKENS, max_tokens=12, seed=5, temperature=1.0).result()
        for each in (path, weights)
    ]
    assert drawn[0].samples[0].tokens == drawn[1].samples[0].tokens


def test_a_model_of_another_kind_cannot_load_an_osft_checkpoint(client: Client) -> None:
    path = trained(client, Adapter(kind="osft", rank=8), steps=1).save("one").result()
    with pytest.raises(RequestFailed, match=r"of kind osft .*this model is of kind lora"):
        client.create_model(rank=8).load(path).result()
