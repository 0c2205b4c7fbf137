"""``tuneserve doctor``: whether a service with these settings would run here, and what to do if
not. Changes nothing."""

import asyncio
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tuneserve_engine.config import CommonSettings
from tuneserve_engine.queue.base import StoreFailed, StoreUnusable
from tuneserve_engine.queue.schema import network_file_system
from tuneserve_server import serving
from tuneserve_server.readiness import health_of
from tuneserve_server.screen import size
from tuneserve_server.settings import ApiSettings

Level = Literal["OK", "WARN", "FAIL"]
Environment = dict[str, str]

_ENGINE = ("jax", "flax", "jaxtyping", "safetensors", "tokenizers")
_DEVICE_S = 90.0
_STORE_S = 10.0
_MODEL_FILES = ("config.json", "tokenizer.json")
_MOUNTS = Path("/proc/self/mounts")
_NVIDIA = Path("/proc/driver/nvidia/version")

_ASK_JAX = """
import json, jax
from tuneserve_engine.backend.jax.device_memory import machine_bytes
devices = jax.local_devices()
limit = (devices[0].memory_stats() or {}).get("bytes_limit", 0)
cpu = devices[0].platform == "cpu"
print(json.dumps({
    "platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices),
    "bytes": machine_bytes() if cpu else limit,
}))
"""


@dataclass(frozen=True)
class Finding:
    """What one check found; its text says what to do, if there is something."""

    name: str
    level: Level
    text: str


def examine(settings: ApiSettings, environment: Environment) -> list[Finding]:
    """All findings. ``environment`` is what a worker would be started with."""
    health = health_of(settings.url)
    return [
        _python(),
        engine := _engine(),
        _device(environment) if engine.level == "OK" else _untold("device"),
        _directory("data dir", settings.data_dir, settings),
        _directory("files dir", settings.files_dir, settings),
        _disk(settings),
        _port(settings, health),
        _store(settings, health),
        _model(settings),
    ]


def has_failed(findings: list[Finding]) -> bool:
    return any(each.level == "FAIL" for each in findings)


def facts(findings: list[Finding]) -> dict[str, Any]:
    return {"healthy": not has_failed(findings), "checks": [asdict(each) for each in findings]}


def _python() -> Finding:
    text = f"{platform.python_version()} on {platform.machine()}, {sys.executable}"
    return Finding("python", "OK", text)


def _engine() -> Finding:
    missing = [name for name in _ENGINE if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            "engine",
            "FAIL",
            f"{', '.join(missing)} not installed, which a worker needs (an API process does not): "
            "pip install 'tuneserve[engine]', or 'tuneserve[cuda]' for an NVIDIA GPU",
        )
    return Finding("engine", "OK", f"installed, jax {importlib.metadata.version('jax')}")


def _untold(name: str) -> Finding:
    return Finding(name, "FAIL", "it cannot be asked for without the engine; install that first")


