"""The adapter kinds: ranks, scales, refusals, and the LoRA pairs that their arrays make."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from tests.engine.adapters.osft_case import RANK, SQUARE, TALL, WIDE, base_of, config_of
from tuneserve_engine.adapters.kinds import KINDS, kind_of, rslora, validated
from tuneserve_engine.adapters.kinds.base import adapter_bytes, decomposition_bytes, parameters
from tuneserve_engine.adapters.kinds.osft import Osft
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import UserError

EVERY = [kind for forms in KINDS.values() for kind in forms.values()]
SHAPES = {
    "q_proj": (2, 16, 24),
    "k_proj": (2, 16, 12),
    "v_proj": (2, 16, 12),
    "o_proj": (2, 24, 16),
    "gate_proj": (2, 16, 32),
    "up_proj": (2, 16, 32),
    "down_proj": (2, 32, 16),
    "unembed": (16, 61),
}
"""[L, D, F]. The fewest directions are 12, the most 16."""


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: f"{kind.name}-{kind.program}")
@pytest.mark.parametrize("shape", [WIDE, SQUARE, TALL])
def test_every_kinds_arrays_have_the_declared_shapes_and_make_a_pair(kind, shape: tuple[int, int]):
    base = base_of(shape)
    frozen = base.frozen(RANK) if kind.needs_decomposition else None
    config = AdapterConfig(RANK, 1.0, 0, kind=kind.name)
    own = kind.initial(config, 0, base.shape, frozen)
    told = kind.parameter_shapes(base.shape, kind.rank(config, base.shape))
    assert {name: part.shape for name, part in own.items()} == told
    assert {part.dtype for part in own.values()} == {np.dtype(np.float32)}
    a, b = kind.lora_pair(own, frozen)
    assert (a.shape, b.shape) == ((2, shape[1], RANK), (2, RANK, shape[0]))
    np.testing.assert_array_equal(a @ b, np.zeros((2, shape[1], shape[0])))
    projected = kind.project(own, frozen)
    assert {name: part.shape for name, part in projected.items()} == told


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: f"{kind.name}-{kind.program}")
def test_every_kind_is_found_by_its_name_and_form(kind):
    options = {"form": kind.form} if isinstance(kind, Osft) else {}
    config = AdapterConfig(8, 1.0, 0, kind=kind.name, options=options)
    assert kind_of(config) is kind


def test_osft_without_a_form_trains_the_factors():
    assert kind_of(config_of(8)).program == "osft_factors"


def test_an_adapter_kind_fits_in_a_short_file():
    assert len(Path(rslora.__file__).read_text().splitlines()) < 150


@pytest.mark.parametrize("kind", ["lora", "rslora"])
@pytest.mark.parametrize(("rank", "alpha"), [(8, 16.0), (3, 32.0), (64, 1.5)])
def test_the_scale_equals_pefts(kind: str, rank: int, alpha: float):
    peft = LoraConfig(
        r=rank, lora_alpha=alpha, use_rslora=kind == "rslora", target_modules=["linear"]
    )
    model = torch.nn.Module()
    model.linear = torch.nn.Linear(4, 4)
    scaling = inject_adapter_in_model(peft, model).linear.scaling["default"]
    config = AdapterConfig(rank, alpha, 0, kind=kind)
    assert kind_of(config).scale(config) == pytest.approx(scaling)


@pytest.mark.parametrize(
    ("ratio", "directions", "rank"),
    [
        ("0.9", 1000, 900),  # int(1000 * (1 - 0.9)) is 99: 901 would be trained
        ("0.1", 1000, 100),
        ("0.125", 2048, 256),
        ("0.5", 3, 2),
        ("0.0001", 64, 1),
        ("0.9999", 64, 63),
        ("1e-3", 2000, 2),
    ],
)
def test_a_ratio_is_rounded_to_trained_directions(ratio: str, directions: int, rank: int):
    config = config_of(1, unfreeze_ratio=ratio)
    assert Osft("factors").rank(config, (2, directions, 2 * directions)) == rank
    assert Osft("factors").rank(config, (2, 2 * directions, directions)) == rank


def test_a_rank_is_used_on_large_targets_and_lowered_on_small_ones():
    config = validated(config_of(14), SHAPES, 32)
    assert config.rank == 14
    ranks = [Osft("factors").rank(config, SHAPES[name]) for name in config.targets]
    assert ranks == [14, 11, 11, 14, 14, 14, 14]


def test_a_ratio_is_stored_as_the_highest_rank_of_its_targets():
    config = validated(config_of(1, unfreeze_ratio="0.25"), SHAPES, 32)
    assert config.rank == 4
    ranks = [Osft("factors").rank(config, SHAPES[name]) for name in config.targets]
    assert ranks == [4, 3, 3, 4, 4, 4, 4]


def test_osft_leaves_the_unembedding_alone():
    config = AdapterConfig(4, 1.0, 0, kind="osft", train_unembed=True)
    assert "unembed" not in validated(config, SHAPES, 32).targets
    for kind in KINDS["osft"].values():
        assert kind.parameter_shapes(SHAPES["unembed"], 4) == {}


@pytest.mark.parametrize("ratio", ["0", "0.0", "-0.5", "1", "1.0", "2", "nan", "inf", "abc", ""])
def test_a_ratio_that_trains_or_freezes_nothing_is_refused(ratio: str):
    with pytest.raises(UserError, match=r"unfreeze_ratio is '.*'; it must be a number above 0.*1"):
        validated(config_of(1, unfreeze_ratio=ratio), SHAPES, 32)


@pytest.mark.parametrize("rank", [16, 17, 1000])
def test_a_rank_of_all_directions_is_refused(rank: int):
    with pytest.raises(UserError, match=rf"rank is {rank}, and no weight .* 16 .*at most 15"):
        validated(config_of(rank), SHAPES, 2000)


def test_osft_of_no_target_is_refused():
    nothing = AdapterConfig(4, 1.0, 0, False, False, True, kind="osft")
    with pytest.raises(UserError, match="trains nothing: train_attn and train_mlp are both false"):
        validated(nothing, SHAPES, 32)


@pytest.mark.parametrize("kind", ["lora", "rslora"])
def test_lora_of_no_target_is_refused(kind: str):
    with pytest.raises(UserError, match="trains nothing"):
        validated(AdapterConfig(4, 1.0, 0, False, False, False, kind=kind), SHAPES, 32)


def test_targets_of_unknown_shape_are_refused():
    with pytest.raises(UserError, match="no worker has told the shape of q_proj"):
        validated(config_of(4), {}, 32)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("dora", {}, "'dora' is no kind of adapter; this server has lora, rslora, osft"),
        ("osft", {"form": "dense"}, "form is 'dense'; .* osft have factors, short_fixed, core"),
        ("osft", {"form": ""}, "form is ''; .* osft have factors"),
        ("osft", {"ratio": "1"}, "'ratio' is no option of .* osft; it has unfreeze_ratio, form"),
        ("lora", {"form": "core"}, "'form' is no option of adapters of kind lora; it has none"),
        ("rslora", {"unfreeze_ratio": "0.5"}, "'unfreeze_ratio' is no option of .* it has none"),
    ],
)
def test_unknown_kinds_forms_and_options_are_refused(
    kind: str, options: dict[str, str], message: str
):
    config = AdapterConfig(4, 1.0, 0, kind=kind, options=options, train_unembed=False)
    with pytest.raises(UserError, match=message):
        validated(config, SHAPES, 32)


def test_a_rank_without_room_is_refused_with_the_arithmetic():
    """At rank 12, per layer: U and V of 12 * (D + F) and S of 12, times 3 for the moments, and the
    pair's gradient once, 4 bytes each.
    """
    sizes = [(i, o) for layers, i, o in list(SHAPES.values())[:7]]
    own = sum(2 * (12 * (i + o) + 12) for i, o in sizes)
    pairs = sum(2 * 12 * (i + o) for i, o in sizes) + 12 * (16 + 61)
    expected = 4 * (3 * own + pairs)
    config = config_of(1, unfreeze_ratio="0.75")
    assert adapter_bytes(kind_of(config), SHAPES, 12) == expected
    with pytest.raises(UserError) as refused:
        validated(config, SHAPES, 8)
    text = str(refused.value)
    assert "rank 12; this server takes 1 to 8" in text
    assert f"an adapter takes {expected / 2**20:.1f} MiB" in text
    assert f"share {decomposition_bytes(SHAPES, 12) / 2**20:.1f} MiB" in text
    assert "choose a lower rank or unfreeze_ratio" in text


@pytest.mark.parametrize(
    ("form", "numbers"),
    [("factors", 6 * 4 + 4 + 4 * 10), ("short_fixed", 10 * 4), ("core", 4 * 4)],
)
def test_trained_numbers_are_counted_over_all_layers_and_targets(form: str, numbers: int):
    config = AdapterConfig(4, 1.0, 0, True, False, False, kind="osft", options={"form": form})
    shapes = {name: (2, 10, 6) for name in config.targets}
    assert parameters(kind_of(config), config, shapes) == 4 * 2 * numbers
