"""``tuneserve plan``: its table, its JSON, and the plans that it refuses."""

import json
import os
import re
import sys
from unittest import mock

import pytest
from typer.testing import CliRunner, Result

from tests.server.cli.test_main import refusal, tuneserve
from tuneserve_engine.backend.jax.memory import report
from tuneserve_server.cli import main as cli


def planned(*arguments: str, **environment: str) -> Result:
    """Run ``tuneserve plan`` without its process, which would import JAX anew."""

    def execute(_: str, command: list[str], environment: dict[str, str]) -> None:
        assert command[1:3] == ["-m", report.__name__]
        with (
            mock.patch.dict(os.environ, environment, clear=True),
            mock.patch.object(sys, "argv", command[2:]),
        ):
            raise SystemExit(report.main())

    with mock.patch.object(os, "execve", execute):
        return CliRunner().invoke(cli.app, ["plan", *arguments], env=environment)


def test_the_plan_shows_the_use_of_the_memory() -> None:
    result = tuneserve("plan", "--device-memory-bytes", str(2**30), "--max-rank", "32")
    assert result.returncode == 0, result.stderr
    memory, kinds = result.stdout.split("\n\nsize of an adapter on the device: ")
    first, *_, last = memory.splitlines()
    assert first == "tuneserve/tiny, float32, on cpu"
    assert last.split() == ["total", "1.00", "GiB"]
    assert re.search(r"^lora +1\.33 MiB of rank 8, 5\.31 MiB of rank 32$", kinds, re.M)
    assert re.search(r"^osft core +[\d.]+ KiB of rank 8, ", kinds, re.M)
    assert re.search(r"^all adapters of kind osft share .* on the device, .* on disk", kinds, re.M)
    assert "base weights" in result.stdout and "918,912 parameters * 4 bytes" in result.stdout
    assert "requests in one batch: 32 up to rank 8, 8 up to rank 32\n" in result.stdout


def test_the_plan_names_the_kinds_without_room_beside_their_shared_weights() -> None:
    """Two of rank 128 take 39.2 MiB, their shared weights 4.8, and 43 are available."""
    room = str(43 * 2**20)
    result = planned("--adapter-device-bytes", room)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^osft factors .*; no room for rank 8, 32, 128$", result.stdout, re.M)
    assert result.stdout.count("no room") == 1
    kinds = json.loads(planned("--json", "--adapter-device-bytes", room).stdout)["kinds"]
    assert kinds["osft factors"]["refused_ranks"] == [8, 32, 128]
    assert kinds["osft short_fixed"]["refused_ranks"] == []


def test_programs_can_read_the_plan() -> None:
    result = planned("--json", "--batch-tokens", "8192", TUNESERVE_REMAT="full")
    found = json.loads(result.stdout)
    asked = {"device": "cpu", "batch_tokens": 8192, "remat": "full", "context_tokens": 2048}
    assert found.items() >= asked.items()
    assert sum(line["bytes"] for line in found["lines"]) == found["device_bytes"]
    lora = found["kinds"]["lora"]["bytes_by_rank"]
    assert lora["32"] == 4 * lora["8"]


def test_a_plan_for_an_absent_gpu_takes_its_memory_and_dtype() -> None:
    """By hand: three quarters of 81,559 MiB, which is JAX's share."""
    found = json.loads(planned("--json", "--device", "h100").stdout)
    assert (found["device"], found["dtype"]) == ("gpu", "bfloat16")
    assert found["device_bytes"] == 81_559 * 2**20 * 3 // 4
    whole = planned("--device", "h200", XLA_PYTHON_CLIENT_MEM_FRACTION="0.5")
    assert re.search(r"^total +70\.20 GiB$", whole.stdout, re.M)


@pytest.mark.parametrize("share", ["0", "1.5", "most"])
def test_a_share_of_a_gpu_that_is_none_is_refused(share: str) -> None:
    result = planned("--device", "h200", XLA_PYTHON_CLIENT_MEM_FRACTION=share)
    assert result.exit_code == 2
    assert f"XLA_PYTHON_CLIENT_MEM_FRACTION is '{share}'; " in result.stderr
    assert "above 0 and up to 1" in result.stderr


def test_a_plan_for_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    result = planned("--device", "h20")
    assert result.exit_code == 2
    assert "'h20'; it must be" in result.stderr and "h200" in result.stderr


def test_an_impossible_plan_is_refused_with_the_arithmetic() -> None:
    result = planned("--device-memory-bytes", "1000000")
    assert result.exit_code == 2
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert "memory, and 976.56 KiB is available" in result.stderr
    assert "  base weights: 3.51 MiB\n" in result.stderr


def test_a_plan_for_a_missing_base_model_is_refused() -> None:
    result = planned("--base-model", "./nowhere")
    assert result.exit_code == 2
    assert "'./nowhere': no such directory" in result.stderr


@pytest.mark.parametrize("value", ["0", "100", "32"])
def test_a_chunk_that_is_not_a_multiple_of_a_block_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"chunk_tokens is '{value}'" in refusal("plan", "--chunk-tokens", value, monkeypatch)
