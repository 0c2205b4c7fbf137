"""PEFT adapters on the real service: the same numbers on import, after a step, and back in PEFT."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import tinker
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.client.conftest import KEY
from tests.sdk import service_client
from tuneserve_client import Client, InvalidRequest, next_token_datum
from tuneserve_engine.core.adapter import ATTENTION, MLP
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.cli import main as cli
from tuneserve_server.cli.local_server import LocalServer

TOKENS = [17, 250, 31, 8, 99, 140, 31, 7, 61, 200, 5, 77]
MOVED = 1e-3  # nats of a logprob: the adapters below change it far more

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    # The official SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@dataclass(frozen=True)
class Trained:
    """An adapter saved by PEFT, and the model that it was saved from."""

    model: Any
    folder: Path


def base_model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)


def trained(folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> Trained:
    """An adapter that looks trained: no parameter is zero or has its initial value."""
    torch.manual_seed(3)
    model = peft.get_peft_model(base_model(), peft.LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.05)
                # round to values that the dtype can store
                parameter.copy_(parameter.to(dtype).float())
    model.save_pretrained(folder)
    weights, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(weights).items()}, weights)
    told = json.loads(settings.read_text())
    settings.write_text(json.dumps({**told, "base_model_name_or_path": "tuneserve/tiny"}))
    return Trained(model, folder)


def peft_logprobs(model: Any) -> np.ndarray[Any, Any]:
    """Logprobs in float64, so they have no rounding error of their own."""
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return logits[range(len(TOKENS) - 1), TOKENS[1:]].numpy()


def our_logprobs(model: Any) -> np.ndarray[Any, Any]:
    (found,) = model.forward([next_token_datum(TOKENS)]).result().logprobs
    return found


CASES: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 10, "target_modules": [*ATTENTION]},
    "two of four, rank-stabilised": {
        "r": 3,
        "lora_alpha": 7,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj"],
    },
    "all linear, bfloat16": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": "all-linear",
        "dtype": torch.bfloat16,
    },
    "the unembedding and the MLP, float16": {
        "r": 5,
        "lora_alpha": 2.5,
        "target_modules": [*MLP, "lm_head"],
        "dtype": torch.float16,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_an_imported_adapter_computes_trains_and_returns_to_peft(
    case: str, client: Client, tmp_path: Path
) -> None:
    theirs = trained(tmp_path / "theirs", **CASES[case])
    path = client.import_peft(theirs.folder, name="from-peft")
    assert path.startswith("tinker://import-") and path.endswith("/weights/from-peft")
    expected = peft_logprobs(theirs.model)
    with theirs.model.disable_adapter():
        assert np.abs(peft_logprobs(theirs.model) - expected).max() > 100 * MOVED

    model = client.load_model(path)
    np.testing.assert_allclose(our_logprobs(model), expected, atol=3e-5)
    scored = client.sampler(path).logprobs(TOKENS).result()
    np.testing.assert_allclose(scored[1:], expected, atol=3e-5)

    client.download(path, tmp_path / "back")
    back = peft.PeftModel.from_pretrained(base_model(), tmp_path / "back")
    np.testing.assert_allclose(peft_logprobs(back), expected, atol=3e-5)

    losses = []
    for _ in range(4):
        losses.append(model.forward_backward([next_token_datum(TOKENS)]))
        model.optim_step(learning_rate=3e-3)
    found = [each.result().loss for each in losses]
    assert found == sorted(found, reverse=True) and found[-1] < 0.9 * found[0]
    learnt = model.save("learnt").result()
    client.download(learnt, tmp_path / "learnt")
    loaded = peft.PeftModel.from_pretrained(base_model(), tmp_path / "learnt")
    np.testing.assert_allclose(peft_logprobs(loaded), our_logprobs(model), atol=3e-5)


def test_a_step_from_an_import_equals_that_of_peft_and_torch(
    client: Client, tmp_path: Path
) -> None:
    """A and B keep their scales, so AdamW's steps are equal too."""
    theirs = trained(tmp_path / "theirs", **CASES["attention"])
    model = client.load_model(client.import_peft(theirs.folder))
    # With a smaller eps, the last bits of the smallest gradients would dominate their steps.
    adam = {"eps": 1e-2, "weight_decay": 0.1}
    model.forward_backward([next_token_datum(TOKENS)])
    model.optim_step(learning_rate=1e-2, **adam).result()
    client.download(model.save("one").result(), tmp_path / "ours")
    ours = load_file(tmp_path / "ours" / "adapter_model.safetensors")

    learnt = {n: p for n, p in theirs.model.named_parameters() if p.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in learnt.items()}
    optimizer = torch.optim.AdamW(learnt.values(), lr=1e-2, betas=(0.9, 0.95), **adam)
    logits = theirs.model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    (-logits[range(len(TOKENS) - 1), TOKENS[1:]].sum()).backward()
    optimizer.step()
    assert len(ours) == len(learnt) == 2 * len(ATTENTION) * theirs.model.config.num_hidden_layers
    for name, parameter in learnt.items():
        same = ours[name.replace(".default", "")]
        torch.testing.assert_close(same, parameter.detach(), rtol=0, atol=2.2e-5)
        assert (parameter.detach() - before[name]).abs().max() > 5e-3


