"""The container files: everything that they name exists in the code, and nothing is left open.

The tests need no Docker engine: they read the files. ``tests/faults/test_topology.py`` runs the
same services as plain processes.
"""

import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.containers import DOCKER, ROOT, Image, compose, image, image_of
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.store.redis import durability
from tuneserve_engine.worker import worker
from tuneserve_server import serve
from tuneserve_server.app import PREFIX, ROUTERS
from tuneserve_server.cli import main as cli
from tuneserve_server.listening import CannotStart
from tuneserve_server.settings import ApiSettings

COMPOSE = compose("compose.yaml", REDIS_PASSWORD="a1b2")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
CUDA: dict[str, dict[str, Any]] = compose("compose.cuda.yaml")["services"]
IMAGES: dict[str, Image] = {name: image_of(SERVICES[name]) for name in ("api", "worker")}
SETTINGS: dict[str, type[CommonSettings]] = {"api": ApiSettings, "worker": WorkerSettings}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
OTHER_VARIABLES = {"HOME", "PATH", "NVIDIA_DRIVER_CAPABILITIES"}
PORT = ApiSettings.model_fields["port"].default

own_images = pytest.mark.parametrize("name", IMAGES)
services = pytest.mark.parametrize("name", SERVICES)


def environment(name: str) -> dict[str, str]:
    """The environment of one of our services, with the GPU overlay."""
    overlay = CUDA.get(name, {}).get("environment", {})
    return {**IMAGES[name].environment, **SERVICES[name]["environment"], **overlay}


def seconds(text: str) -> int:
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


# --- the API behind a published port --------------------------------------------------------------


def test_the_api_listens_to_other_containers_and_requires_keys() -> None:
    said = environment("api")
    assert said["TUNESERVE_HOST"] == "0.0.0.0"
    assert said["TUNESERVE_REQUIRE_KEYS"] == "true"
    assert "TUNESERVE_TRUSTED_NETWORK" not in said
    serve._check_reach(ApiSettings(host="0.0.0.0"), is_keyed=True)
    with pytest.raises(CannotStart, match="require_keys = true"):
        serve._check_reach(ApiSettings(host="0.0.0.0"), is_keyed=False)


def test_only_the_api_port_is_published_and_to_this_machine_alone() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"api": [f"127.0.0.1:{PORT}:{PORT}"]}
    assert IMAGES["api"].settings["EXPOSE"] == str(PORT)
    assert "EXPOSE" not in IMAGES["worker"].settings
    assert not any("ports" in service for service in CUDA.values())


def test_an_image_alone_does_not_declare_its_network_trusted() -> None:
    said = {"TUNESERVE_HOST", "TUNESERVE_TRUSTED_NETWORK", "TUNESERVE_REQUIRE_KEYS"}
    assert not said & IMAGES["api"].environment.keys()


# --- images ---------------------------------------------------------------------------------------


@own_images
def test_an_image_is_based_on_one_release_of_the_oldest_supported_python(name: str) -> None:
    (base,) = set(IMAGES[name].bases)
    match = re.fullmatch(r"python:(\d+\.\d+)\.\d+-slim-\w+", base)
    assert match, f"{base} is not one release"
    assert PROJECT["project"]["requires-python"] == f">={match[1]}"


def test_the_image_for_a_gpu_has_a_python_that_the_newest_jax_takes() -> None:
    python = CUDA["worker"]["build"]["args"]["PYTHON"]
    match = re.fullmatch(r"3\.(\d+)\.\d+-slim-\w+", python)
    assert match and int(match[1]) >= 12
    assert f"--build-arg PYTHON={python} " in (ROOT / "docker/worker.Dockerfile").read_text()


@own_images
def test_the_build_copies_the_sources_of_the_wheel_and_nothing_else(name: str) -> None:
    project, wheel = PROJECT["project"], PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {
        "requirements",
        "pyproject.toml",
        project["readme"],
        *project["license-files"],
        *wheel["packages"],
        wheel["hooks"]["custom"]["path"],
    }
    site = "doc[s]/_build/html"  # may be absent
    assert set(IMAGES[name].copied) - {site} == needed
    assert (site in IMAGES[name].copied) == (name == "api")
    first, *rest = (ROOT / ".dockerignore").read_text().splitlines()[1:]
    assert first == "*"
    assert {line.removeprefix("!") for line in rest if line.startswith("!")} == {
        *needed,
        "docs/_build/html",
    }
    assert all((ROOT / path).exists() for path in needed)


