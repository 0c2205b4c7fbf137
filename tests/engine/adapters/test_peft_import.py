"""Imports of PEFT adapters: exact numbers for supported ones, and clear errors for the rest."""

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tuneserve_engine.adapters import checkpoint, peft_import
from tuneserve_engine.adapters.checkpoint_format import MEMBER, initial_a, initial_layers
from tuneserve_engine.adapters.kinds import kind_of
from tuneserve_engine.adapters.peft_config import read_config
from tuneserve_engine.adapters.peft_import import PeftAdapter, PeftWeights
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.jax.adapters.arrays import initial_weights
from tuneserve_engine.core.adapter import PROJECTIONS, UNEMBED, AdapterConfig, BaseModelInfo
from tuneserve_engine.core.errors import UserError

LAYERS, WIDTH, RANK = 2, 6, 3
OUTPUTS = {"q_proj": 8, "k_proj": 4, "v_proj": 4, "o_proj": 6, "gate_proj": 10, "up_proj": 10}
INPUTS = {"o_proj": 8, "down_proj": 10}
SHAPES = {
    name: (LAYERS, INPUTS.get(name, WIDTH), OUTPUTS.get(name, WIDTH)) for name in PROJECTIONS
} | {UNEMBED: (WIDTH, 11)}
INFO = BaseModelInfo("org/base", "qwen3", 11, 64, 16, "none", target_shapes=tuple(SHAPES.items()))
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "org/base",
    "r": RANK,
    "lora_alpha": 7,
    "target_modules": ["q_proj"],
    "lora_dropout": 0.1,
    "bias": "none",
    "rank_pattern": {},
    "use_dora": False,
}
Q0A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q0B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
HEAD = "base_model.model.lm_head"
Tensors = dict[str, np.ndarray[Any, Any]]


def tensors(targets: tuple[str, ...] = ("q_proj",), dtype: Any = np.float32) -> Tensors:
    """PEFT's names and shapes, with numbers that the type can hold exactly."""
    rng = np.random.default_rng(5)
    made: Tensors = {}
    for target in targets:
        *layers, inputs, outputs = SHAPES[target]
        block = "self_attn" if target in PROJECTIONS[:4] else "mlp"
        modules = [f"base_model.model.model.layers.{n}.{block}.{target}" for n in range(LAYERS)]
        for module in modules if layers else [HEAD]:
            made[f"{module}.lora_A.weight"] = rng.standard_normal((RANK, inputs)).astype(dtype)
            made[f"{module}.lora_B.weight"] = rng.standard_normal((outputs, RANK)).astype(dtype)
    return made


def imported(
    folder: Path, data: bytes, config: dict[str, Any] | None = None, *, before: bytes = b""
) -> AdapterState:
    """The state that a worker reads from the converted file. ``data`` starts after ``before``."""
    adapter = checked(folder, data, config, before=before)
    (folder / "kept").mkdir()
    adapter.write(folder / "kept" / MEMBER)
    return checkpoint.read_checkpoint(folder / "kept", INFO.name)


def checked(
    folder: Path,
    data: bytes,
    config: dict[str, Any] | None = None,
    *,
    before: bytes = b"",
    info: BaseModelInfo = INFO,
) -> PeftAdapter:
    path = folder / "upload"
    path.write_bytes(before + data + b"behind it")
    read = read_config(json.dumps(config or CONFIG).encode())
    return PeftWeights(path, len(before), len(data)).adapter(read, info, 77)


def refusal(folder: Path, data: bytes, config: dict[str, Any] | None = None) -> str:
    with pytest.raises(UserError) as raised:
        imported(folder, data, config)
    return str(raised.value)


# --- accepted adapters ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("before", [b"", b"odd"])
def test_every_number_is_stored_as_a_float32(tmp_path: Path, dtype: Any, before: bytes) -> None:
    given = tensors((*PROJECTIONS, UNEMBED), dtype)
    state = imported(tmp_path, save(given), before=before)
    assert state.config == AdapterConfig(rank=RANK, alpha=7.0, seed=77)
    for target in PROJECTIONS:
        block = "self_attn" if target in PROJECTIONS[:4] else "mlp"
        for layer in range(LAYERS):
            name = f"base_model.model.model.layers.{layer}.{block}.{target}"
            for part in "AB":
                expected = given[f"{name}.lora_{part}.weight"].astype(np.float32).T
                np.testing.assert_array_equal(state.weights[f"{target}.{part}"][layer], expected)
    head = given[f"{HEAD}.lora_B.weight"].astype(np.float32).T
    np.testing.assert_array_equal(state.weights["unembed.B"], head)