def test_exporting_importing_and_exporting_again_gives_the_same_bits(
    client: Client, tmp_path: Path
) -> None:
    model = client.create_model(rank=6, seed=3)
    model.forward_backward([next_token_datum(TOKENS)])
    model.optim_step(learning_rate=1e-2)
    client.download(model.save("here").result(), tmp_path / "first")
    path = client.import_peft(tmp_path / "first")
    client.download(path, tmp_path / "second")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        first, second = ((tmp_path / folder / name).read_bytes() for folder in ("first", "second"))
        assert first == second
    info = client.checkpoint_info(path)
    assert (info.base_model, info.lora_rank) == ("tuneserve/tiny", 6)
    assert info.train_attn and info.train_mlp and info.train_unembed


def test_projections_without_an_adapter_start_like_a_new_one(
    client: Client, tmp_path: Path
) -> None:
    theirs = trained(tmp_path / "theirs", **CASES["two of four, rank-stabilised"])
    path = client.import_peft(theirs.folder)
    client.download(path, tmp_path / "back")
    found = load_file(tmp_path / "back" / "adapter_model.safetensors")
    given = load_file(theirs.folder / "adapter_model.safetensors")
    assert json.loads((tmp_path / "back/adapter_config.json").read_text())["lora_alpha"] == (
        pytest.approx(7 * 3**0.5)
    )
    for name, tensor in given.items():
        assert torch.equal(found.pop(name), tensor)
    assert {name.split(".")[-3] for name in found} == {"k_proj", "o_proj"}
    for name, tensor in found.items():
        bound = theirs.model.config.hidden_size**-0.5  # the bound of a new A, computed by hand
        assert tensor.abs().max() <= bound * 2
        assert (tensor == 0).all() == ("lora_B" in name)


def test_the_official_sdk_continues_from_an_import(
    client: Client, server: LocalServer, tmp_path: Path
) -> None:
    theirs = trained(tmp_path / "theirs", **CASES["attention"])
    path = client.import_peft(theirs.folder)
    expected = our_logprobs(client.load_model(path))
    with service_client(server.url, KEY) as official:
        rest = tinker.RestClient(base_url=server.url, api_key=KEY)
        assert path in [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]
        for begin in (
            official.create_training_client_from_state,
            official.create_training_client_from_state_with_optimizer,
        ):
            again = begin(path).result().save_state("again").result().path
            np.testing.assert_array_equal(our_logprobs(client.load_model(again)), expected)


def test_the_command_imports_and_training_continues(
    client: Client, server: LocalServer, tmp_path: Path
) -> None:
    theirs = trained(tmp_path / "theirs", **CASES["attention"])
    place = ["--url", server.url, "--api-key", KEY]
    ran = CliRunner().invoke(
        cli.app, ["checkpoints", "import", str(theirs.folder), "--name", "mine", *place, "--json"]
    )
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert (told["base_model"], told["rank"]) == ("tuneserve/tiny", 4)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Q: grass?", "completion": " Arr!"}) + "\n")
    ran = CliRunner().invoke(
        cli.app,
        ["train", str(rows), "--resume", told["path"], "--epochs", "2", *place, "--json"],
    )
    assert ran.exit_code == 0, ran.output
    first, second, saved = map(json.loads, ran.stdout.splitlines())
    assert first["loss"] > second["loss"]
    assert client.checkpoint_info(saved["checkpoint"]).train_unembed is False

    ran = CliRunner().invoke(cli.app, ["checkpoints", "import", str(tmp_path), *place])
    assert ran.exit_code == 2 and "has no adapter_config.json" in ran.stderr


def test_a_large_upload_that_is_refused_early_says_why(client: Client, tmp_path: Path) -> None:
    """The answer arrives while most of the upload is still to be sent."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(32 * 2**20))
    with pytest.raises(InvalidRequest, match="'no/such' is not served here"):
        client.import_peft(tmp_path, base_model="no/such")
    with pytest.raises(InvalidRequest, match="peft_type = null"):
        client.import_peft(tmp_path)


def test_an_import_is_refused_with_a_reason_and_deleted_like_any_checkpoint(
    client: Client, tmp_path: Path
) -> None:
    theirs = trained(tmp_path / "theirs", **CASES["attention"])
    config = theirs.folder / "adapter_config.json"
    named = config.read_text().replace("tuneserve/tiny", "/somewhere/else")
    config.write_text(named)
    with pytest.raises(InvalidRequest, match=r"'/somewhere/else' is not served here.*base_model"):
        client.import_peft(theirs.folder)
    path = client.import_peft(theirs.folder, base_model="tuneserve/tiny", ttl_s=3600)
    (listed,) = [each for each in client.checkpoints() if each.tinker_path == path]
    assert listed.expires_at is not None and listed.checkpoint_type == "training"
    # rank 4 on four projections of each layer, A and B, 4 bytes a number, plus the header
    config = base_model().config
    head = config.hidden_size // config.num_attention_heads
    kv, q = config.num_key_value_heads * head, config.num_attention_heads * head
    numbers = (
        4
        * config.num_hidden_layers
        * (2 * (config.hidden_size + q) + 2 * (config.hidden_size + kv))
    )
    assert 4 * numbers < listed.size_bytes < 4 * numbers + 4096
    client.delete_checkpoint(path)
    assert path not in [each.tinker_path for each in client.checkpoints()]