@pytest.mark.parametrize(
    ("dockerfile", "extra", "arguments"),
    [
        ("docker/api.Dockerfile", "server", {}),
        ("docker/worker.Dockerfile", "engine", {}),
        ("docker/worker.Dockerfile", "engine", SERVICES["worker"]["build"]["args"]),
        ("docker/worker.Dockerfile", "cuda", CUDA["worker"]["build"]["args"]),
    ],
)
def test_an_image_installs_one_extra_by_hashes_and_nothing_else_from_a_registry(
    dockerfile: str, extra: str, arguments: dict[str, str]
) -> None:
    built = image(dockerfile, **arguments)
    assert set(arguments) <= set(built.arguments)
    installs = [
        step
        for run in built.runs
        for step in run.split("&&")
        if re.search(r"pip (install|wheel)", step)
    ]
    hashed = [step for step in installs if "--require-hashes --no-deps" in step]
    files = [re.findall(r"--requirement (\S+)", step) for step in hashed]
    assert files == [["requirements/build.txt"], [f"requirements/{extra}.txt"]]
    assert all((ROOT / path).is_file() for (path,) in files)
    assert extra in EXTRAS
    rest = [step for step in installs if step not in hashed]
    assert len(rest) == 2
    assert all("--no-deps" in step for step in rest)
    assert all("--no-index" in step or "--no-build-isolation" in step for step in rest)


@own_images
def test_a_process_runs_as_an_ordinary_user_that_owns_the_data_directory(name: str) -> None:
    built = IMAGES[name]
    user, group = built.settings["USER"].split(":")
    assert int(user) >= 1000 and user == group
    assert built.settings["USER"] == IMAGES["worker"].settings["USER"]  # they share the volume
    (made,) = [run for run in built.runs if "useradd" in run]
    folder = built.settings["VOLUME"]
    assert f"--uid {user} " in made
    assert f"install --directory --owner {user} --group {group} {folder}" in made
    assert folder == built.settings["WORKDIR"] == built.environment["HOME"]
    assert folder == built.environment["TUNESERVE_DATA_DIR"]


def requirements(*extras: str) -> set[str]:
    """Names of all packages that these extras install."""
    found: set[str] = set()
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in extras:
        wanted += EXTRAS[extra]
    todo = [Requirement(each) for each in wanted]
    while todo:
        needed = todo.pop()
        name = canonicalize_name(needed.name)
        if name in found:
            continue
        found.add(name)
        for each in map(Requirement, distribution(name).requires or ()):
            chosen = needed.extras or {""}
            if not each.marker or any(each.marker.evaluate({"extra": one}) for one in chosen):
                todo.append(each)
    return found


# Imports as if only some of the packages were installed.
IMPORTS = """
import sys
from importlib.machinery import PathFinder
absent = set(sys.argv[1].split(","))
class Present(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in absent:
            return super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Present
for module in sys.argv[2:]:
    __import__(module)
"""


@pytest.mark.parametrize(
    ("extra", "modules"),
    [
        (
            "server",
            [
                "tuneserve_server.__main__",
                "tuneserve_server.cli.main",
                "tuneserve_server.cli.services",
                "tuneserve_server.app",
            ],
        ),
        ("engine", ["tuneserve_engine.worker.__main__", "tuneserve_engine.worker.health"]),
    ],
)
def test_an_image_contains_everything_that_its_process_imports(
    extra: str, modules: list[str]
) -> None:
    present = requirements(extra)
    assert ("jax" in present) == (extra == "engine")
    absent = [
        module
        for module, owners in packages_distributions().items()
        if not any(canonicalize_name(owner) in present | {"tuneserve"} for owner in owners)
    ]
    assert "torch" in absent
    modules = [*modules, "tuneserve_engine.store.open", "tuneserve_engine.store.redis.store"]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, ",".join(absent), *modules],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


# --- commands, variables, health ------------------------------------------------------------------


def test_the_api_image_runs_an_existing_command() -> None:
    program, command = IMAGES["api"].command
    assert program in PROJECT["project"]["scripts"]
    assert command in cli.SECTIONS["Run a server"]


def test_the_commands_of_the_worker_are_modules_that_run() -> None:
    for command in (IMAGES["worker"].command, IMAGES["worker"].health):
        assert command[:2] == ["python", "-m"] and len(command) == 3
        spec = importlib.util.find_spec(command[2])
        assert spec is not None and spec.origin is not None
        if spec.submodule_search_locations:
            assert importlib.util.find_spec(f"{command[2]}.__main__")
        else:
            assert 'if __name__ == "__main__":' in Path(spec.origin).read_text()


@own_images
def test_every_variable_is_a_setting_of_the_process_with_a_valid_value(name: str) -> None:
    ours = {
        variable.removeprefix("TUNESERVE_").lower(): value
        for variable, value in environment(name).items()
        if variable.startswith("TUNESERVE_")
    }
    assert set(ours) <= set(SETTINGS[name].model_fields)
    SETTINGS[name](**ours)
    others = {each for each in environment(name) if not each.startswith("TUNESERVE_")}
    assert others <= OTHER_VARIABLES


def test_the_api_health_check_uses_an_address_that_the_api_answers() -> None:
    python, flag, code = IMAGES["api"].health
    assert (python, flag) == ("python", "-c")
    (url,) = re.findall(r"http://[^']+", code)
    parts = urlsplit(url)
    assert (parts.hostname, parts.port) == ("127.0.0.1", PORT)
    gets = {
        f"{PREFIX}{route.path}"
        for module in ROUTERS
        for route in module.router.routes
        if "GET" in route.methods
    }
    assert parts.path in gets


