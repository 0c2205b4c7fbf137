"""The device and the machine's memory, as the planner sees them."""

from pathlib import Path

from tuneserve_engine.backend.jax.memory.device import default_device, machine_bytes


def test_a_containers_memory_is_its_limit(tmp_path: Path) -> None:
    unlimited, limited = tmp_path / "max", tmp_path / "limited"
    unlimited.write_text("max\n")
    limited.write_text(f"{2**20}\n")
    everything = machine_bytes((tmp_path / "missing", unlimited))
    assert everything > 2**20
    assert machine_bytes((unlimited, limited)) == 2**20


def test_the_tests_run_on_a_cpu_that_has_half_of_the_machines_memory() -> None:
    device = default_device()
    assert device.kind == "cpu"
    assert (device.memory_bytes, device.host_bytes) == (machine_bytes() // 2, machine_bytes() // 4)
