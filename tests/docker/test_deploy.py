"""The files of deploy/, and of a release: everything that they name exists in the code.

`make check-deploy` renders the chart by Helm, compares it with the manifests read here, and checks
both against the schemas of Kubernetes.
"""

import importlib.util
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import yaml
from starlette.routing import Match

from tests.containers import DOCKER, ROOT, compose, image
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.worker.worker import STOP_S
from tuneserve_server.app import AT_ROOT, PREFIX, ROUTERS
from tuneserve_server.settings import ApiSettings

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "tuneserve"
KUSTOMIZATION = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
OBJECTS: dict[tuple[str, str], Any] = {
    (each["kind"], each["metadata"]["name"]): each
    for name in KUSTOMIZATION["resources"]
    for each in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())
}
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
COMPOSE = compose("compose.yaml", REDIS_PASSWORD="a1b2")["services"]
SETTINGS = {"api": ApiSettings, "worker": WorkerSettings}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PORT = ApiSettings.model_fields["port"].default
WORKFLOW = (ROOT / ".github/workflows/release.yml").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
PODS = {
    "redis": OBJECTS["StatefulSet", "tuneserve-redis"]["spec"],
    "api": OBJECTS["Deployment", "tuneserve-api"]["spec"],
    "worker": OBJECTS["StatefulSet", "tuneserve-worker"]["spec"],
}

pods = pytest.mark.parametrize("name", PODS)


def pod(name: str) -> Any:
    return PODS[name]["template"]["spec"]


def container(name: str) -> Any:
    (found,) = pod(name)["containers"]
    return found


def environment(name: str) -> dict[str, str]:
    """The variables of a container, with a password for the secret and a name for the pod."""
    given = {each["name"]: each.get("value", "a1b2") for each in container(name)["env"]}
    return {
        variable: re.sub(r"\$\((\w+)\)", lambda m: given[m[1]], value)
        for variable, value in given.items()
    }


# --- Kubernetes -----------------------------------------------------------------------------------


def test_the_kustomization_has_every_manifest_and_the_images() -> None:
    files = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")}
    assert files == {*KUSTOMIZATION["resources"], "kustomization.yaml"}
    named = {each["name"] for each in KUSTOMIZATION["images"]}
    assert named == {container("api")["image"], container("worker")["image"]}
    assert container("redis")["image"] == COMPOSE["redis"]["image"] == VALUES["images"]["redis"]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_variable_is_a_setting_of_the_process_with_a_valid_value(name: str) -> None:
    given = environment(name)
    ours = {
        variable.removeprefix("TUNESERVE_").lower(): value
        for variable, value in given.items()
        if variable.startswith("TUNESERVE_")
    }
    assert set(ours) <= set(SETTINGS[name].model_fields)
    SETTINGS[name](**ours)
    assert ours["store"] == "redis://:a1b2@tuneserve-redis:6379/0"
    others = {each for each in given if not each.startswith("TUNESERVE_")}
    assert others <= {"REDIS_PASSWORD", "NVIDIA_DRIVER_CAPABILITIES"}