def test_the_optimizer_starts_without_steps(tmp_path: Path) -> None:
    state = imported(tmp_path, save(tensors()))
    assert state.step == 0
    for moments in (state.first_moment, state.second_moment):
        assert moments.keys() == state.weights.keys()
        assert all(not each.any() and each.shape for each in moments.values())


def test_parts_without_an_adapter_start_as_in_a_new_model(tmp_path: Path) -> None:
    state = imported(tmp_path, save(tensors(("v_proj", "up_proj"))))
    assert (state.config.train_attn, state.config.train_mlp) == (True, True)
    assert not state.config.train_unembed
    fresh = initial_weights(state.config, SHAPES)
    assert state.weights.keys() == fresh.keys()
    for name, tensor in state.weights.items():
        is_given = name.startswith(("v_proj", "up_proj"))
        assert np.array_equal(tensor, fresh[name]) != is_given


def test_peft_reads_from_an_export_what_was_imported(tmp_path: Path) -> None:
    given = tensors((*PROJECTIONS, UNEMBED))
    members = checkpoint.peft_members(imported(tmp_path, save(given)), "org/base")
    found = load(members["adapter_model.safetensors"])
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        np.testing.assert_array_equal(found[name], tensor)


@pytest.mark.parametrize(
    "fields, scale",
    [
        ({"lora_alpha": 7}, 7 / 3),
        ({"lora_alpha": 0.5}, 0.5 / 3),
        ({"lora_alpha": 7, "use_rslora": True}, 7 / 3**0.5),
        ({"lora_alpha": 7, "use_rslora": False, "init_lora_weights": "gaussian"}, 7 / 3),
    ],
)
def test_the_scale_equals_pefts(tmp_path: Path, fields: dict[str, Any], scale: float) -> None:
    state = imported(tmp_path, save(tensors()), CONFIG | fields)
    assert kind_of(state.config).scale(state.config) == pytest.approx(scale, rel=1e-15)


def test_pefts_copies_of_the_embedding_are_left_out(tmp_path: Path) -> None:
    copy = np.zeros((11, WIDTH), np.float32)
    names = ("model.embed_tokens.weight", "lm_head.weight", "lm_head.base_layer.weight")
    copies = {f"base_model.model.{name}": copy for name in names}
    state = imported(tmp_path, save(tensors((UNEMBED,)) | copies))
    assert state.weights.keys() == {"unembed.A", "unembed.B"}
    said = refusal(tmp_path, save(tensors() | {f"{HEAD}.weight": copy[:10]}))
    assert "[10, 6]; 'org/base' has [11, 6]: its vocabulary was changed" in said


# --- written -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 6, 3), (1, 1, 1), (5, 3, 1), (2, 64, 16)])
def test_an_a_drawn_layer_by_layer_has_the_bits_of_the_whole(shape: tuple[int, int, int]) -> None:
    layers = list(initial_layers(77, 3, shape))
    assert len(layers) == shape[0]
    np.testing.assert_array_equal(np.stack(layers), initial_a(77, 3, shape))


def test_memory_holds_one_layer_of_a_part_without_an_adapter(tmp_path: Path) -> None:
    layers, width = 64, 256
    shapes = {name: (layers, width, width) for name in PROJECTIONS} | {UNEMBED: (width, 11)}
    info = replace(INFO, target_shapes=tuple(shapes.items()))
    modules = [f"base_model.model.model.layers.{n}.mlp.up_proj" for n in range(layers)]
    zeros = np.zeros((16, width), np.float32)
    given = {f"{m}.lora_A.weight": zeros for m in modules}
    given |= {f"{m}.lora_B.weight": zeros.T.copy() for m in modules}
    adapter = checked(tmp_path, save(given), CONFIG | {"r": 16}, info=info)
    tracemalloc.start()
    try:
        adapter.write(tmp_path / MEMBER)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < layers * zeros.nbytes / 4


