"""Ids of a process: of the bits that it computes, and of the programs that it can load."""

import hashlib
import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import jax

import tuneserve_engine
from tuneserve_engine.backend.jax.programs.registry import compiler_options
from tuneserve_engine.backend.jax.target import target_platform
from tuneserve_engine.core.shapes import StaticShapes

_PACKAGES = ("tuneserve", "jax", "jaxlib", "flax", "numpy", "llguidance")
_NO_VERSION = "none"
_GPU_PACKAGES = (
    "jax-cuda12-pjrt",
    "jax-cuda13-pjrt",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cublas-cu12",
    "nvidia-cublas",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-nvcc",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nvvm",
)
"""Compilers and libraries for a GPU. Only those that are installed are named."""
_CODE = (
    "core/adapter.py",
    "core/gpus.py",
    "core/grammar.py",
    "core/provenance.py",
    "core/shapes.py",
    "adapters/checkpoint_format.py",
    "adapters/state.py",
    "adapters/svd.py",
    "adapters/svd_process.py",
    "adapters/kinds/*.py",
    "worker/codecs/*.py",
    "worker/execution/gradients.py",
    "worker/execution/custom_losses.py",
    "custom_loss/*.py",
    "worker/execution/bins.py",
    "worker/execution/packing.py",
    "backend/base.py",
    "backend/jax/**/*.py",
    "backend/jax/**/*.txtpb",
)
"""The source files that a request passes through on its way to a result."""
_FLAGS = ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE", "TF_CUDNN_DETERMINISTIC", "PJRT_NPROC", "NPROC")
_OPTIONS = (
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_num_cpu_devices",
)
_DRIVER_FILE, _NO_DRIVER = Path("/proc/driver/nvidia/version"), "unknown"
_SAMPLE_BYTES = 65_536
"""Bytes read at the start, in the middle and at the end of a weight file.

Enough to tell a base model from a fine-tuned one, whose names and shapes are the same.
"""


class NumericChoices(NamedTuple):
    """The choices of a worker that bits depend on.

    ``is_for_absent_gpu`` says whether its programs come from ``tuneserve compile --device``. XLA
    then knows the GPU by a description, and may choose other kernels. ``devices`` share the base
    model.
    """

    dtype: str
    static_shapes: StaticShapes
    remat: str
    sample_rows: int
    is_for_absent_gpu: bool = False
    devices: int = 1


def numerics_id(folder: Path, choices: NumericChoices) -> str:
    """Return one readable line, the same for every process that computes the same bits."""
    return _id(_device(with_cuda=True), f"base={weights_digest(folder)}", choices)


def weights_digest(folder: Path) -> str:
    """Return a digest of samples of the base model's files."""
    return _digest(_base_model(folder))


def program_id(folder: Path, choices: NumericChoices, *, absent_gpu: str | None = None) -> str:
    """Return one readable line, the same wherever the same programs are compiled.

    It has the base model's configuration, not its weights, which are arguments of programs.
    The programs are for this process's device, or for an absent GPU and driver, such as
    ``NVIDIA H200; driver 580``. Where such programs are loaded, the CUDA of the process is not
    named, because its version is not known where they are compiled.
    """
    device = f"gpu({absent_gpu})" if absent_gpu else None
    config = _digest([(folder / "config.json").read_bytes()])
    here = _device(with_cuda=not choices.is_for_absent_gpu)
    processes = jax.process_count()
    spread = f" processes={processes}" if processes > 1 else ""
    return _id(device or here, f"config={config}", choices) + spread


def _id(device: str, base: str, choices: NumericChoices) -> str:
    packages = " ".join(f"{name}={version}" for name, version in _packages().items())
    shapes = choices.static_shapes
    shapes_id = (
        shapes.context_length,
        shapes.block,
        shapes.chunk,
        shapes.bin_tokens,
        int(shapes.is_one_chunk),
        *shapes.rank_buckets,
    )
    if shapes.devices_per_datum > 1:  # they decide which datums are divided, and where
        shapes_id = (*shapes_id, shapes.micro_batch_tokens, shapes.devices_per_datum)
    parts = (
        packages,
        f"code={_digest(_code())}",
        f"device={device}",
        f"flags={_flags()}",
        base,
        f"dtype={choices.dtype}",
        f"shapes={'/'.join(str(number) for number in shapes_id)}",
        f"remat={choices.remat}",
        f"decode_slots={choices.sample_rows}",
        *(("programs=absent-gpu",) if choices.is_for_absent_gpu else ()),
        *((f"devices={choices.devices}",) if choices.devices > 1 else ()),
    )
    return " ".join(parts)


def ask_for_float32(dtype: str) -> None:
    """If ``dtype`` is float32, have all programs compiled from now on multiply in full float32.

    By default a GPU would round the factors to TF32, which keeps 10 of 23 bits.
    """
    if dtype == "float32" and target_platform() != "cpu":
        jax.config.update("jax_default_matmul_precision", "highest")  # type: ignore[no-untyped-call]


def _packages() -> dict[str, str]:
    """Return the version of every package that computes; those of a GPU only if installed."""
    versions = {name: _version(name) for name in (*_PACKAGES, *_GPU_PACKAGES)}
    return {
        name: version
        for name, version in versions.items()
        if name in _PACKAGES or version != _NO_VERSION
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _NO_VERSION


def _code() -> Iterator[bytes]:
    root = Path(tuneserve_engine.__path__[0])
    for pattern in _CODE:
        for path in sorted(root.glob(pattern)):
            yield path.relative_to(root).as_posix().encode()
            yield path.read_bytes()


def _device(*, with_cuda: bool) -> str:
    """Name the device: a GPU, its driver and CUDA; a CPU and the threads that share sums."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        cuda = " ".join(str(device.client.platform_version).split())
        rest = f"; {cuda}" if with_cuda else ""
        return f"{device.platform}({device.device_kind}; driver {driver_branch()}{rest})"
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"cpu({_processor()}; threads {threads})"


def driver_branch(file: Path = _DRIVER_FILE) -> str:
    """Return the branch of NVIDIA's driver, such as ``580``, or ``unknown``."""
    try:
        found = re.search(r" (\d+)\.\d+", file.read_text(encoding="utf-8"))
    except OSError:
        return _NO_DRIVER
    return found[1] if found else _NO_DRIVER


def _processor() -> str:
    """Return the processor's name and a digest of its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".strip()
    facts = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    sets = " ".join(sorted(facts.get("flags", facts.get("Features", "")).split()))
    name = facts.get("model name", platform.machine())
    return f"{name} {_digest([sets.encode()])}"


def _flags() -> str:
    variables = [f"{name}={os.environ[name]}" for name in _FLAGS if os.environ.get(name)]
    options = [f"{name}={getattr(jax.config, name)}" for name in _OPTIONS]
    options += [f"{name}={value}" for name, value in compiler_options().items()]
    return f"({' '.join(variables + options)})"


def _base_model(folder: Path) -> Iterator[bytes]:
    yield (folder / "config.json").read_bytes()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        yield f"{path.name} {size}".encode()
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            yield file.read(min(header, size))
            for start in (8 + header, size // 2, size - _SAMPLE_BYTES):
                file.seek(max(start, 0))
                yield file.read(_SAMPLE_BYTES)


def _digest(parts: Iterator[bytes] | list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:12]
