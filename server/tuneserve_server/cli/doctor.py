"""``tuneserve doctor``: checks whether a service with these settings would run here.

If not, the command says what to do. It changes nothing.
"""

import asyncio
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tuneserve_engine.process import permissions
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store.bucket import Bucket
from tuneserve_engine.store.errors import StoreFailed, StoreUnusable
from tuneserve_engine.store.sqlite.database import network_file_system
from tuneserve_engine.store.sqlite.inspect import look_at_store
from tuneserve_server.cli.doctor_compute import check_compute
from tuneserve_server.cli.doctor_files import look_at_owner
from tuneserve_server.cli.finding import Environment, Finding, Ran, last_line, run_python
from tuneserve_server.cli.output import size
from tuneserve_server.cli.readiness import health_of
from tuneserve_server.listening import CannotStart, listen
from tuneserve_server.settings import ApiSettings

Look = dict[str, Any]
"""The output of ``tuneserve_engine.backend.jax.model.check``."""

_ENGINE = ("jax", "flax", "jaxtyping", "safetensors", "tokenizers")
_DEVICE_S = 90.0
_STORE_S = 10.0
_MODEL_S = 60.0
_PLAN_REFUSES = "tuneserve plan: "
_MOUNTS = Path("/proc/self/mounts")
_NVIDIA = Path("/proc/driver/nvidia/version")

_ASK_JAX = """
import json, jax
from tuneserve_engine.backend.jax.memory.device import machine_bytes
devices = jax.local_devices()
limit = (devices[0].memory_stats() or {}).get("bytes_limit", 0)
cpu = devices[0].platform == "cpu"
print(json.dumps({
    "platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices),
    "bytes": machine_bytes() if cpu else limit,
}))
"""


def examine(settings: ApiSettings, environment: Environment) -> list[Finding]:
    """Return all findings. ``environment`` is the environment of a worker to start."""
    health = health_of(settings.url)
    engine = _engine()
    asked = _ask_engine(settings, environment) if engine.level == "OK" else _UNTOLD
    device, compute, model, memory = asked
    return [
        _python(),
        engine,
        device,
        compute,
        _directory("data dir", settings.data_dir, settings),
        _directory("files dir", settings.files_dir, settings),
        *_bucket(settings),
        _disk(settings),
        _port(settings, health),
        _store(settings, health),
        Finding("owner", *look_at_owner(settings, health)),
        model,
        memory,
    ]


def _ask_engine(settings: ApiSettings, environment: Environment) -> tuple[Finding, ...]:
    """Return the findings about the device, its results, the model and the memory."""
    device = _device(environment)
    compute = _NOT_COMPUTED if device.level == "FAIL" else check_compute(environment)
    found = _look_at_model(settings.base_model, environment, settings.base_model_revision)
    model = _model(settings, found)
    if device.level == "FAIL":
        memory = _unplanned("the device is in order")
    elif found["folder"]:
        memory = _memory(found["folder"], environment)
    elif model.level == "FAIL":
        memory = _unplanned("the model is in order")
    else:
        memory = _unplanned("its config.json is here; tuneserve plan downloads only that file")
    return device, compute, model, memory


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
            f"not installed: {', '.join(missing)}; a worker needs them (an API process does not): "
            "in a clone, pip install '.[engine]', or '.[cuda]' for an NVIDIA GPU (Python 3.12 "
            "or later)",
        )
    return Finding("engine", "OK", f"installed, jax {importlib.metadata.version('jax')}")


_UNTOLD = tuple(
    Finding(name, "FAIL", "not checked, because that needs the engine; install the engine first")
    for name in ("device", "compute", "model", "memory")
)
_NOT_COMPUTED = Finding("compute", "WARN", "not checked before the device is in order")


