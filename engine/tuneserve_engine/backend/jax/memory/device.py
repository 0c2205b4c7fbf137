"""The device that JAX computes on by default, described for the planner."""

import os
from pathlib import Path

import jax

from tuneserve_engine.backend.jax.memory.planner import Device
from tuneserve_engine.core.gpus import GPU_MIB

_SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_JAX_SHARE = 0.75
"""The share of a GPU's memory that JAX takes by default."""
_GPUS_OF_A_HOST = 8
"""The GPUs of the largest machines that vendors build around one kind."""
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),  # cgroup version 2: a container sees its own limit
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def default_device() -> Device:
    """Return the device's kind and its whole memory.

    For an accelerator, that is the memory that JAX may take of the smallest one, whether it is free
    now or not (0 if a device does not report it); for a CPU, a share of the machine's memory.
    """
    device, count = jax.local_devices()[0], jax.local_device_count()
    machine = machine_bytes()
    if device.platform == "cpu":
        return Device.cpu(machine, count)
    sizes = [(each.memory_stats() or {}).get("bytes_limit", 0) for each in jax.local_devices()]
    return Device.accelerator(device.platform, min(sizes), machine, count)


def named_gpu(name: str) -> Device:
    """Return GPUs of ``GPU_MIB`` that are not there, with this machine's memory as their host's.

    There are 8 of them.
    Raises ``ValueError`` if ``XLA_PYTHON_CLIENT_MEM_FRACTION`` is no share.
    """
    asked = os.environ.get(_SHARE_VARIABLE, _JAX_SHARE)
    try:
        share = float(asked)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(
            f"{_SHARE_VARIABLE} is {asked!r}; JAX takes this share of a GPU's memory, so set a "
            f"number above 0 and up to 1, or unset it for {_JAX_SHARE}"
        )
    size = int(share * GPU_MIB[name] * 2**20)
    return Device.accelerator("gpu", size, machine_bytes(), _GPUS_OF_A_HOST)


def machine_bytes(limits: tuple[Path, ...] = _LIMITS) -> int:
    """Return the memory of this machine or, inside a container, of the container."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in limits:
        try:
            sizes.append(int(file.read_text()))
        except (OSError, ValueError):  # the file is missing or says "max"
            continue
    return min(sizes)
