"""The facts about a base model: its parameters, its shapes and its revision."""

from pathlib import Path

import pytest

from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model_info import base_model_info
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.shapes import StaticShapes

CONFIG = ModelConfig("llama", 11, 4, 2, 2, 1, 2, 6, 64, eos_token_ids=(7,))
"""Hidden 4, two layers, 2 query heads and 1 key head of 2, intermediate 6, 11 tokens."""


def info(folder: str, context: int = 32) -> BaseModelInfo:
    shapes = StaticShapes(context, rank_buckets=(4, 16))
    return base_model_info(Path(folder), CONFIG, shapes, "served", ("here", "there"))


def test_the_parameters_are_those_that_every_token_is_multiplied_by() -> None:
    found = info("/models/own")
    layer = 4 * 4 + 2 * (4 * 2) + 4 * 4 + 3 * (4 * 6)
    assert found.parameters == 2 * layer + 4 * 11 == 284
    assert dict(found.target_shapes) == {
        "q_proj": (2, 4, 4),
        "k_proj": (2, 4, 2),
        "v_proj": (2, 4, 2),
        "o_proj": (2, 4, 4),
        "gate_proj": (2, 4, 6),
        "up_proj": (2, 4, 6),
        "down_proj": (2, 6, 4),
        "unembed": (4, 11),
    }


def test_the_context_and_the_rank_are_those_of_the_static_shapes() -> None:
    found = info("/models/own")
    assert (found.context_length, found.max_rank) == (32, 16)
    assert (found.name, found.architecture, found.vocab_size) == ("served", "llama", 11)
    assert (found.tokenizer_id, found.client_tokenizer_id) == ("here", "there")
    assert found.eos_token_ids == (7,)


def test_only_a_model_in_the_hubs_cache_has_a_revision() -> None:
    assert info("/cache/models--a--b/snapshots/abc").revision == "abc"
    assert info("/models/snapshots/abc").revision == ""


def test_a_context_longer_than_the_models_is_refused() -> None:
    assert info("/models/own", 64).context_length == 64
    with pytest.raises(ValueError, match="context of 65 tokens; served was built for 64; lower it"):
        info("/models/own", 65)
