"""The memory of each adapter kind in the plan and in refusals, computed by hand."""

from dataclasses import replace

import pytest

from tests.engine.conftest import STATIC_SHAPES, TINY
from tuneserve_engine.adapters import kinds
from tuneserve_engine.adapters.kinds import KINDS, adapter_bytes, decomposition_bytes
from tuneserve_engine.backend.jax.adapters.arrays import target_shapes
from tuneserve_engine.backend.jax.adapters.room import AdapterRoom
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import UserError

SHAPES = {"q_proj": (3, 10, 20), "o_proj": (3, 12, 12), "unembed": (10, 50)}
"""[L, D, F]."""
PAIRS = 3 * (10 + 20) + 3 * (12 + 12) + (10 + 50)
OSFT = AdapterConfig(4, 0.0, 0, train_unembed=False, kind="osft", options={"form": "factors"})


@pytest.mark.parametrize(
    ("form", "own"),
    [
        ("factors", 3 * (10 + 20 + 1) + 3 * (12 + 12 + 1)),
        ("short_fixed", 3 * 20 + 3 * 12),
        ("core", 3 * 4 + 3 * 4),
    ],
)
def test_an_osft_adapter_has_three_copies_of_its_numbers_and_a_gradient_of_the_pair(form, own):
    assert adapter_bytes(KINDS["osft"][form], SHAPES, 4) == 4 * 4 * (3 * own + PAIRS)


def test_a_lora_has_four_copies_of_its_pair():
    assert adapter_bytes(KINDS["lora"][""], SHAPES, 4) == 4 * 4 * 4 * PAIRS


def test_shared_weights_are_the_longer_sides_basis_and_the_weak_directions_of_the_other():
    long = 3 * (20 * 10 + 4 + 4 * 10)  # u of all ten directions, s and v of four
    square = 3 * (12 * 4 + 4 + 4 * 12)
    assert decomposition_bytes(SHAPES, 4) == 4 * (long + square)


def test_a_rank_beyond_the_servers_is_refused_with_the_arithmetic():
    asked = replace(OSFT, train_attn=True, train_mlp=False, options={"unfreeze_ratio": "0.9"})
    shapes = {**SHAPES, "k_proj": (3, 10, 20), "v_proj": (3, 10, 20)}
    with pytest.raises(UserError) as refused:
        kinds.validated(asked, shapes, 8)
    told = str(refused.value)
    assert "rank 11" in told and "1 to 8" in told and "4 bytes a number" in told and "MiB" in told
    assert refused.value.no_room


def test_a_device_without_room_for_shared_weights_refuses_the_first_adapter(base_model):
    shapes = target_shapes(ModelConfig.from_hf(TINY))
    room = AdapterRoom(device_bytes=adapter_bytes(KINDS["lora"][""], shapes, 8))
    backend = JaxBackend(
        str(base_model), name="tiny", tokenizer_id="none", static_shapes=STATIC_SHAPES, room=room
    )
    backend.create_adapter("lora", AdapterConfig(8, 1.0, 0))
    with pytest.raises(
        UserError, match=r"need .* share and .* for adapters; choose a lower rank or lora"
    ):
        backend.create_adapter("osft", replace(OSFT, rank=8, options={}))
