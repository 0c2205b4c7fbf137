"""The files that start workers of several processes, or that only sample, and Kubernetes.

``tests/faults/test_kills_hosts.py`` runs such processes.
"""

import importlib.util
import re
from typing import Any

import pytest
import yaml

from tests.containers import DOCKER, compose
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.telemetry.metric_names import WORKER_METRICS
from tuneserve_engine.worker.worker import STOP_S

HOSTS: dict[str, Any] = compose("compose.hosts.yaml", HOSTS_KEY="k" * 32)
WORKER = compose("compose.yaml", REDIS_PASSWORD="a1b2")["services"]["worker"]
GROUP, POLICY = yaml.safe_load_all((DOCKER / "kubernetes.hosts.yaml").read_text())
POD = GROUP["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
(CONTAINER,) = POD["containers"]
SIZE = GROUP["spec"]["leaderWorkerTemplate"]["size"]
PORT = WorkerSettings.model_fields["hosts_port"].default


def settings_of(environment: dict[str, str]) -> WorkerSettings:
    """The settings of a process with this environment. All its variables are settings."""
    given = {name.removeprefix("TUNESERVE_").lower(): text for name, text in environment.items()}
    assert set(given) <= set(WorkerSettings.model_fields)
    return WorkerSettings(**given)


def of_pod(index: int) -> WorkerSettings:
    """The settings in one pod, with the variables of LWS and of the secret filled in."""
    filled = {"LWS_LEADER_ADDRESS": "tuneserve-worker-0.x.y", "LWS_WORKER_INDEX": str(index)}
    return settings_of(
        {
            each["name"]: re.sub(r"\$\((\w+)\)", lambda m: filled[m[1]], each["value"])
            if "value" in each
            else "redis://:secret-of-16-chars@redis:6379/0"
            for each in CONTAINER["env"]
        }
    )


def test_the_processes_of_compose_know_each_other_by_their_services() -> None:
    services = HOSTS["services"]
    found = [settings_of(services[name]["environment"]) for name in ("worker", "follower")]
    assert [each.own_host_number for each in found] == [0, 1]
    assert all(each.hosts == list(services) for each in found)
    assert found[0].hosts_key == found[1].hosts_key == "k" * 32
    assert all("hosts" in service["networks"] for service in services.values())


def test_a_follower_of_compose_has_the_rights_of_the_worker_and_no_store() -> None:
    follower = HOSTS["services"]["follower"]
    for name in (
        *("image", "init", "read_only", "tmpfs", "cap_drop", "security_opt", "restart"),
        *("logging", "volumes", "env_file", "stop_grace_period"),
    ):
        assert follower[name] == WORKER[name], name
    assert "store" not in follower["networks"] and "ports" not in follower


def test_without_a_key_nothing_starts() -> None:
    with pytest.raises(KeyError, match="HOSTS_KEY"):
        compose("compose.hosts.yaml")


def test_every_pod_knows_its_number_and_the_leader() -> None:
    pods = [of_pod(index) for index in range(SIZE)]
    assert [each.own_host_number for each in pods] == list(range(SIZE))
    for each in pods:
        assert each.hosts[0] == "tuneserve-worker-0.x.y" and len(each.hosts) == SIZE
        assert (each.devices, each.hosts_port) == ("auto", PORT)


def test_a_pod_has_no_more_rights_than_it_needs() -> None:
    assert POD["securityContext"]["runAsNonRoot"] and POD["securityContext"]["runAsUser"] == 10001
    assert POD["automountServiceAccountToken"] is False
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_only_the_pods_of_the_worker_reach_its_ports() -> None:
    labels = GROUP["spec"]["leaderWorkerTemplate"]["workerTemplate"]["metadata"]["labels"]
    selector = {"podSelector": {"matchLabels": labels}}
    assert POLICY["spec"]["podSelector"] == selector["podSelector"]
    assert POLICY["spec"]["ingress"] == [{"from": [selector]}]
    assert CONTAINER["ports"] == [{"containerPort": PORT}, {"containerPort": PORT + 1}]


def test_a_pod_is_alive_as_long_as_its_worker_says_so() -> None:
    for probe in ("startupProbe", "livenessProbe"):
        program, flag, module = CONTAINER[probe]["exec"]["command"]
        assert (program, flag) == ("python", "-m") and importlib.util.find_spec(module)
    assert POD["terminationGracePeriodSeconds"] >= STOP_S + 5
    mounts = {each["name"] for each in CONTAINER["volumeMounts"]}
    assert mounts == {each["name"] for each in POD["volumes"]}


# --- workers that only sample ---------------------------------------------------------------------

DEPLOYMENT, SCALING = yaml.safe_load_all((DOCKER / "kubernetes.samplers.yaml").read_text())
SAMPLER_POD = DEPLOYMENT["spec"]["template"]["spec"]
(SAMPLER,) = SAMPLER_POD["containers"]


def test_a_sampler_only_samples_and_has_the_rights_of_any_worker() -> None:
    given = {each["name"]: each.get("value", "redis://redis:6379/0") for each in SAMPLER["env"]}
    settings = settings_of(given)
    assert settings.sample_only
    for name in ("securityContext", "startupProbe", "livenessProbe"):
        assert SAMPLER[name] == CONTAINER[name], name
    for name in ("securityContext", "automountServiceAccountToken"):
        assert SAMPLER_POD[name] == POD[name], name
    assert SAMPLER_POD["terminationGracePeriodSeconds"] >= STOP_S + 5
    assert "ports" not in SAMPLER
    mounts = {each["name"] for each in SAMPLER["volumeMounts"]}
    assert mounts == {each["name"] for each in SAMPLER_POD["volumes"]}
    assert (
        DEPLOYMENT["spec"]["selector"]["matchLabels"]
        == (DEPLOYMENT["spec"]["template"]["metadata"]["labels"])
    )


def test_the_number_of_samplers_follows_a_metric_of_ours() -> None:
    assert SCALING["spec"]["scaleTargetRef"]["name"] == DEPLOYMENT["metadata"]["name"]
    (trigger,) = SCALING["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    form = r'sum\(max by \(worker\) \(tuneserve_(\w+)\{base_model="(.+)"\}\)\) / (\d+)'
    found = re.fullmatch(form, query)
    assert found is not None and found[1] in WORKER_METRICS
    given = {each["name"]: each.get("value") for each in SAMPLER["env"]}
    assert found[2] == given["TUNESERVE_BASE_MODEL"]
    assert found[3] == given["TUNESERVE_SAMPLE_ROWS"]