def test_the_size_is_known_before_anything_is_written(tmp_path: Path) -> None:
    adapter = checked(tmp_path, save(tensors(("k_proj", UNEMBED), np.float16)))
    adapter.write(tmp_path / MEMBER)
    written = (tmp_path / MEMBER).read_bytes()
    (header,) = struct.unpack("<Q", written[:8])
    assert adapter.size == len(written) - 8 - header > 0


def test_writing_stops_before_the_next_layer_on_request(tmp_path: Path) -> None:
    calls = 0

    def third() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise InterruptedError

    adapter = checked(tmp_path, save(tensors()))
    with pytest.raises(InterruptedError):
        adapter.write(tmp_path / MEMBER, third)
    written = (tmp_path / MEMBER).read_bytes()
    (header,) = struct.unpack("<Q", written[:8])
    assert len(written) - 8 - header == 2 * RANK * WIDTH * 4


def test_little_remains_to_sync_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(peft_import, "_SYNC_BYTES", 500)
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    checked(tmp_path, save(tensors(PROJECTIONS))).write(tmp_path / MEMBER)
    largest = 10 * RANK * 4
    assert synced[-1] == (tmp_path / MEMBER).stat().st_size
    assert len(synced) > 4 and max(np.diff(synced)) < 500 + largest


# --- refused: adapter_config.json -----------------------------------------------------------------

FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, 'peft_type = "IA3"; only "LORA"'),
    "no method": ({"peft_type": None}, "peft_type = null"),
    "DoRA": ({"use_dora": True}, "use_dora = true; DoRA scales"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, 'modules_to_save = ["lm_head"]; whole'),
    "bias": ({"bias": "all"}, 'bias = "all"; biases are not trained here'),
    "bias of B": ({"lora_bias": True}, "lora_bias = true; biases"),
    "ranks of their own": ({"rank_pattern": {"q_proj": 2}}, "one rank; train it with the same r"),
    "alphas of their own": ({"alpha_pattern": {"q": 2}}, 'alpha_pattern = {"q": 2}; all modules'),
    "some layers": ({"layers_to_transform": [0]}, "layers_to_transform = [0]; all layers"),
    "layer zero": ({"layers_to_transform": 1}, "layers_to_transform = 1; all layers"),
    "fan in, fan out": ({"fan_in_fan_out": True}, "the other way round"),
    "tokens": ({"trainable_token_indices": [3]}, "embeddings are not trained here"),
    "a start of its own": ({"init_lora_weights": "pissa"}, "changes the base model's weights"),
    "of a later PEFT": ({"use_magic": {"a": 1}}, 'use_magic = {"a": 1}; this server imports plain'),
    "a long value": ({"use_magic": "x" * 500}, '"xxxx'),
    "no rank": ({"r": None}, "r = null; it must be a whole number above 0"),
    "rank zero": ({"r": 0}, "r = 0; it must be"),
    "a rank of True": ({"r": True}, "r = true; it must be"),
    "half a rank": ({"r": 1.5}, "r = 1.5; it must be"),
    "too much rank": ({"r": 17}, "r = 17; this server takes 1 to 16 for 'org/base'; train it"),
    "a huge rank": ({"r": 10**400}, "r = 1000000"),
    "a rank above any": ({"r": 2**20 + 1}, "r = 1048577; no adapter has a rank above 1048576"),
    "a huge rank, stabilised": ({"r": 10**400, "use_rslora": True}, "above 1048576"),
    "a huge whole alpha": ({"lora_alpha": 10**400}, "at most 2**100"),
    "a long name": ({"x" * 10_000: 1}, "xxx… = 1; this server imports plain"),
    "a deep value": ({"use_magic": json.loads("[" * 900 + "1" + "]" * 900)}, "use_magic = [[["),
    "alpha zero": ({"lora_alpha": 0}, "lora_alpha = 0; it must be a finite number above 0"),
    "alpha below zero": ({"lora_alpha": -1}, "lora_alpha = -1; it must be"),
    "alpha of text": ({"lora_alpha": "16"}, 'lora_alpha = "16"; it must be'),
    "a huge alpha": ({"lora_alpha": 1e300}, "lora_alpha = 1e+300; it must be"),
    "odd rank-stabilised": ({"use_rslora": "yes"}, 'use_rslora = "yes"; it must be true or false'),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_field_that_would_change_the_numbers_is_refused(tmp_path: Path, case: str) -> None:
    fields, words = FIELDS[case]
    said = refusal(tmp_path, save(tensors()), CONFIG | fields)
    assert said.startswith("adapter_config.json has ") and words in said
    assert len(said) < 400


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"3", b'{"r": NaN}', b"[" * 100_000, b"\xff\xfe", b'"\\ud800"']
)
def test_a_config_that_is_not_a_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(UserError, match=r"^adapter_config.json is no JSON"):
        read_config(text)