def test_all_processes_share_the_store_and_the_files() -> None:
    for variable in ("TUNESERVE_STORE", "TUNESERVE_FILES_DIR"):
        assert environment("api")[variable] == environment("worker")[variable]
    assert ("Service", "tuneserve-redis") in OBJECTS
    for name in SETTINGS:
        claims = [each.get("persistentVolumeClaim") for each in pod(name)["volumes"]]
        assert {"claimName": "tuneserve-files"} in claims
    claim = OBJECTS["PersistentVolumeClaim", "tuneserve-files"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_api_requires_keys_and_listens_to_other_pods() -> None:
    given = environment("api")
    assert (given["TUNESERVE_HOST"], given["TUNESERVE_REQUIRE_KEYS"]) == ("0.0.0.0", "true")
    assert "TUNESERVE_TRUSTED_NETWORK" not in given


def test_redis_is_started_as_by_compose() -> None:
    assert container("redis")["command"] == COMPOSE["redis"]["command"]
    user = pod("redis")["securityContext"]
    assert f"{user['runAsUser']}:{user['runAsGroup']}" == COMPOSE["redis"]["user"]
    (ping,) = container("redis")["startupProbe"]["exec"]["command"][2:]
    assert ping == COMPOSE["redis"]["healthcheck"]["test"][1]


@pods
def test_a_pod_has_no_more_rights_than_it_needs(name: str) -> None:
    assert pod(name)["securityContext"]["runAsNonRoot"] is True
    assert pod(name)["automountServiceAccountToken"] is False
    assert container(name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    if name != "redis":
        user = image(f"docker/{name}.Dockerfile").settings["USER"]
        assert user == "{runAsUser}:{runAsGroup}".format(**pod(name)["securityContext"])


@pods
def test_a_pod_is_chosen_by_its_labels_and_mounts_its_volumes(name: str) -> None:
    spec = PODS[name]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    claims = [each["metadata"] for each in spec.get("volumeClaimTemplates", [])]
    volumes = {each["name"] for each in [*pod(name)["volumes"], *claims]}
    assert {each["name"] for each in container(name)["volumeMounts"]} == volumes
    assert "data" in volumes and "tmp" in volumes  # nothing else can be written to


def test_a_worker_has_one_gpu_a_name_of_its_own_and_time_to_save() -> None:
    assert container("worker")["resources"]["limits"] == {"nvidia.com/gpu": 1}
    (name,) = [each for each in container("worker")["env"] if each["name"].endswith("WORKER_NAME")]
    assert name["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert pod("worker")["terminationGracePeriodSeconds"] >= STOP_S + 5


def test_a_worker_is_alive_as_long_as_its_lease() -> None:
    for probe in ("startupProbe", "livenessProbe"):
        command = container("worker")[probe]["exec"]["command"]
        assert command == image("docker/worker.Dockerfile").health
        assert importlib.util.find_spec(command[2])


def test_the_probes_of_the_api_are_answered() -> None:
    routes = [
        (prefix, route)
        for prefix, modules in ((PREFIX, ROUTERS), ("", AT_ROOT))
        for module in modules
        for route in module.router.routes
    ]

    def is_answered(path: str) -> bool:
        return any(
            route.matches({"type": "http", "method": "GET", "path": path.removeprefix(prefix)})[0]
            is Match.FULL
            for prefix, route in routes
            if path.startswith(prefix)
        )

    assert not is_answered("/api/v1/no-such-route")
    probes = {name: each["httpGet"] for name, each in container("api").items() if "Probe" in name}
    assert len(probes) == 3
    assert all(each["port"] == "http" and is_answered(each["path"]) for each in probes.values())
    # A restart does not bring the store back, without which this route answers 503.
    assert probes["readinessProbe"]["path"] == "/api/v1/healthz"
    assert probes["livenessProbe"]["path"] != "/api/v1/healthz"


@pytest.mark.parametrize(("name", "port"), [("api", PORT), ("redis", 6379)])
def test_a_service_leads_to_the_port_of_its_pod(name: str, port: int) -> None:
    spec = OBJECTS["Service", f"tuneserve-{name}"]["spec"]
    assert spec["selector"] == PODS[name]["template"]["metadata"]["labels"]
    (here,) = spec["ports"]
    (there,) = container(name)["ports"]
    assert (here["port"], here["targetPort"]) == (port, there["name"])
    assert there["containerPort"] == port


def test_only_our_pods_reach_the_store_and_none_a_worker() -> None:
    policies = [spec["spec"] for (kind, _), spec in OBJECTS.items() if kind == "NetworkPolicy"]
    guarded = {each["podSelector"]["matchLabels"]["app"]: each for each in policies}
    assert guarded.keys() == {"tuneserve-redis", "tuneserve-worker"}
    assert all(each["policyTypes"] == ["Ingress"] for each in policies)
    assert "ingress" not in guarded["tuneserve-worker"]
    (rule,) = guarded["tuneserve-redis"]["ingress"]
    admitted = {each["podSelector"]["matchLabels"]["app"] for each in rule["from"]}
    assert admitted == {"tuneserve-api", "tuneserve-worker"}


def test_the_pods_that_only_sample_use_the_same_claim() -> None:
    sampler, _ = yaml.safe_load_all((DOCKER / "kubernetes.samplers.yaml").read_text())
    claims = [
        each.get("persistentVolumeClaim") for each in sampler["spec"]["template"]["spec"]["volumes"]
    ]
    assert {"claimName": "tuneserve-files"} in claims


# --- Helm and SkyPilot ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.*")), ids=lambda path: path.name)
def test_every_variable_of_a_file_is_a_setting(path: Any) -> None:
    known = {*ApiSettings.model_fields, *WorkerSettings.model_fields}
    named = re.findall(r"TUNESERVE_([A-Z_]*[A-Z])\b", path.read_text())
    assert {each.lower() for each in named} <= known


def test_the_templates_use_the_values_and_no_others() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())

    def leaves(values: dict[str, Any], before: str = "") -> set[str]:
        found: set[str] = set()
        for name, value in values.items():
            is_group = isinstance(value, dict) and value and name != "resources"
            found |= leaves(value, f"{before}{name}.") if is_group else {f"{before}{name}"}
        return found

    assert set(re.findall(r"\.Values\.([\w.]+)", templates)) == leaves(VALUES)


def test_the_recipe_for_skypilot_installs_and_starts_what_exists() -> None:
    task = yaml.safe_load((DEPLOY / "sky.yaml").read_text())
    files = re.findall(r"-r (\S+)", task["setup"])
    assert files == [f"requirements/{each}.txt" for each in ("build", "server", "cuda")]
    assert all((ROOT / each).is_file() for each in files)
    commands = re.findall(r"bin/tuneserve (\w+) (.*)", task["setup"] + task["run"])
    assert [name for name, _ in commands] == ["doctor", "up"]
    for name, options in commands:
        shown = subprocess.run(
            [sys.executable, "-m", "tuneserve_server", name, "--help-all"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert all(each in shown.stdout for each in re.findall(r"--[\w-]+", options))
    assert "$BASE_MODEL" in task["run"] and "BASE_MODEL" in task["envs"]
    assert "--host" not in task["run"]  # a loopback address: the way in is a tunnel


# --- releases -------------------------------------------------------------------------------------


def test_all_files_name_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert chart["version"] == chart["appVersion"] == citation["version"] == VERSION
    tags = {each["name"]: each["newTag"] for each in KUSTOMIZATION["images"]}
    assert tags == {"tuneserve-api": VERSION, "tuneserve-worker": f"{VERSION}-cuda"}
    named = {each: VALUES["images"][each].rpartition(":")[2] for each in ("api", "worker")}
    assert named == {"api": VERSION, "worker": f"{VERSION}-cuda"}


def test_a_release_runs_commands_that_exist() -> None:
    steps = [step for job in yaml.safe_load(WORKFLOW)["jobs"].values() for step in job["steps"]]
    targets = {
        target
        for step in steps
        for line in re.findall(r"^make (.+)$", step.get("run", ""), re.M)
        for target in line.split()
    }
    assert targets == {"setup", "lint", "test", "test-docker", "docs"}
    assert all(re.search(rf"^{target}:", MAKEFILE, re.M) for target in targets)
    assert importlib.util.find_spec("hatchling.__main__")


def test_a_release_builds_each_image_with_arguments_that_it_has() -> None:
    images = yaml.safe_load(WORKFLOW)["jobs"]["images"]["strategy"]["matrix"]["include"]
    assert [each["image"] for each in images] == ["api", "worker", "worker"]
    overlay = compose("compose.cuda.yaml")["services"]["worker"]["build"]["args"]
    for each in images:
        given = dict(re.findall(r"--build-arg (\w+)=(\S+)", each["arguments"]))
        assert set(given) <= set(image(each["file"]).arguments)
    assert dict(re.findall(r"--build-arg (\w+)=(\S+)", images[2]["arguments"])) == overlay


def test_the_packages_of_the_check_have_hashes() -> None:
    text = (ROOT / "scripts/check_deploy.txt").read_text().replace("\\\n", " ")
    assert all("--hash=sha256:" in line for line in text.splitlines())
    assert {"helm-python-sdk", "kubernetes-validate"} <= set(re.findall(r"^([\w-]+)==", text, re.M))
