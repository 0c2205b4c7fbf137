"""The commands that bodies become, and the values that are refused with their limit."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.fake_backend import FAKE_INFO
from tuneserve_client.wire.types import (
    AdamParams,
    CreateSessionRequest,
    OptimizerConfig,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import LoadWeights, SaveWeights
from tuneserve_engine.core.records import CheckpointKind, CheckpointRecord, ModelRecord
from tuneserve_server.commands import common

CONFIG = AdapterConfig(2, 32.0, 0, train_mlp=False, train_unembed=False)
MODEL = ModelRecord("s:train:0", "t", "s", "base", CONFIG, 1.0, 2.0)
KEY = {"model_id": "s:train:0", "seq_id": 3}


def checkpoint(config: AdapterConfig = CONFIG) -> CheckpointRecord:
    path = "tinker://s:train:0/weights/a"
    kind = CheckpointKind.TRAINING
    return CheckpointRecord(path, "t", "s:train:0", kind, "a", "f-1", "base:x", config, 1.0)


def save(**fields: Any) -> SaveWeights:
    return common.save_training(MODEL, SaveWeightsRequest(**KEY, **fields))


# --- numbers and texts --------------------------------------------------------------------------


def test_a_seed_has_63_bits() -> None:
    assert [common.checked_seed(seed) for seed in (0, 2**63 - 1)] == [0, 2**63 - 1]
    for seed in (-1, 2**63):
        with pytest.raises(UserError, match=f"seed is {seed}; it must be 0 to"):
            common.checked_seed(seed)
    drawn = {common.checked_seed(None) for _ in range(20)}
    assert len(drawn) == 20 and all(0 <= seed < 2**63 for seed in drawn)


def test_metadata_has_up_to_64_kib_of_utf_8() -> None:
    assert common.metadata(None) == {}
    largest = {"é": "x" * (64 * 1024 - 2)}
    assert common.metadata(largest) is largest
    with pytest.raises(UserError, match="user_metadata has 65537 bytes; the limit is 65536"):
        common.metadata({"é": "x" * (64 * 1024 - 1)})


def test_all_texts_of_a_session_count_together() -> None:
    session = CreateSessionRequest(
        tags=["ab", "c"], user_metadata={"k": "v"}, sdk_version="1", display_name="é"
    )
    common.check_session_metadata(session, 8)  # 3 + 2 + 1 + 2
    with pytest.raises(UserError, match="this session have 8 bytes; the limit is 7"):
        common.check_session_metadata(session, 7)


def test_adamw_is_the_only_optimizer() -> None:
    common.check_optimizer(None)
    common.check_optimizer(OptimizerConfig())
    with pytest.raises(UserError, match="only 'adamw'"):
        common.check_optimizer(OptimizerConfig(type="sgd"))


def test_the_parameters_of_a_step_keep_their_values() -> None:
    params = AdamParams(learning_rate=0.5, beta1=0.0, grad_clip_norm=-1.0)
    found = common.adam_params(OptimStepRequest(**KEY, adam_params=params))
    assert found == AdamwParams(0.5, 0.0, 0.95, 1e-12, 0.0, 0.0)  # not above 0: no clipping


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1.0),
        ("eps", -1.0),
        ("weight_decay", -1.0),
        ("beta1", 1.0),
        ("beta2", -0.5),
    ],
)
def test_a_parameter_out_of_range_is_named(name: str, value: float) -> None:
    request = OptimStepRequest(**KEY, adam_params=AdamParams(**{name: value}))
    with pytest.raises(UserError, match=f"adam_params.{name} is {value}; it must be at least 0"):
        common.adam_params(request)


def test_a_step_without_parameters_is_refused() -> None:
    with pytest.raises(UserError, match="adam_params is missing"):
        common.adam_params(OptimStepRequest(**KEY))


# --- checkpoints --------------------------------------------------------------------------------


def test_a_checkpoint_expires_after_an_hour_to_ten_years() -> None:
    assert common.checked_ttl(None, 1000.0) is None
    assert common.checked_ttl(3600, 1000.0) == 4600.0
    assert common.checked_ttl(315_360_000, 1000.0) == 315_361_000.0
    for ttl_s in (3599, 315_360_001):
        with pytest.raises(UserError, match=f"ttl_seconds is {ttl_s}; it must be 3600"):
            common.checked_ttl(ttl_s, 1000.0)


def test_a_save_names_the_checkpoint_that_it_makes() -> None:
    found = save(path="a", overwrite=True, user_metadata={"k": "v"})
    made = found.checkpoint
    assert made is not None and made.key == "tinker://s:train:0/weights/a"
    assert (made.tenant, made.parent, made.base_model) == ("t", "s:train:0", "base")
    assert (made.config, made.user_metadata, made.expires_s) == (CONFIG, {"k": "v"}, None)
    assert (found.kind, found.overwrite) == (CheckpointKind.TRAINING, True)
    assert found.file_id == made.file_id != save(path="a").file_id


def test_a_save_without_a_name_is_refused() -> None:
    with pytest.raises(UserError, match="path is missing"):
        save()


def test_an_unnamed_sampler_save_makes_a_sampling_session() -> None:
    unnamed = SaveWeightsForSamplerRequest(**KEY, sampling_session_seq_id=5)
    found = common.save_for_sampler(MODEL, unnamed)
    assert found.checkpoint is None and found.sampler is not None
    assert (found.sampler.key, found.sampler.model_id) == ("s:sample:5", "s:train:0")
    assert found.sampler.file_id == found.file_id
    named = SaveWeightsForSamplerRequest(**KEY, path="b", sampling_session_seq_id=5)
    made = common.save_for_sampler(MODEL, named).checkpoint
    assert made is not None and made.key == "tinker://s:train:0/sampler_weights/b"
    with pytest.raises(UserError, match="path and sampling_session_seq_id are both missing"):
        common.save_for_sampler(MODEL, SaveWeightsForSamplerRequest(**KEY))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["age1a", "ssh-rsa"], r"age_encryption_recipients\[1\] is not an age public key"),
        (["age1" + "x" * 125], r"age_encryption_recipients\[0\] is not"),
        (["age1a"] * 33, "has 33 keys; the limit is 32"),
    ],
)
def test_an_export_is_encrypted_for_up_to_32_age_keys(keys: list[str], told: str) -> None:
    def export(recipients: list[str]) -> SaveWeights:
        request = SaveWeightsExternalRequest(**KEY, path="e", age_encryption_recipients=recipients)
        return common.save_external(MODEL, request)

    assert export(["age1a", "age1b"]).age_recipients == ("age1a", "age1b")
    with pytest.raises(UserError, match=told):
        export(keys)


def test_the_expected_size_of_a_save_counts_weights_and_two_moments() -> None:
    shapes = dict(FAKE_INFO.target_shapes)
    layers, inputs, outputs = shapes["q_proj"]
    # Four square projections at rank 2, in float32.
    weights = 4 * layers * 2 * (inputs + outputs) * 4
    sized = common.with_size(save(path="a"), CONFIG, FAKE_INFO).checkpoint
    assert sized is not None and sized.size_bytes == 3 * weights
    request = SaveWeightsForSamplerRequest(**KEY, sampling_session_seq_id=5)
    unnamed = common.save_for_sampler(MODEL, request)
    sampler = common.with_size(unnamed, CONFIG, FAKE_INFO).sampler
    assert sampler is not None and sampler.size_bytes == weights
    assert common.with_size(unnamed, CONFIG, None) is unnamed
    # A trained core of OSFT has rank * rank numbers; its sampler weights are a whole LoRA.
    core = replace(CONFIG, kind="osft", options={"form": "core"})
    trained = common.with_size(save(path="a"), core, FAKE_INFO).checkpoint
    assert trained is not None and trained.size_bytes == 3 * 4 * layers * 2 * 2 * 4
    exported = common.with_size(unnamed, core, FAKE_INFO).sampler
    assert exported is not None and exported.size_bytes == weights


def test_a_load_that_creates_a_model_has_the_checkpoints_adapter() -> None:
    kept = checkpoint()
    assert common.load(kept, optimizer=True) == LoadWeights("f-1", kept.key, True)
    assert common.load(kept, optimizer=False, creates=True).config == CONFIG


def test_a_checkpoint_fits_its_own_base_model_under_any_suffix() -> None:
    common.check_base_model(checkpoint(), "base")
    common.check_base_model(checkpoint(), "base:y")
    with pytest.raises(UserError, match="was trained on 'base:x' and cannot be used with 'other'"):
        common.check_base_model(checkpoint(), "other")


def test_a_model_made_from_a_checkpoint_keeps_its_kind_and_options() -> None:
    osft = checkpoint(AdapterConfig(2, 1.0, 0, kind="osft", options={"unfreeze_ratio": "0.5"}))
    for asked in ({}, {"adapter": "osft"}, {"adapter": "osft", "unfreeze_ratio": "0.50"}):
        common.check_adapter(osft, asked)
    with pytest.raises(UserError, match=r"asks for unfreeze_ratio '0.25'; .* has '0.5'"):
        common.check_adapter(osft, {"adapter": "osft", "unfreeze_ratio": "0.25"})
    with pytest.raises(UserError, match=r"asks for form 'core'; .* has 'none'"):
        common.check_adapter(osft, {"adapter": "osft", "form": "core"})
    with pytest.raises(UserError, match=r"asks for adapter 'osft'; .* has 'lora'"):
        common.check_adapter(checkpoint(), {"adapter": "osft"})
