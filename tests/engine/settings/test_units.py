"""Sizes and durations in the settings, by hand."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tuneserve_engine.settings.units import bytes_of, plain, seconds_of
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_server.settings import ApiSettings


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1048576", 1_048_576),
        ("80GB", 80_000_000_000),
        ("80 gb", 80_000_000_000),
        ("80GiB", 85_899_345_920),
        ("1.5MiB", 1_572_864),
        ("80G", 80_000_000_000),
    ],
)
def test_a_size_has_a_decimal_or_a_binary_unit(text: str, count: int) -> None:
    assert bytes_of(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("0.25", 0.25), ("90s", 90), ("15m", 900), ("1h30m", 5400), ("250ms", 0.25)],
)
def test_a_duration_has_units_or_is_in_seconds(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_seven_days_are_a_week_of_seconds() -> None:
    assert seconds_of("7d") == 604_800.0


@pytest.mark.parametrize("text", ["", "soon", "15x", "15m!", "m15", "-15m"])
def test_any_other_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="such as 90s, 15m or 1h30m"):
        seconds_of(text)


@pytest.mark.parametrize("text", ["", "much", "80XB", "GB"])
def test_any_other_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="such as 512MiB, 80GB or"):
        bytes_of(text)


def test_the_name_of_a_setting_says_which_unit_it_takes() -> None:
    assert plain("max_body_bytes", "1kB") == 1000
    assert plain("poll_s", "1m") == 60
    assert plain("base_model_name", "80GB") == "80GB"


def test_settings_take_sizes_and_durations_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tuneserve.toml").write_text('park_s = "15m"\nmax_body_bytes = "16MiB"\nsweep_s = 7\n')
    monkeypatch.setenv("TUNESERVE_SESSION_TTL_S", "7d")
    settings = ApiSettings(min_free_bytes="1.5GiB", keep_alive_s="2m")  # type: ignore[arg-type]
    assert (settings.park_s, settings.max_body_bytes, settings.sweep_s) == (900, 16 * 2**20, 7)
    assert (settings.session_ttl_s, settings.min_free_bytes) == (604_800, 1_610_612_736)
    assert settings.keep_alive_s == 120
    assert isinstance(settings.max_body_bytes, int)
    worker = WorkerSettings(device_memory_bytes="80GB")  # type: ignore[arg-type]
    assert worker.device_memory_bytes == 80_000_000_000


def test_limits_hold_for_durations_too() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 120"):
        ApiSettings(session_ttl_s="1m")  # type: ignore[arg-type]
