"""Adapter files: bit-exact round trips, exports that PEFT reads, damage, and age encryption."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pyrage
import pytest
import torch
import transformers
from safetensors.numpy import load, save
from safetensors.torch import load_file

from tuneserve_engine.adapters import checkpoint
from tuneserve_engine.adapters.checkpoint_format import metadata_of
from tuneserve_engine.adapters.merge import CannotMerge, _base_folder, merge
from tuneserve_engine.adapters.state import AdapterState, Tensors
from tuneserve_engine.core.adapter import ATTENTION, MLP, UNEMBED, AdapterConfig
from tuneserve_engine.core.errors import ServerError, UserError

LAYERS, VOCAB = 2, 67
SHAPES = {
    "q_proj": (24, 32),
    "k_proj": (24, 16),
    "v_proj": (24, 16),
    "o_proj": (32, 24),
    "gate_proj": (24, 40),
    "up_proj": (24, 40),
    "down_proj": (40, 24),
    UNEMBED: (24, VOCAB),
}
"""Inputs and outputs of the projections of the model below. No two roles can be confused."""
CONFIG = AdapterConfig(rank=3, alpha=32.0, seed=2**40)


def tensors(config: AdapterConfig, seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    made: Tensors = {}
    for target in config.targets:
        layers = () if target == UNEMBED else (LAYERS,)
        d_in, d_out = SHAPES[target]
        for name, shape in (("A", (d_in, config.rank)), ("B", (config.rank, d_out))):
            made[f"{target}.{name}"] = rng.standard_normal((*layers, *shape)).astype(np.float32)
    return made


def state(config: AdapterConfig = CONFIG, *, moments: bool = True) -> AdapterState:
    if not moments:
        return AdapterState(config, tensors(config, 0))
    return AdapterState(config, tensors(config, 0), 7, tensors(config, 1), tensors(config, 2))


def on_disk(directory: Path, members: dict[str, bytes]) -> Path:
    for name, data in members.items():
        (directory / name).write_bytes(data)
    return directory


def assert_same_bits(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].shape == b[name].shape
        assert a[name].tobytes() == b[name].tobytes()


# --- our format ----------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", [True, False])
def test_a_state_is_restored_bit_for_bit(tmp_path: Path, moments: bool) -> None:
    saved = state(moments=moments)
    odd = np.array([-0.0, 1e-45, 3e38, np.pi, np.nan, np.inf], np.float32)
    saved.weights["q_proj.A"].flat[:6] = odd
    saved.weights["q_proj.B"] = np.asfortranarray(saved.weights["q_proj.B"])
    loaded = checkpoint.read_checkpoint(
        on_disk(tmp_path, checkpoint.to_members(saved, "base")), "base"
    )
    assert (loaded.config, loaded.step) == (saved.config, saved.step)
    assert_same_bits(loaded.weights, saved.weights)
    assert_same_bits(loaded.first_moment, saved.first_moment)
    assert_same_bits(loaded.second_moment, saved.second_moment)


def test_loaded_tensors_are_writable(tmp_path: Path) -> None:
    loaded = checkpoint.read_checkpoint(
        on_disk(tmp_path, checkpoint.to_members(state(), "base")), "base"
    )
    loaded.weights["q_proj.A"] += 1


def test_a_state_of_another_base_model_is_refused_though_its_shapes_fit(tmp_path: Path) -> None:
    on_disk(tmp_path, checkpoint.to_members(state(), "org/chat"))
    with pytest.raises(UserError, match=r"trained on 'org/chat' and this server runs 'org/base'"):
        checkpoint.read_checkpoint(tmp_path, "org/base")


def test_a_state_of_another_revision_is_refused(tmp_path: Path) -> None:
    on_disk(tmp_path, checkpoint.to_members(state(), "org/base", "aaa"))
    with pytest.raises(UserError, match=r"on revision aaa of 'org/base' and this server runs bbb"):
        checkpoint.read_checkpoint(tmp_path, "org/base", "bbb")
    for known in ("aaa", ""):
        checkpoint.read_checkpoint(tmp_path, "org/base", known)


def test_a_state_without_a_revision_is_read_with_any(tmp_path: Path) -> None:
    on_disk(tmp_path, checkpoint.to_members(state(), "org/base"))
    assert checkpoint.read_checkpoint(tmp_path, "org/base", "bbb").step == state().step


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "never"):
        with pytest.raises(UserError, match="deleted or has expired; load another"):
            checkpoint.read_checkpoint(directory, "base")


def whole() -> bytes:
    """A file of a release before checksums: only its structure can be checked."""
    groups = {"weights": state().weights, "first_moment": state().first_moment}
    groups["second_moment"] = state().second_moment
    arrays = {f"{group}/{name}": x for group, of in groups.items() for name, x in of.items()}
    return save(arrays, metadata_of(CONFIG, "base", 7))


def rewritten(change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with a changed header."""
    data = whole()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header)
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data[8 + size :]


