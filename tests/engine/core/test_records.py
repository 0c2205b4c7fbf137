"""The times at which keys and checkpoints end, and the names of records."""

from dataclasses import replace

from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.records import (
    RECORD_NAME,
    RECORD_TYPES,
    CheckpointKind,
    CheckpointRecord,
    KeyRecord,
    SamplerRecord,
    Scope,
)


def test_a_checkpoint_has_expired_from_its_last_second_on() -> None:
    config = AdapterConfig(8, 16.0, 0)
    kept = CheckpointRecord("k", "t", "m", CheckpointKind.TRAINING, "a", "f", "base", config, 1.0)
    assert not kept.has_expired(1e12)
    ends = replace(kept, expires_s=100.0)
    assert [ends.has_expired(now_s) for now_s in (99.9, 100.0, 101.0)] == [False, True, True]


def test_a_key_is_valid_until_it_expires_or_is_revoked() -> None:
    key = KeyRecord("id", "t", "t", "digest", [Scope.TRAIN], 1.0)
    assert key.is_valid(1e12)
    ends = replace(key, expires_s=100.0)
    assert [ends.is_valid(now_s) for now_s in (99.9, 100.0)] == [True, False]
    assert not replace(key, revoked_s=50.0).is_valid(40.0)


def test_an_unnamed_save_has_a_file_and_no_path() -> None:
    base = SamplerRecord("k", "t", "s", "base", 1.0)
    saved = replace(base, file_id="f")
    of_checkpoint = replace(saved, model_path="tinker://m/sampler_weights/a")
    assert [each.is_save for each in (base, saved, of_checkpoint)] == [False, True, False]


def test_every_type_of_record_has_one_name() -> None:
    assert {RECORD_TYPES[name]: name for name in RECORD_TYPES} == RECORD_NAME
    assert len(RECORD_NAME) == len(RECORD_TYPES) == 11