def _device(environment: Environment, ask: str = _ASK_JAX, limit_s: float = _DEVICE_S) -> Finding:
    """Check what JAX sees, in a separate process, because JAX may hang or crash."""
    # A worker may be using the device, so its memory is not preallocated.
    environment = {**environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        ran = run_python(["-c", ask], environment, limit_s)
    except subprocess.TimeoutExpired:
        return Finding(
            "device",
            "FAIL",
            f"JAX did not find a device within {limit_s:.0f} s; check whether the driver answers "
            "(nvidia-smi) and whether another process holds the device",
        )
    if ran.returncode != 0:
        return Finding(
            "device",
            "FAIL",
            f"JAX finds no device: {last_line(ran)}; check the driver (nvidia-smi), or run on the "
            "CPU with JAX_PLATFORMS=cpu",
        )
    found = json.loads(ran.stdout.splitlines()[-1])
    text = f"{found['count']} x {found['kind']} ({found['platform']}), {size(found['bytes'])}"
    if found["platform"] == "cpu" and _NVIDIA.exists():
        way_out = (
            "JAX does not see this machine's NVIDIA GPU: in a clone, pip install '.[cuda]' with "
            "Python 3.12 or later"
        )
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
            f"{folder} cannot be written: {error.strerror}; check who owns {place}, or choose "
            f"another directory with {option}",
        )
    kind = network_file_system(place.resolve(), _mounts())
    mode = permissions.open_to(folder) if folder == settings.files_dir else ""
    if mode and not settings.group_access:
        text = f"users other than its owner can enter {folder.absolute()} (permissions {mode}): "
        text += "chmod it to 700, or set group_access if the service runs as several users"
        return Finding(name, "WARN", text)
    if kind is None:
        return Finding(name, "OK", f"{folder.absolute()}, writable, on a local file system")
    if folder == settings.data_dir and settings.store_kind == "sqlite":
        return Finding(
            name,
            "FAIL",
            f"{folder} is on a network file system ({kind}), on which SQLite is not reliable; "
            f"choose a local disk with {option}, or use Redis as the store (--store)",
        )
    return Finding(name, "OK", f"{folder.absolute()}, writable, on {kind}")


def _bucket(settings: CommonSettings) -> list[Finding]:
    """Check the bucket of files, if there is one, as a start does."""
    if not settings.files_url:
        return []
    try:
        Bucket(settings.files_url).prove_writable()
    except OSError as error:
        text = f"{settings.files_url}: {error.strerror}; check AWS_ACCESS_KEY_ID, AWS_REGION and "
        text += "AWS_ENDPOINT_URL, or choose another with --files-url"
        return [Finding("bucket", "FAIL", text)]
    return [Finding("bucket", "OK", f"{settings.files_url}, writable, with conditional writes")]