def metadata(**changes: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update(changes)


def config(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        known = json.loads(header["__metadata__"]["config"])
        header["__metadata__"]["config"] = json.dumps({**known, **changes})

    return change


DAMAGED: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "a few bytes": lambda: b"12345",
    "cut in the header": lambda: whole()[:100],
    "cut in the tensors": lambda: whole()[:-1],
    "longer": lambda: whole() + b"x",
    "a pickle": lambda: b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00]\x94.",
    "huge header": lambda: struct.pack("<Q", 2**63) + whole()[8:],
    "no metadata": lambda: save({"weights/q_proj.A": np.zeros(1, "f4")}),
    "another format": lambda: rewritten(metadata(format="other-1")),
    "no config": lambda: rewritten(lambda header: header["__metadata__"].pop("config")),
    "config that is no JSON": lambda: rewritten(metadata(config="{")),
    "config of another shape": lambda: rewritten(metadata(config='{"ranks": 3}')),
    "config that is a list": lambda: rewritten(metadata(config="[]")),
    "rank that is text": lambda: rewritten(config(rank="3")),
    "rank that is missing": lambda: rewritten(config(rank=None)),
    "rank zero": lambda: rewritten(config(rank=0)),
    "alpha that is NaN": lambda: rewritten(config(alpha=float("nan"))),
    "config that is deep": lambda: rewritten(metadata(config="[" * 100_000)),
    "header of two megabytes": lambda: rewritten(metadata(padding="x" * 2**21)),
    "tensor of another type": lambda: rewritten(
        lambda header: header["weights/q_proj.A"].update(dtype="I32")
    ),
    "step that is no number": lambda: rewritten(metadata(step="seven")),
    "unknown group": lambda: rewritten(
        lambda header: header.update({"other/x": header.pop("weights/q_proj.A")})
    ),
    "name without a group": lambda: rewritten(
        lambda header: header.update({"x": header.pop("weights/q_proj.A")})
    ),
}


def test_a_large_header_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "safe_open", lambda *_, **__: pytest.fail("it was parsed"))
    (tmp_path / checkpoint.MEMBER).write_bytes(struct.pack("<Q", 2**20 + 1) + b"{")
    with pytest.raises(ServerError, match="claims 1048577 bytes; at most 1048576"):
        checkpoint.read_checkpoint(tmp_path, "base")


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_a_server_error(tmp_path: Path, damage: str) -> None:
    (tmp_path / checkpoint.MEMBER).write_bytes(DAMAGED[damage]())
    with pytest.raises(ServerError, match=r"checkpoint (is damaged|format is)"):
        checkpoint.read_checkpoint(tmp_path, "base")


def test_no_changed_byte_of_the_header_causes_another_kind_of_error(
    tmp_path: Path,
) -> None:
    data = whole()
    path = tmp_path / checkpoint.MEMBER
    rng = np.random.default_rng(0)
    for at in rng.integers(0, 2000, 300).tolist():
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        try:
            checkpoint.read_checkpoint(tmp_path, "base")
        except ServerError:
            pass
        except UserError as error:
            assert "was trained on" in str(error), "only the name can look like another's"


