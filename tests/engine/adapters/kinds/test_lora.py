"""LoRA: how it begins, its scale, and the LoRA that another kind's pair is saved as."""

import numpy as np
import pytest

from tuneserve_engine.adapters.kinds.lora import Lora, as_lora
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import UserError

CONFIG = AdapterConfig(rank=4, alpha=6.0, seed=5)
SHAPE = (2, 16, 24)


def test_the_scale_is_alpha_over_rank() -> None:
    assert Lora().scale(CONFIG) == 1.5


def test_a_starts_uniform_in_pefts_range_and_b_at_zero() -> None:
    parts = Lora().initial(CONFIG, 0, SHAPE, None)
    assert (parts["A"].shape, parts["B"].shape) == ((2, 16, 4), (2, 4, 24))
    assert np.abs(parts["A"]).max() <= 1 / 4  # 1 / sqrt(16)
    assert np.abs(parts["A"]).mean() == pytest.approx(1 / 8, rel=0.2)
    assert not parts["B"].any()


def test_the_start_depends_on_the_seed_and_on_the_target() -> None:
    def start(seed: int, index: int) -> bytes:
        config = AdapterConfig(rank=4, alpha=6.0, seed=seed)
        return bytes(Lora().initial(config, index, SHAPE, None)["A"].tobytes())

    assert start(5, 0) == start(5, 0)
    assert len({start(5, 0), start(5, 1), start(6, 0)}) == 3


def test_the_arrays_are_the_pair_and_stay_as_they_are() -> None:
    parts = Lora().initial(CONFIG, 0, SHAPE, None)
    a, b = Lora().lora_pair(parts, None)
    assert a is parts["A"] and b is parts["B"]
    assert Lora().project(parts, None) is parts


def test_an_adapter_without_targets_is_refused() -> None:
    nothing = AdapterConfig(4, 6.0, 0, train_attn=False, train_mlp=False, train_unembed=False)
    with pytest.raises(UserError, match="trains nothing"):
        Lora().validated_options(nothing, {})


def test_the_pair_of_another_kind_is_saved_as_a_lora_of_the_same_scale() -> None:
    osft = AdapterConfig(
        4, 1.0, 9, train_unembed=False, kind="osft", options={"form": "core"}, frozen="abc"
    )
    assert as_lora(osft, 0.5) == AdapterConfig(4, 2.0, 9, train_unembed=False)