def _device(environment: Environment, ask: str = _ASK_JAX, limit_s: float = _DEVICE_S) -> Finding:
    """What JAX sees, in a process of its own: one that hangs or crashes is not ours."""
    # A worker may be using the device: we only ask what it is.
    environment = {**environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        ran = subprocess.run(
            [sys.executable, "-c", ask],
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return Finding(
            "device",
            "FAIL",
            f"JAX did not find a device within {limit_s:.0f} s; see whether the driver answers "
            "(nvidia-smi) and whether another process holds the device",
        )
    if ran.returncode != 0:
        reason = (ran.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return Finding(
            "device",
            "FAIL",
            f"JAX finds no device: {reason}; see the driver (nvidia-smi), or compute on the CPU "
            "with JAX_PLATFORMS=cpu",
        )
    found = json.loads(ran.stdout.splitlines()[-1])
    text = f"{found['count']} x {found['kind']} ({found['platform']}), {size(found['bytes'])}"
    if found["platform"] == "cpu" and _NVIDIA.exists():
        way_out = "there is an NVIDIA GPU that JAX does not see: pip install 'tuneserve[cuda]'"
        return Finding("device", "WARN", f"{text}; {way_out}")
    return Finding("device", "OK", text)


def _directory(name: str, folder: Path, settings: CommonSettings) -> Finding:
    option = f"--{name.replace(' ', '-')}"
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Finding(
            name,
            "FAIL",
            f"{folder} cannot be written: {error.strerror}; see who owns {place}, or choose "
            f"another with {option}",
        )
    kind = network_file_system(place.resolve(), _mounts())
    if kind is None:
        return Finding(name, "OK", f"{folder.absolute()}, writable, on a local file system")
    if folder == settings.data_dir and settings.store_kind == "sqlite":
        return Finding(
            name,
            "FAIL",
            f"{folder} is on a network file system ({kind}), where SQLite cannot be relied on; "
            f"choose a local disk with {option}, or keep the store in Redis (--store)",
        )
    return Finding(name, "OK", f"{folder.absolute()}, writable, on {kind}")


def _existing(folder: Path) -> Path:
    """The directory, or what is there of the way to it."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


def _mounts() -> str:
    try:
        return _MOUNTS.read_text(errors="replace")
    except OSError:  # not Linux
        return ""


def _disk(settings: ApiSettings) -> Finding:
    free = shutil.disk_usage(_existing(settings.data_dir)).free
    least = settings.min_free_bytes
    text = f"{size(free)} free; below {size(least)} requests are put off"
    if free < least:
        return Finding("disk", "FAIL", f"{text}: make room, or lower --min-free-bytes")
    if free < 2 * least:
        return Finding("disk", "WARN", f"{text}: make room soon")
    return Finding("disk", "OK", text)


def _port(settings: ApiSettings, health: dict[str, Any]) -> Finding:
    if health:
        text = f"{settings.url} is a tuneserve that answers; its worker is {health['worker']}"
        if health["worker"] == "ready":
            return Finding("port", "OK", text)
        return Finding("port", "WARN", f"{text}: it may be loading; see its log")
    try:
        serving.listen(settings).close()
    except serving.CannotStart as error:
        return Finding("port", "FAIL", str(error))
    return Finding("port", "OK", f"{settings.url} is free")


def _store(settings: ApiSettings, health: dict[str, Any]) -> Finding:
    if health:
        kind, durability = health["store"], health["durability"]
        if durability == "asserted":
            way_out = "let it be read (CONFIG GET), or be sure of it"
            text = f"{kind}, on disk only by the operator's word: {way_out}"
            return Finding("store", "WARN", text)
        return Finding("store", "OK", f"{kind}, what is accepted is on disk: {durability}")
    if settings.store_kind == "sqlite":
        text = f"SQLite at {settings.store_shown}, on disk before requests are accepted"
        return Finding("store", "OK", text)
    try:
        durability = asyncio.run(_ask_redis(settings))
    except (StoreUnusable, StoreFailed, OSError) as error:  # TimeoutError is an OSError
        reason = str(error) or f"no answer within {_STORE_S:.0f} s"
        return Finding("store", "FAIL", f"{settings.store_shown}: {reason}")
    level: Level = "OK" if durability == "always" else "WARN"
    return Finding("store", level, f"{settings.store_shown}, on disk: {durability}")


async def _ask_redis(settings: ApiSettings) -> str:
    from tuneserve_engine.queue.redis import RedisStore

    async with asyncio.timeout(_STORE_S):
        store = await RedisStore.open(
            settings.store,
            policy=settings.store_policy,
            durability_asserted=settings.store_durability_asserted,
        )
        await store.close()
        return store.durability


def _model(settings: CommonSettings) -> Finding:
    folder = Path(settings.base_model).expanduser()
    if folder.is_dir():
        return _model_in(folder, settings.served_name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(settings.base_model, _MODEL_FILES[0])
    except HFValidationError:
        return Finding(
            "model",
            "FAIL",
            f"{settings.base_model!r} is neither a directory nor a hub id; name one that is with "
            "--base-model",
        )
    if isinstance(cached, str):
        return _model_in(Path(cached).parent, settings.served_name)
    return Finding(
        "model",
        "WARN",
        f"{settings.base_model} is no directory here: a worker will download it from the hub when "
        "it starts, which needs the network",
    )


def _model_in(folder: Path, name: str) -> Finding:
    weights = sorted(folder.glob("*.safetensors"))
    files: list[Path] = [*(folder / each for each in _MODEL_FILES), *weights]
    if not weights:
        return Finding("model", "FAIL", f"{folder} holds no *.safetensors; download them too")
    for file in files:
        try:
            with file.open("rb") as opened:
                opened.read(1)
        except OSError as error:
            text = f"{file} cannot be read: {error.strerror}; the model is not complete"
            return Finding("model", "FAIL", text)
    total = sum(file.stat().st_size for file in weights)
    return Finding("model", "OK", f"{name}, {size(total)} of weights in {folder}")