def _existing(folder: Path) -> Path:
    """Return the directory, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if _is_seen(each))


def _is_seen(path: Path) -> bool:
    """Return whether the path exists; False within a directory that may not be entered."""
    try:
        return path.exists()
    except OSError:
        return False


def _mounts() -> str:
    try:
        return _MOUNTS.read_text(errors="replace")
    except OSError:  # not Linux
        return ""


def _disk(settings: ApiSettings) -> Finding:
    free = shutil.disk_usage(_existing(settings.data_dir)).free
    least = settings.min_free_bytes
    text = f"{size(free)} free; below {size(least)}, requests are answered with 503"
    if free < least:
        return Finding("disk", "FAIL", f"{text}: make room, or lower --min-free-bytes")
    if free < 2 * least:
        return Finding("disk", "WARN", f"{text}: make room soon")
    return Finding("disk", "OK", text)


def _port(settings: ApiSettings, health: dict[str, Any]) -> Finding:
    if health:
        text = f"a tuneserve service answers at {settings.url}; its worker is {health['worker']}"
        if health["worker"] == "ready":
            return Finding("port", "OK", text)
        return Finding("port", "WARN", f"{text}: it may still be loading; see its log")
    try:
        listen(settings).close()
    except CannotStart as error:
        return Finding("port", "FAIL", str(error))
    if not settings.require_keys and not settings.may_be_open:
        text = f"{settings.url} is free, but others can reach it: unless its store ever had an API"
        way_out = "set require_keys (--require-keys), or listen on 127.0.0.1"
        return Finding("port", "WARN", f"{text} key, the start is refused; {way_out}")
    return Finding("port", "OK", f"{settings.url} is free")


def _store(settings: ApiSettings, health: dict[str, Any]) -> Finding:
    if health:
        if damage := health.get("store_damage"):
            return Finding("store", "FAIL", damage)
        return _durable(health["store"], health["durability"])
    if settings.store_kind == "sqlite":
        return _sqlite(settings)
    try:
        durability = asyncio.run(_ask_redis(settings))
    except (StoreUnusable, StoreFailed, OSError) as error:  # TimeoutError is an OSError
        reason = str(error) or f"no answer within {_STORE_S:.0f} s"
        return Finding("store", "FAIL", f"{settings.store_shown}: {reason}")
    return _durable(settings.store_shown, durability)


def _durable(store: str, durability: str) -> Finding:
    if durability == "asserted":
        way_out = "allow CONFIG GET, or make sure of its settings yourself"
        text = f"{store}, on disk only according to store_durability_asserted: {way_out}"
        return Finding("store", "WARN", text)
    return Finding("store", "OK", f"{store}, on disk before requests are accepted: {durability}")


def _sqlite(settings: ApiSettings) -> Finding:
    try:
        found = look_at_store(settings.store_file)
    except StoreUnusable as error:
        return Finding("store", "FAIL", str(error))
    text = f"SQLite at {settings.store_file}, on disk before requests are accepted; {found}"
    return Finding("store", "OK", text)


async def _ask_redis(settings: ApiSettings) -> str:
    from tuneserve_engine.store.redis.store import RedisStore

    async with asyncio.timeout(_STORE_S):
        return await RedisStore.check(
            settings.store, durability_asserted=settings.store_durability_asserted
        )


def _look_at_model(base_model: str, environment: Environment, revision: str | None = None) -> Look:
    """Check the model in a separate process, which may load JAX but not touch the device."""
    asked = ["-m", "tuneserve_engine.backend.jax.model.check", base_model]
    asked += [revision] if revision else []
    try:
        ran = run_python(asked, {**environment, "JAX_PLATFORMS": "cpu"}, _MODEL_S)
    except subprocess.TimeoutExpired:
        return {
            "folder": None,
            "problem": f"its files were not read within {_MODEL_S:.0f} s; check their disk",
        }
    if ran.returncode != 0:
        return {
            "folder": None,
            "problem": f"{base_model} cannot be read: {last_line(ran)}; download it again",
        }
    found: Look = json.loads(ran.stdout.splitlines()[-1])
    return found


def _model(settings: ApiSettings, found: Look) -> Finding:
    if found["problem"]:
        return Finding("model", "FAIL", " ".join(found["problem"].split()))
    name = settings.served_name
    if found["is_to_download"]:
        return _download(name, found)
    text = f"{name}, {size(found['bytes'])} of weights in {found['folder']}"
    if reason := found["tokenizer_problem"]:
        return Finding(
            "model",
            "WARN",
            f"{text}; its tokenizer cannot be read ({' '.join(reason.split())}), and requests that "
            "send text need it: put the model's tokenizer.json there",
        )
    if not settings.is_loopback and (notice := settings.local_tokenizer):
        return Finding("model", "WARN", f"{text}; {notice}")
    return Finding("model", "OK", text)


def _download(name: str, found: Look) -> Finding:
    when = "will be downloaded from the hub at the first start, which needs the network"
    if found["folder"] is None:
        return Finding("model", "WARN", f"{name} is not a directory here: it {when}")
    missing, free = found["to_download_bytes"], found["free_bytes"]
    if missing is None:
        return Finding("model", "WARN", f"{name} is only partly here: the rest {when}")
    text = f"{name} is only partly here: the rest, about {size(missing)}, {when}"
    if missing > free:
        way_out = "make room, or set HF_HOME to a directory on another disk"
        return Finding("model", "FAIL", f"{text}; its disk has {size(free)} free: {way_out}")
    return Finding("model", "WARN", f"{text}; its disk has {size(free)} free")


def _unplanned(before: str) -> Finding:
    text = f"whether the model fits cannot be checked before {before}"
    return Finding("memory", "WARN", text)


def _memory(folder: str, environment: Environment) -> Finding:
    """Check with the planner that the model in ``folder`` fits into memory."""
    environment = {**environment, "TUNESERVE_BASE_MODEL": folder}
    try:
        ran = run_python(
            ["-m", "tuneserve_engine.backend.jax.memory.report", "--json"], environment, _DEVICE_S
        )
    except subprocess.TimeoutExpired:
        reason = f"planning took longer than {_DEVICE_S:.0f} s"
        return Finding("memory", "FAIL", f"{reason}; check whether tuneserve plan finishes")
    if ran.returncode != 0:
        return Finding("memory", "FAIL", _refusal(ran))
    found = json.loads(ran.stdout[ran.stdout.index("{\n") :])  # skips other output before it
    text = f"{size(found['device_bytes'])} to use: {size(found['lines'][0]['bytes'])} for the base"
    left = size(found["adapter_device_bytes"])
    return Finding("memory", "OK", f"{text} model, {left} left for adapters; see tuneserve plan")


def _refusal(ran: Ran) -> str:
    """Return the planner's refusal in one line, without the table in the middle."""
    _, found, text = ran.stderr.partition(_PLAN_REFUSES)
    if not found:
        return f"planning failed: {last_line(ran)}; see tuneserve plan"
    first, *others = text.strip().splitlines()
    if not others:
        return first
    return f"{first.rstrip(':')} (tuneserve plan shows the parts). {others[-1]}"