def test_the_worker_health_check_has_a_liveness_file() -> None:
    file = environment("worker")["TUNESERVE_ALIVE_FILE"]
    assert file.startswith("/tmp/")  # a file on the volume would be shared by all workers


# --- the store ------------------------------------------------------------------------------------


def redis_flags() -> dict[str, str]:
    shell, flag, _, _, *flags = SERVICES["redis"]["command"]
    assert (shell, flag) == ("sh", "-c")
    names, values = flags[::2], flags[1::2]
    assert all(name.startswith("--") for name in names)
    return {name.removeprefix("--"): value for name, value in zip(names, values, strict=True)}


def test_redis_is_started_with_the_settings_that_the_store_requires() -> None:
    assert durability.SETTINGS.items() <= redis_flags().items()


def test_redis_is_one_patched_release_that_the_store_accepts() -> None:
    match = re.fullmatch(r"redis:(\d+)\.(\d+)\.(\d+)-\w+", SERVICES["redis"]["image"])
    assert match, "not one release"
    version = tuple(map(int, match.groups()))
    assert version >= durability.OLDEST
    assert not durability.is_known_unpatched("redis", version)


def test_redis_requires_the_common_password_and_no_argument_shows_it() -> None:
    service = SERVICES["redis"]
    password = service["environment"]["REDIS_PASSWORD"]
    assert password == "a1b2"
    assert "requirepass $REDIS_PASSWORD" in service["command"][2]
    assert not any(password in part for part in service["command"])
    for name in IMAGES:
        store = urlsplit(environment(name)["TUNESERVE_STORE"])
        assert (store.scheme, store.hostname, store.port) == ("redis", "redis", 6379)
        assert store.password == password


def test_without_a_password_nothing_starts() -> None:
    with pytest.raises(KeyError, match="REDIS_PASSWORD"):
        compose("compose.yaml")


# --- permissions of containers --------------------------------------------------------------------


@services
def test_a_service_has_no_more_rights_than_it_needs(name: str) -> None:
    service = SERVICES[name] | CUDA.get(name, {})
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [each.partition(":")[0] for each in service["tmpfs"]] == ["/tmp"]
    user = service.get("user") or IMAGES[name].settings["USER"]
    assert int(user.split(":")[0]) > 0
    loosened = {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices", "userns_mode"}
    assert not loosened & service.keys()


@services
def test_a_service_writes_to_one_named_volume(name: str) -> None:
    (mount,) = SERVICES[name]["volumes"]
    volume, target = mount.split(":")
    assert volume in COMPOSE["volumes"]
    # in the redis image too: it is the working directory, owned by its user
    assert target == "/data"
    assert ("redis" == volume) == (name == "redis")


@services
def test_a_service_restarts_and_waits_for_its_dependencies(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True
    for other, condition in service.get("depends_on", {}).items():
        assert condition == {"condition": "service_healthy"}
        assert "healthcheck" in SERVICES[other] or IMAGES[other].health
    assert set(service["networks"]) <= set(COMPOSE["networks"])


def test_only_our_services_reach_the_store() -> None:
    assert SERVICES["redis"]["networks"] == ["store"]
    assert COMPOSE["networks"]["store"] == {"internal": True}


def test_a_stopped_service_has_enough_time_to_stop() -> None:
    grace_s = {name: seconds(service["stop_grace_period"]) for name, service in SERVICES.items()}
    assert grace_s["worker"] >= 35 and grace_s["worker"] > worker.STOP_S
    assert grace_s["api"] > serve._GRACE_S


def test_the_overlay_gives_a_gpu_to_the_worker_and_changes_nothing_else() -> None:
    assert set(CUDA) == {"worker"}
    assert set(CUDA["worker"]) == {"build", "image", "environment", "deploy"}
    (device,) = CUDA["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert CUDA["worker"]["image"] != SERVICES["worker"]["image"]


# --- the pages about containers -------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted(each.name for each in DOCKER.glob("[!.]*")))
def test_every_file_argument_and_setting_of_a_text_exists(page: str) -> None:
    text = (DOCKER / page).read_text()
    for path in re.findall(r"--file (\S+)", text):
        assert (ROOT / path).exists(), path
    for name, value in re.findall(r"--build-arg (\w+)=(\w+)", text):
        assert name in IMAGES["worker"].arguments
        assert value in EXTRAS or name != "EXTRA"
    for name in re.findall(r"TUNESERVE_([A-Z_]+[A-Z])", text):
        known = {*ApiSettings.model_fields, *WorkerSettings.model_fields}
        assert name.lower() in known, name


def test_the_password_file_is_kept_out_of_the_repository() -> None:
    assert "docker/.env" in (ROOT / ".gitignore").read_text().splitlines()
    assert SERVICES["api"]["env_file"] == [{"path": ".env", "required": False}]
