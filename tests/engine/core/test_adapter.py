"""The targets of an adapter, and its valid hyper-parameters and weights."""

from dataclasses import replace
from typing import Any

import pytest

from tuneserve_engine.core.adapter import (
    ATTENTION,
    MLP,
    PROJECTIONS,
    UNEMBED,
    AdamwParams,
    AdapterConfig,
    check_adam_params,
    check_same_shape,
    check_targets,
)
from tuneserve_engine.core.errors import UserError

LORA = AdapterConfig(8, 16.0, 0)


def test_targets_are_in_storage_order() -> None:
    assert LORA.targets == (*PROJECTIONS, UNEMBED)
    assert replace(LORA, train_attn=False).targets == (*MLP, UNEMBED)
    assert replace(LORA, train_mlp=False, train_unembed=False).targets == ATTENTION


def test_an_adapter_without_targets_is_refused() -> None:
    check_targets(LORA)
    with pytest.raises(UserError, match="trains nothing"):
        check_targets(replace(LORA, train_attn=False, train_mlp=False, train_unembed=False))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"learning_rate": 0.0, "beta1": 0.0, "beta2": 0.0, "eps": 0.0},
        {"learning_rate": 3.4028234663852886e38, "beta1": 0.0},
        {"grad_clip_norm": 1.0, "weight_decay": 0.1},
    ],
)
def test_hyper_parameters_that_torch_accepts_are_accepted(change: dict[str, float]) -> None:
    check_adam_params(AdamwParams(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta1": 1.0}, "beta1 is 1.0; it must be at least 0 and below 1"),
        ({"beta2": -0.1}, "beta2 is -0.1"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0; it must be at least 0"),
        ({"eps": -1e-9}, "eps is -1e-09"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; it must be a finite float32"),
        ({"grad_clip_norm": float("inf")}, "grad_clip_norm is inf"),
        ({"learning_rate": 1e39}, r"learning_rate is 1e\+39; it must be a finite"),
        ({"learning_rate": 1e38, "beta1": 0.9}, "the first step would not be a finite float32"),
        ({"learning_rate": 1e20, "weight_decay": 1e20}, "product must be a finite float32"),
    ],
)
def test_other_hyper_parameters_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_adam_params(AdamwParams(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 4}, "has rank 4 on .*; this model has rank 8 on"),
        ({"train_unembed": False}, "has rank 8 on q_proj, .*, down_proj; this model .*, unembed;"),
        ({"kind": "rslora"}, "is of kind rslora; this model is of kind lora;"),
        ({"kind": "osft", "options": {"form": "core"}}, "is of kind osft form=core;"),
    ],
)
def test_weights_of_another_shape_or_kind_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"tinker://m/weights/a {message}"):
        check_same_shape(LORA, replace(LORA, **change), "tinker://m/weights/a")


def test_weights_of_another_seed_or_scale_fit() -> None:
    check_same_shape(LORA, replace(LORA, alpha=1.0, seed=5, frozen="abc"), "path")
