"""The device that JAX computes on by default, as the planner wants to know it."""

import os
from pathlib import Path

import jax

from tuneserve_engine.planner import Device

_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),  # version 2, as a container sees its own
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def default_device() -> Device:
    """Its kind and its whole memory: what JAX may take of an accelerator's, whether it is free just
    now or not, 0 for one that does not say; and a share of the machine's for a CPU."""
    device = jax.local_devices()[0]
    machine = machine_bytes()
    if device.platform == "cpu":
        return Device.cpu(machine)
    stats = device.memory_stats() or {}
    return Device.accelerator(device.platform, stats.get("bytes_limit", 0), machine)


def machine_bytes(limits: tuple[Path, ...] = _LIMITS) -> int:
    """The memory of this machine, or of the container that this is."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in limits:
        try:
            sizes.append(int(file.read_text()))
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
    return min(sizes)
