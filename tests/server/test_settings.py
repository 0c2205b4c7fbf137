"""The settings of the API process: their origins, their limits, and the values refused."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tuneserve_engine.core.policies import StorePolicy, SweepPolicy, UnusedPolicy
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_server.settings import ApiSettings


def test_options_override_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tuneserve.toml").write_text("port = 1111\npoll_s = 3\nlora_alpha = 8\n")
    monkeypatch.setenv("TUNESERVE_PORT", "2222")
    monkeypatch.setenv("TUNESERVE_POLL_S", "4")
    settings = ApiSettings(port=3333)
    assert (settings.port, settings.poll_s, settings.lora_alpha) == (3333, 4.0, 8.0)


def test_the_defaults_of_limits_are_those_of_the_store() -> None:
    assert ApiSettings().store_policy == StorePolicy()
    assert ApiSettings().sweep_policy == SweepPolicy()
    assert WorkerSettings().store_policy == StorePolicy()


def test_every_limit_of_the_store_is_a_setting() -> None:
    settings = ApiSettings(
        lease_ttl_s=1,
        job_attempts=2,
        max_model_jobs=3,
        max_model_bytes=4,
        max_tenant_jobs=5,
        max_tenant_bytes=6,
        max_tenant_models=7,
        max_waiting_models=8,
        max_server_jobs=9,
        max_server_bytes=10,
        park_s=10,
        sample_ttl_s=110,
        session_ttl_s=120,
        gap_ttl_s=300,
        result_ttl_s=600,
        recording_ttl_s=700,
        max_recording_bytes=10,
    )
    assert settings.store_policy == StorePolicy(1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert settings.sweep_policy == SweepPolicy(120.0, 10.0, 110.0, 300.0, 600.0, 700.0, 10)


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError):
        ApiSettings().port = 1


def test_every_setting_is_described() -> None:
    assert all(field.description for field in ApiSettings.model_fields.values())


def test_the_rules_for_unused_files_are_settings() -> None:
    settings = ApiSettings(quarantine_s=5, max_unused_share=0.5)
    assert settings.unused_policy == UnusedPolicy(5.0, 0.5)


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:99"), ("::1", "http://[::1]:99"), ("box", "http://box:99")],
)
def test_the_address_of_a_host_has_brackets_if_it_is_ipv6(host: str, url: str) -> None:
    assert ApiSettings(host=host, port=99).url == url


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("localhost", True), ("127.1.2.3", True), ("::1", True), ("0.0.0.0", False), ("box", False)],
)
def test_only_a_loopback_address_or_a_trusted_network_may_be_open(
    host: str, is_loopback: bool
) -> None:
    settings = ApiSettings(host=host)
    assert (settings.is_loopback, settings.may_be_open) == (is_loopback, is_loopback)
    assert ApiSettings(host=host, trusted_network=True).may_be_open


def test_lists_are_written_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESERVE_ALLOWED_HOSTS", "box.lan, *.example.org,")
    monkeypatch.setenv("TUNESERVE_TRUSTED_PROXIES", "10.0.0.0/8")
    settings = ApiSettings()
    assert settings.allowed_hosts == ["box.lan", "*.example.org"]
    assert settings.trusted_proxies == ["10.0.0.0/8"]


def test_budgets_are_written_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESERVE_TENANT_BUDGETS", '{"t-1": 60, "t-2": 0.5}')
    assert ApiSettings().tenant_budgets == {"t-1": 60.0, "t-2": 0.5}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"allowed_hosts": ["http://box.lan"]}, "'http://box.lan' is not a host name"),
        ({"allowed_hosts": ["a.*"]}, "is not a host name"),
        ({"trusted_proxies": ["10.0.0.1/8"]}, "10.0.0.1/8 has host bits set"),
        ({"tenant_budgets": {"t": -1}}, "greater than or equal to 0"),
        ({"port": 0}, "greater than or equal to 1"),
        ({"keep_alive_s": 74}, "greater than or equal to 75"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        ApiSettings(**given)


def test_a_tenants_memory_holds_the_largest_body() -> None:
    memory = {"tenant_body_memory_bytes": 800, "body_memory_bytes": 900}
    assert ApiSettings(**memory, max_body_bytes=100, max_decompressed_bytes=300)
    for sizes, needed in (((101, 300), 808), ((100, 303), 808)):
        limits = dict(zip(("max_body_bytes", "max_decompressed_bytes"), sizes, strict=True))
        with pytest.raises(ValidationError, match=rf"has 800 bytes; .* needs {needed};"):
            ApiSettings(**memory, **limits)
    with pytest.raises(ValidationError, match="a tenant has 700 bytes"):
        ApiSettings(
            **{**memory, "body_memory_bytes": 700}, max_body_bytes=100, max_decompressed_bytes=300
        )