# --- refused: adapter_model.safetensors -----------------------------------------------------------


def changed(**new: Any) -> bytes:
    """The tensors with changes. None removes a tensor."""
    names = {"q0a": Q0A, "q0b": Q0B}
    merged = tensors() | {names.get(name, name): value for name, value in new.items()}
    return save({name: value for name, value in merged.items() if value is not None})


def renamed(old: str, new: str) -> bytes:
    found = tensors()
    found[new] = found.pop(old)
    return save(found)


def rewritten(change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with a changed header."""
    data = save(tensors())
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header)
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data[8 + size :]


def entry(**fields: Any) -> bytes:
    return rewritten(lambda header: header[Q0A].update(fields))


def spoiled(value: float) -> bytes:
    a = tensors()[Q0A]
    a[1, 2] = value
    return changed(q0a=a)


WHOLE = save(tensors())
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "NaN": (lambda: spoiled(np.nan), f"{Q0A} of adapter_model.safetensors is nan at [1, 2]"),
    "infinite": (lambda: spoiled(-np.inf), "is -inf at [1, 2]; all numbers"),
    "no tensors": (lambda: save({}), "has no LoRA tensors"),
    "another module": (
        lambda: renamed(Q0A, Q0A.replace("q_proj", "rotary")),
        "self_attn.rotary.lora_A.weight', which is no LoRA tensor",
    ),
    "the MLP's in attention": (
        lambda: renamed(Q0A, Q0A.replace("q_proj", "up_proj")),
        "no LoRA tensor of a module that is trained here: q_proj, k_proj",
    ),
    "the embedding": (
        lambda: changed(**{"base_model.model.model.embed_tokens.lora_embedding_A": np.ones(3)}),
        "embed_tokens.lora_embedding_A', which is no LoRA tensor",
    ),
    "DoRA's magnitudes": (
        lambda: changed(**{Q0A.replace("lora_A.weight", "lora_magnitude_vector"): np.ones(3)}),
        "lora_magnitude_vector', which is no LoRA tensor",
    ),
    "one layer missing": (
        lambda: changed(q0a=None, q0b=None),
        "has no lora_A for q_proj of layer 0, and 'org/base' has 2 layers",
    ),
    "half a pair": (lambda: changed(q0b=None), "has no lora_B for q_proj of layer 0"),
    "a layer too many": (
        lambda: changed(**{Q0A.replace("layers.0", "layers.2"): tensors()[Q0A]}),
        "layers.2.self_attn.q_proj.lora_A.weight; 'org/base' has 2 layers",
    ),
    "twice the same": (
        lambda: changed(**{Q0A.replace("lora_A", "lora_A.default"): tensors()[Q0A]}),
        "which are the same",
    ),
    "another width": (
        lambda: changed(q0a=np.ones((RANK, 5), np.float32)),
        "is [3, 5]; with rank 3 'org/base' has [3, 6] there",
    ),
    "another rank": (lambda: changed(q0a=np.ones((4, WIDTH), np.float32)), "is [4, 6]; with rank"),
    "flat": (
        lambda: changed(q0a=np.ones(18, np.float32)),
        "is [18]; a LoRA tensor of these modules has 2 dimensions",
    ),
    "three dimensions": (lambda: entry(shape=[3, 2, 3]), "is [3, 2, 3]; a LoRA tensor of these"),
    "no dimensions": (lambda: entry(shape=[]), "is []; a LoRA tensor of these"),
    "100,000 dimensions": (
        lambda: entry(shape=[9] * 100_000),
        "cannot be read: Expected `array` of length <= 8",
    ),
    "a dimension of 4,000 digits": (lambda: entry(shape=[10**4000, 6]), "cannot be read"),
    "offsets of 4,000 digits": (lambda: entry(data_offsets=[0, 10**4000]), "cannot be read"),
    "float64": (lambda: changed(q0a=np.ones((RANK, WIDTH))), "is F64; float32, bfloat16 and"),
    "integers": (lambda: changed(q0a=np.ones((RANK, WIDTH), "i4")), "is I32; float32"),
    "cut in the tensors": (lambda: WHOLE[:-1], "it was cut"),
    "cut in the header": (lambda: WHOLE[:100], "of the file's 100; at most 1048576 are read"),
    "a few bytes": (lambda: WHOLE[:5], "of the file's 5;"),
    "empty": (lambda: b"", "of the file's 0;"),
    "a pickle": (lambda: b"\x80\x04\x95\x0b" + b"\x00" * 100, "no whole safetensors file"),
    "a huge header": (lambda: struct.pack("<Q", 2**63) + WHOLE[8:], "list of tensors would have"),
    "a header of two megabytes": (
        lambda: rewritten(lambda header: header.update(__metadata__={"x": "x" * 2**21})),
        "at most 1048576 are read",
    ),
    "a header that is no JSON": (lambda: WHOLE[:9] + b"}" + WHOLE[10:], "cannot be read"),
    "a deep header": (
        lambda: struct.pack("<Q", 10**5) + b"[" * 10**5,
        "list of tensors cannot be read",
    ),
    "a tensor of text": (
        lambda: rewritten(lambda header: header.update({Q0A: "none"})),
        "list of tensors cannot be read",
    ),
    "a shape of text": (lambda: entry(shape="3x6"), "list of tensors cannot be read"),
    "a shape below zero": (lambda: entry(shape=[-3, -6]), "is [-3, -6] at bytes"),
    "an endless shape": (lambda: entry(shape=[2**40, 2**40]), "is [1099511627776, 109951162"),
    "offsets below zero": (lambda: entry(data_offsets=[-72, 0]), "at bytes -72 to 0"),
    "offsets that cross": (lambda: entry(data_offsets=[72, 0]), "at bytes 72 to 0"),
    "offsets beyond": (lambda: entry(data_offsets=[2**50, 2**50 + 72]), "it was cut"),
    "more bytes than numbers": (lambda: entry(data_offsets=[0, 76]), "and has 76 bytes"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_does_not_fit_the_base_model_is_refused(tmp_path: Path, case: str) -> None:
    make, words = FILES[case]
    said = refusal(tmp_path, make())
    assert words in said and len(said) < 500


def moved(name: str, start: int, end: int) -> bytes:
    """The file with this tensor, which may be new, at these bytes."""
    fields = {"dtype": "F32", "data_offsets": [start, end]}
    empty = {"shape": [(end - start) // 24, WIDTH]}
    return rewritten(lambda header: header.update({name: header.get(name, empty) | fields}))


def shift(header: dict[str, Any]) -> None:
    for each in header.values():
        each["data_offsets"] = [at + 4 for at in each["data_offsets"]]


COPY = "base_model.model.lm_head.weight"
LAYOUTS: dict[str, Callable[[], bytes]] = {
    "shared bytes": lambda: moved(Q0A.replace("layers.0", "layers.1"), 0, 72),
    "a copy in the tensors": lambda: moved(COPY, 0, 11 * WIDTH * 4),
    "bytes behind": lambda: WHOLE + b"more",
    "bytes before": lambda: rewritten(shift) + b"more",
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_tensors_that_do_not_fill_the_file_one_by_one_are_refused(
    tmp_path: Path, case: str
) -> None:
    """As in safetensors: with shared bytes, a small file could have any number of tensors."""
    data = LAYOUTS[case]()
    with pytest.raises(SafetensorError):
        load(data)
    said = refusal(tmp_path, data)
    assert "no whole safetensors file" in said
    assert "the next tensor should begin at byte" in said or "its tensors end at byte" in said


def test_no_changed_byte_causes_another_kind_of_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    config = read_config(json.dumps(CONFIG).encode())
    path, kept = tmp_path / "upload", tmp_path / MEMBER
    refused = 0
    for at in rng.integers(0, len(WHOLE), 400).tolist():
        path.write_bytes(WHOLE[:at] + bytes([WHOLE[at] ^ (1 << at % 8)]) + WHOLE[at + 1 :])
        try:
            PeftWeights(path, 0, len(WHOLE)).adapter(config, INFO, 1).write(kept)
        except UserError:
            refused += 1
        kept.unlink(missing_ok=True)
    assert refused > 100


def test_a_file_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    for at in range(0, len(WHOLE), 7):
        assert "no whole safetensors file" in refusal(tmp_path, WHOLE[:at])
