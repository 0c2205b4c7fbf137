"""The configuration of a PEFT adapter: its rank, its scale, and the field at fault."""

import json
import math
from typing import Any

import pytest

from tuneserve_engine.adapters.peft_config import PeftConfig, read_config
from tuneserve_engine.core.errors import UserError

LORA: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 16,
    "lora_alpha": 32,
    "base_model_name_or_path": "someone/model",
}


def read(**changes: Any) -> PeftConfig:
    return read_config(json.dumps(LORA | changes).encode())


def test_alpha_by_rank_is_the_scale_of_peft() -> None:
    """The scale of rsLoRA is alpha by the root of the rank: 32 / 4 = 8 = 128 / 16."""
    assert read() == PeftConfig("someone/model", 16, 32.0)
    stable = read(use_rslora=True)
    assert stable.alpha == 128.0
    assert stable.alpha / stable.rank == 32 / math.sqrt(16)


def test_fields_without_effect_on_the_numbers_are_accepted() -> None:
    harmless = {"lora_dropout": 0.1, "task_type": "CAUSAL_LM", "revision": "abc"}
    unset = {"use_dora": False, "rank_pattern": {}, "modules_to_save": None, "new_field": ""}
    assert read(**harmless, **unset) == read()
    assert read(base_model_name_or_path=None).base_model == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, 'peft_type = "IA3"; only "LORA"'),
        ({"use_dora": True}, "use_dora = true; DoRA scales"),
        ({"rank_pattern": {"q_proj": 4}}, "all modules must have one rank"),
        ({"new_field": 1}, "new_field = 1; this server imports plain LoRA"),
        ({"bias": "all"}, 'bias = "all"; biases are not trained here'),
        ({"init_lora_weights": "pissa"}, "that start changes the base model's weights"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"r": 0}, "r = 0; it must be a whole number above 0"),
        ({"r": True}, "r = true"),
        ({"r": 2**20 + 1}, "no adapter has a rank above 1048576"),
        ({"lora_alpha": 0}, "lora_alpha = 0"),
        ({"lora_alpha": 2.0**101}, "lora_alpha = 2.53"),
        ({"lora_alpha": None}, "lora_alpha = null"),
        ({"x" * 90: 1}, f"{'x' * 80}… = 1"),
    ],
)
def test_a_field_that_would_change_the_numbers_is_named(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        read(**change)
    assert f"adapter_config.json has {next(iter(change))[:80]}" in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b'"LORA"'])
def test_a_text_that_is_not_a_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(UserError, match="is no JSON"):
        read_config(text)
