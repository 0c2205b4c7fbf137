"""Real processes on one machine compute what one process with as many devices computes."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.backend.jax.test_mesh import BIASED, bits, trained
from tests.engine.conftest import write_base_model
from tests.faults.test_kills_hosts import KEY, free_ports
from tests.support.nightly import at_night
from tuneserve_engine.backend.base import SamplingRequest
from tuneserve_engine.backend.hosts.meeting import Hosts
from tuneserve_engine.backend.jax.hosts import agreed_terms, follow, lead
from tuneserve_engine.backend.jax.memory.planner import Device, plan
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.core.backend_options import BackendOptions, PlanRequest

ROOT = Path(__file__).parents[4]
WAIT_S = 300
FOUR_HEADS = BIASED | {"num_key_value_heads": 4}


LONG = FOUR_HEADS | {"max_position_embeddings": 2048}


def options(model: str, folder: str, devices: int, long_bytes: int | None = None) -> BackendOptions:
    """Return options; with ``long_bytes`` of memory, devices divide a datum of 2,048 tokens."""
    asked = PlanRequest(
        max_context_tokens=24, batch_tokens=128, chunk_tokens=64, max_rank=8, devices=devices
    )
    if long_bytes is not None:
        memory = {"device_memory_bytes": long_bytes, "max_context_tokens": 2048}
        asked = replace(asked, **memory, batch_tokens=None, sample_rows=1)
    return BackendOptions(
        base_model=model,
        base_model_revision=None,
        served_name="tiny",
        tokenizer_id=model,
        client_tokenizer_id=model,
        compile_ahead=False,
        compile_cache_dir=None,
        pages_dir=Path(folder) / "pages",
        decompositions_dir=Path(folder) / "decompositions",
        min_free_bytes=0,
        plan=asked,
    )


def run_process(
    number: int, count: int, port: int, model: str, folder: str, long_bytes: int | None
) -> None:
    """Run one of ``count`` processes; the leader prints a digest of everything it computes."""
    from tuneserve_engine.backend.jax.backend import JaxBackend

    print_all = print_bits if long_bytes is None else print_bits_of_divided
    if count == 1:
        print_all(JaxBackend.from_options(options(model, folder, int(folder[-1]), long_bytes)))
        return
    hosts = Hosts(["127.0.0.1"] * count, number, port, KEY.encode())
    if number:
        follow(
            hosts,
            options(model, folder, 7),  # the leader's choices count
            on_start=lambda _: None,
            on_end=lambda: os._exit(0),
            on_lost=fail,
        )
    asked = options(model, folder, 1, long_bytes)
    backend, own = lead(hosts, asked, on_stop=lambda: None, on_lost=fail)
    assert own.micro_batches_at_once == count
    print_all(backend)
    backend.end()
    os._exit(0)


def fail(reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)


def print_bits(backend: Any) -> None:
    """Train adapters of three kinds, sample from one, and print the bits of all results."""
    import hashlib

    from tests.engine.backend.jax.test_mesh import CONFIGS

    for config in CONFIGS.values():
        backend.prepare(config)
    results, states = trained(backend, 2)
    found = bits(results) + bits(states)
    backend.load_snapshot("s", backend.exported_adapter("osft"))
    prompt = np.arange(1, 12, dtype=np.int32)
    request = SamplingRequest(prompt, "s", 3, 2, 6, prompt_logprobs=True, topk_sample=2)
    others = {name: replace(request, seed=n) for n, name in enumerate("bcdefghi", 10)}
    backend.sample_until(others, lambda: True)
    progress = backend.sample_until({"a": request}, lambda: True)  # the others are dropped
    while not progress.finished:
        progress = backend.sample_until({"a": request}, lambda: True)
    result = progress.finished["a"]
    assert not isinstance(result, Exception), result
    for each in result.sequences:
        found += [each.tokens.tobytes(), each.logprobs.tobytes(), each.topk.logprobs.tobytes()]
    found.append(result.prompt_logprobs.tobytes())
    print("bits", len(found), hashlib.sha256(b"".join(found)).hexdigest(), flush=True)


def print_bits_of_divided(backend: Any) -> None:
    """Train on datums of up to 2,048 tokens, and print the bits of results and gradients."""
    import hashlib

    from tests.engine.backend.jax.attention.test_divided import datum, request, run

    shapes = backend.static_shapes
    assert shapes.devices_per_datum > 1 and shapes.micro_batch_tokens < 1500
    asked = [request("one", datum(2048), datum(30)), request("other", datum(1500))]
    found = bits(list(run(backend, asked)))
    print("bits", len(found), hashlib.sha256(b"".join(found)).hexdigest(), flush=True)


def start(
    number: int,
    count: int,
    port: int,
    model: Path,
    folder: Path,
    devices: int,
    long_bytes: int | None = None,
) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    arguments = number, count, port, str(model), str(folder), long_bytes
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "PYTHONHASHSEED": str(number),  # no order of a set is that of another process
    }
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import run_process; run_process(*{arguments})"],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def printed(process: "subprocess.Popen[str]") -> list[str]:
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    return [line for line in output.splitlines() if line.startswith("bits ")]


@pytest.mark.parametrize("count", [2, at_night(4)])
def test_processes_have_the_bits_of_one_process_with_as_many_devices(
    tmp_path: Path, count: int
) -> None:
    """Three kinds of adapters trained, their states, and samples with all that can be asked."""
    model = write_base_model(tmp_path / "model", FOUR_HEADS)
    port = free_ports()
    together = [start(number, count, port, model, tmp_path / "group", 1) for number in range(count)]
    alone = start(0, 1, port, model, tmp_path / str(count), count)
    (wanted,), (found,), *others = (printed(each) for each in (alone, *together))
    assert found == wanted
    assert others == [[]] * (count - 1)


def test_processes_divide_a_datum_with_the_bits_of_one_process(tmp_path: Path) -> None:
    model = write_base_model(tmp_path / "model", LONG)
    config, machine = ModelConfig.from_hf(LONG), Device("cpu", 2**40, 2**30, 2)
    memory = next(
        size
        for size in range(100_000_000, 0, -1_000_000)
        if plan(
            config, machine, options(str(model), "", 2, size).plan
        ).static_shapes.devices_per_datum
        > 1
    )
    port = free_ports()
    together = [start(number, 2, port, model, tmp_path / "group", 1, memory) for number in range(2)]
    alone = start(0, 1, port, model, tmp_path / "2", 2, memory)
    (wanted,), (found,), other = (printed(each) for each in (alone, *together))
    assert found == wanted and other == []


# --- the terms ----------------------------------------------------------------------------------

NAMES = ("gpu-0", "gpu-1")
SMALL, LARGE = Device("gpu", 80, 500, 4), Device("gpu", 90, 400, 8)


def test_the_cpus_of_several_hosts_add_up() -> None:
    hosts = [Device.cpu(64, 2), Device.cpu(48, 2)]
    terms = agreed_terms(NAMES, hosts, PlanRequest(devices=2))
    assert terms.device.bytes_of_each(4) == Device.cpu(48, 2).bytes_of_each(2)


def test_the_plan_is_for_the_least_that_every_host_has() -> None:
    terms = agreed_terms(NAMES, [LARGE, SMALL], PlanRequest(devices=2, dtype="float32"))
    assert terms.device == Device("gpu", 80, 400, 4)
    assert terms.plan == PlanRequest(devices=4, dtype="float32")


def test_auto_takes_as_many_devices_of_each_host_as_all_have() -> None:
    terms = agreed_terms(NAMES, [LARGE, SMALL], PlanRequest(devices="auto"))
    assert (terms.device.count, terms.plan.devices) == (8, 8)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            Device("cpu", 80, 500, 8),
            "gpu-1 has 8 devices of kind cpu; the leader, gpu-0, asks each",
        ),
        (SMALL, "gpu-1 has 4 devices of kind gpu; .* for 8 of kind gpu: set devices to a number"),
    ],
)
def test_hosts_that_do_not_fit_together_are_named(other: Device, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        agreed_terms(NAMES, [LARGE, other], PlanRequest(devices=8))