def test_a_file_truncated_anywhere_is_damaged(tmp_path: Path) -> None:
    data = whole()
    (header,) = struct.unpack("<Q", data[:8])
    rng = np.random.default_rng(0)
    cuts = [*range(0, 8 + header + 64, 13), *rng.integers(0, len(data), 100).tolist()]
    for at in cuts:
        (tmp_path / checkpoint.MEMBER).write_bytes(data[:at])
        with pytest.raises(ServerError, match="checkpoint is damaged"):
            checkpoint.read_checkpoint(tmp_path, "base")


def test_a_file_of_random_bytes_is_damaged(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for size in rng.integers(1, 10_000, 200).tolist():
        garbage = rng.bytes(size)
        for data in (garbage, struct.pack("<Q", size) + garbage, b"\0" * size):
            (tmp_path / checkpoint.MEMBER).write_bytes(data)
            with pytest.raises(ServerError, match="checkpoint is damaged"):
                checkpoint.read_checkpoint(tmp_path, "base")


def test_no_edit_of_the_header_causes_another_kind_of_error(tmp_path: Path) -> None:
    """Characters of JSON are inserted (0), replaced (1) and left out (2)."""
    data = whole()
    (size,) = struct.unpack("<Q", data[:8])
    rng = np.random.default_rng(0)
    characters = b'{}[],:"0123456789.-eEnulltruefalseFIN '
    for _ in range(1000):
        header = bytearray(data[8 : 8 + size])
        for at, edit in rng.integers(0, (size - 3, 3), (3, 2)).tolist():
            new = b"" if edit == 2 else bytes([characters[at % len(characters)]])
            header[at : at + (edit > 0)] = new
        (tmp_path / checkpoint.MEMBER).write_bytes(
            struct.pack("<Q", len(header)) + bytes(header) + data[8 + size :]
        )
        try:
            checkpoint.read_checkpoint(tmp_path, "base")
        except ServerError:
            pass
        except UserError as error:
            assert "was trained on" in str(error), "only the name can look like another's"


def test_an_unreadable_file_is_a_server_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    on_disk(tmp_path, checkpoint.to_members(state(), "base"))
    monkeypatch.setattr(checkpoint, "safe_open", fail)
    with pytest.raises(ServerError, match="Input/output error"):
        checkpoint.read_checkpoint(tmp_path, "base")


# --- PEFT's format -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A random Qwen3 of the shapes above, in a folder."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=40,
        max_position_embeddings=64,
        tie_word_embeddings=request.param,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.Qwen3ForCausalLM(config)
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    yield folder


def load_model(folder: Path) -> Any:
    return transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def merged(folder: Path, adapter: AdapterState) -> Any:
    """The base model with W + scale·(A·B)ᵀ written into its weights by hand.

    A tied unembedding is untied first, because the adapter changes it and not the embedding.
    """
    model = load_model(folder)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    scale = adapter.config.alpha / adapter.config.rank
    with torch.no_grad():
        for target in adapter.config.targets:
            a, b = adapter.weights[f"{target}.A"], adapter.weights[f"{target}.B"]
            if target == UNEMBED:
                model.lm_head.weight += scale * torch.from_numpy((a @ b).T)
                continue
            for number, layer in enumerate(model.model.layers):
                block = layer.self_attn if target in ATTENTION else layer.mlp
                delta = torch.from_numpy((a[number] @ b[number]).T)
                getattr(block, target).weight += scale * delta
    return model


def load_export(folder: Path, export: Path) -> Any:
    model = load_model(folder)
    config = json.loads((export / "adapter_config.json").read_text())
    if model.config.tie_word_embeddings and "lm_head" in config["target_modules"]:
        # PEFT warns in general about merging such adapters. This test only computes with one.
        with pytest.warns(UserWarning, match="tied layer is part of the adapter"):
            return peft.PeftModel.from_pretrained(model, export).eval()
    return peft.PeftModel.from_pretrained(model, export).eval()


def small(config: AdapterConfig) -> AdapterState:
    """Weights as small as training makes them, so the logits stay near those of the base model."""
    return AdapterState(config, {name: x / 16 for name, x in tensors(config, 0).items()})


@pytest.mark.parametrize(
    "config",
    [
        AdapterConfig(rank=3, alpha=32.0, seed=0),
        AdapterConfig(rank=1, alpha=16.0, seed=0, train_unembed=False),
        AdapterConfig(rank=4, alpha=8.0, seed=0, train_attn=False, train_mlp=False),
        AdapterConfig(rank=2, alpha=2.0, seed=0, train_attn=False),
    ],
    ids=["all", "no unembedding", "unembedding alone", "no attention"],
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_loads_the_export_and_computes_the_merged_weights(
    base: Path, tmp_path: Path, config: AdapterConfig
) -> None:
    adapter = small(config)
    on_disk(tmp_path, checkpoint.peft_members(adapter, str(base)))
    tokens = torch.arange(40).reshape(2, 20) % VOCAB
    with torch.no_grad():
        plain = load_model(base)(tokens).logits
        got = load_export(base, tmp_path)(tokens).logits
        want = merged(base, adapter)(tokens).logits
    scale = want.abs().max()
    assert (want - plain).abs().max() > 0.01 * scale  # the adapter has an effect
    assert (got - want).abs().max() <= 1e-5 * scale


@pytest.mark.parametrize("shard", ["1GB", "12KB"], ids=["one file", "sharded"])
def test_a_merged_model_computes_the_same_as_base_model_and_adapter(
    base: Path, tmp_path: Path, shard: str
) -> None:
    adapter = small(CONFIG)
    folders = [tmp_path / name for name in ("base", "adapter", "merged")]
    for folder in folders:
        folder.mkdir()
    again, exported, out = folders
    load_model(base).save_pretrained(again, max_shard_size=shard)
    (again / "tokenizer.json").write_text("{}")
    on_disk(exported, checkpoint.peft_members(adapter, str(base)))
    merge(exported, again, out)
    tokens = torch.arange(40).reshape(2, 20) % VOCAB
    with torch.no_grad():
        plain, got, want = (
            model(tokens).logits
            for model in (load_model(base), load_model(out), merged(base, adapter))
        )
    scale = want.abs().max()
    assert (want - plain).abs().max() > 0.01 * scale
    assert (got - want).abs().max() <= 1e-6 * scale
    assert {each.name for each in out.iterdir()} == {each.name for each in again.iterdir()}


def test_merged_weights_keep_their_type_and_others_their_bits(base: Path, tmp_path: Path) -> None:
    config = AdapterConfig(rank=3, alpha=32.0, seed=0, train_unembed=False, train_mlp=False)
    half, exported, out = (tmp_path / name for name in ("half", "adapter", "merged"))
    exported.mkdir()
    out.mkdir()
    load_model(base).to(torch.bfloat16).save_pretrained(half)
    on_disk(exported, checkpoint.peft_members(small(config), str(base)))
    merge(exported, half, out)
    before, after = (load_file(each / "model.safetensors") for each in (half, out))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    names = {f"model.layers.{n}.self_attn.{t}.weight" for n in range(LAYERS) for t in ATTENTION}
    assert changed == names
    assert {each.dtype for each in after.values()} == {torch.bfloat16}


@pytest.mark.parametrize("place", ["model.layers.7.mlp.up_proj", "model.layers.0.mlp.down_proj"])
def test_an_adapter_of_another_base_model_is_not_merged(
    base: Path, tmp_path: Path, place: str
) -> None:
    out = tmp_path / "merged"
    out.mkdir()
    pair = {"A": np.ones((3, 24), np.float32), "B": np.ones((40, 3), np.float32)}
    named = {f"base_model.model.{place}.lora_{part}.weight": x for part, x in pair.items()}
    members = checkpoint.peft_members(small(CONFIG), str(base))
    on_disk(tmp_path, {**members, "adapter_model.safetensors": save(named)})
    with pytest.raises(CannotMerge, match=f"{place}.weight.* was trained on another base model"):
        merge(tmp_path, base, out)
    assert not (out / "config.json").exists()


def test_the_export_names_every_tensor_as_peft_does(tmp_path: Path) -> None:
    on_disk(tmp_path, checkpoint.peft_members(small(CONFIG), "some/base"))
    exported = load_file(tmp_path / "adapter_model.safetensors")
    names = {f"layers.{n}.self_attn.{t}" for n in range(LAYERS) for t in ATTENTION}
    names |= {f"layers.{n}.mlp.{t}" for n in range(LAYERS) for t in MLP}
    modules = {f"base_model.model.model.{name}" for name in names} | {"base_model.model.lm_head"}
    assert exported.keys() == {f"{m}.lora_{part}.weight" for m in modules for part in "AB"}
    for name, tensor in exported.items():
        d_in, d_out = SHAPES.get(name.split(".")[-3], SHAPES[UNEMBED])
        assert tuple(tensor.shape) == ((3, d_in) if "lora_A" in name else (d_out, 3))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 32)
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/base", None)


def test_an_export_names_the_revision_of_its_base_model(tmp_path: Path) -> None:
    on_disk(tmp_path, checkpoint.peft_members(small(CONFIG), "some/base", "aaa"))
    assert peft.PeftConfig.from_pretrained(str(tmp_path)).revision == "aaa"


def test_an_adapter_is_merged_into_the_revision_that_it_names(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = tmp_path / "exported"
    exported.mkdir()
    on_disk(exported, checkpoint.peft_members(small(CONFIG), "some/base", "aaa"))
    asked = []
    name = "tuneserve_engine.adapters.merge.resolve_base_model"
    monkeypatch.setattr(name, lambda *given: asked.append(given) or base)
    assert _base_folder(exported, "some/base") == base
    assert _base_folder(exported, str(base)) == base
    assert asked == [("some/base", "aaa")]


# --- encryption ----------------------------------------------------------------------------------


def test_only_the_recipients_can_decrypt_every_file() -> None:
    members = checkpoint.peft_members(small(CONFIG), "base")
    keys = [pyrage.x25519.Identity.generate() for _ in range(2)]
    encrypted = checkpoint.encrypt(members, [str(key.to_public()) for key in keys])
    assert encrypted.keys() == {f"{name}.age" for name in members}
    for name, data in members.items():
        sealed = encrypted[f"{name}.age"]
        assert sealed.startswith(b"age-encryption.org/v1\n")
        assert data not in sealed
        for key in keys:
            assert pyrage.decrypt(sealed, [key]) == data
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(sealed, [pyrage.x25519.Identity.generate()])


@pytest.mark.parametrize("recipient", ["", "age1x", "ssh-rsa AAAA", "AGE-SECRET-KEY-1", "é"])
def test_a_recipient_that_is_not_an_age_key_is_named(recipient: str) -> None:
    good = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(UserError) as caught:
        checkpoint.encrypt({"a": b"x"}, [good, recipient])
    assert f"age_encryption_recipients has {recipient!r}" in str(caught.value)


# --- no code in files ----------------------------------------------------------------------------


def test_saved_files_are_safetensors_and_json_only() -> None:
    ours = checkpoint.to_members(state(), "base")
    export = checkpoint.peft_members(state(), "base")
    assert ours.keys() == {"adapter.safetensors"}
    assert export.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    load(ours["adapter.safetensors"])
    load(export["adapter_model.safetensors"])
    json.loads(export["adapter_config.json"])
    for data in (*ours.values(), *export.values()):
        # signatures of a pickle and of a torch archive
        assert not data.startswith((b"\x80", b"PK"))
