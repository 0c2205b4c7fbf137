"""Settings of the worker: its directories, its plan and its name."""

import os
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tuneserve_engine.core.backend_options import PlanRequest
from tuneserve_engine.settings.worker import WorkerSettings


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_directories_are_in_the_data_directory_unless_they_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TUNESERVE_COMPILE_CACHE", raising=False)  # the test run's own
    plain = WorkerSettings(data_dir=Path("d"))
    assert (plain.compile_cache_dir, plain.decompositions_dir, plain.pages_dir) == (
        Path("d/compiled"),
        Path("d/decompositions"),
        Path("d/pages"),
    )
    moved = WorkerSettings(compile_cache=Path("c"), decompositions=Path("s"))
    assert (moved.compile_cache_dir, moved.decompositions_dir) == (Path("c"), Path("s"))


def test_the_plan_and_the_backend_have_the_choices_of_the_settings() -> None:
    choices: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_context_tokens": 100,
        "batch_tokens": 200,
        "chunk_tokens": 128,
        "remat": "full",
        "max_rank": 8,
        "request_slots": 4,
        "sample_rows": 2,
        "sample_only": True,
        "devices": "auto",
        "device_memory_bytes": 10**9,
        "adapter_device_bytes": 10**8,
        "adapter_host_bytes": 0,
    }
    assert choices.keys() == {each.name for each in fields(PlanRequest)}
    settings = WorkerSettings(**choices, base_model="someone/model", min_free_bytes=7)
    assert settings.plan_request == PlanRequest(**choices)
    options = settings.backend_options
    assert (options.plan, options.min_free_bytes) == (settings.plan_request, 7)
    assert (options.base_model, options.served_name, options.base_model_revision) == (
        "someone/model",
        "someone/model",
        None,
    )


def test_without_settings_the_planner_has_its_own_defaults() -> None:
    assert WorkerSettings().plan_request == PlanRequest()


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_tokens": 100},
        {"chunk_tokens": 0},
        {"request_slots": 33},
        {"remat": "some"},
        {"tenant_weights": {"a": 0}},
        {"tenant_weights": "a=1"},
        {"point_s": 0},
    ],
)
def test_a_value_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        WorkerSettings(**wrong)


def test_weights_of_tenants_are_a_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESERVE_TENANT_WEIGHTS", '{"a": 2, "b": 0.5}')
    assert WorkerSettings().tenant_weights == {"a": 2.0, "b": 0.5}


def test_a_worker_without_a_name_has_that_of_its_host_and_process() -> None:
    assert WorkerSettings().lease_name == f"{socket.gethostname()}-{os.getpid()}"
    assert WorkerSettings(worker_name="one").lease_name == "one"


GROUP = {"hosts": "gpu-0, gpu-1,gpu-2.lan", "hosts_key": "k" * 16}


@pytest.mark.parametrize(
    ("own", "number"), [("gpu-0", 0), ("gpu-1.example.org", 1), ("gpu-2", 2), ("gpu-2.lan", 2)]
)
def test_a_host_finds_its_number_by_its_name(
    own: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    assert WorkerSettings(**GROUP).own_host_number == number
    assert WorkerSettings(**GROUP, host_number=1).own_host_number == 1
    assert WorkerSettings().own_host_number == 0


def test_a_host_without_a_number_is_told_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(ValueError, match=r"called elsewhere, which is 0 times in hosts .*host_num"):
        _ = WorkerSettings(**GROUP).own_host_number
    twice = WorkerSettings(hosts="elsewhere,elsewhere", hosts_key="k" * 16)
    with pytest.raises(ValueError, match="is 2 times in hosts"):
        _ = twice.own_host_number


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hosts": "gpu-0"}, "hosts names one host, gpu-0; name two or more, or none"),
        ({"host_number": 3}, "host_number is 3; the 3 hosts have 0 to 2"),
        ({"hosts_key": ""}, "hosts_key has 0 characters; hosts need the same secret of at least"),
        ({"hosts_key": "k" * 15}, "hosts_key has 15 characters"),
        ({"hosts_port": 65535}, "less than or equal to 65534"),
        ({"sample_only": True, "rescore_samples": True}, "rescore_samples runs samples through tr"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        WorkerSettings(**(GROUP | wrong))
    assert "k" * 16 not in repr(WorkerSettings(**GROUP))
