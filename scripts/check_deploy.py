"""Render the chart by Helm, and check it and the manifests of Kubernetes against its schemas.

The packages that do this are in scripts/check_deploy.txt: `make check-deploy` installs them.
"""

import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from helm_python.chart import Chart, lint

DEPLOY = Path(__file__).parent.parent / "deploy"
CHART = DEPLOY / "helm" / "tuneserve"
KUBERNETES = ("1.29", "1.33", "1.37")
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"redis": {"enabled": False}, "files": {"bucket": "s3://a/b", "bucketSecret": "aws"}},
    {
        "pullSecrets": ["mine"],
        "api": {"replicas": 2, "env": {"TUNESERVE_ALLOWED_HOSTS": "train.example.org"}},
        "worker": {
            "gpus": 0,
            "env": {"TUNESERVE_SAMPLE_ROWS": 64},
            "nodeSelector": {"gpu": "h200"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        },
        "files": {"storageClass": "nfs"},
    },
)

Objects = dict[tuple[str, str], Any]


def by_name(documents: list[Any]) -> Objects:
    """Return the objects by kind and name."""
    return {(each["kind"], each["metadata"]["name"]): each for each in documents if each}


def plain() -> Objects:
    """Return the manifests of deploy/kubernetes, with the images of the kustomization."""
    folder = DEPLOY / "kubernetes"
    chosen = yaml.safe_load((folder / "kustomization.yaml").read_text())
    images = {each["name"]: f"{each['newName']}:{each['newTag']}" for each in chosen["images"]}
    found = by_name(
        [
            document
            for name in chosen["resources"]
            for document in yaml.safe_load_all((folder / name).read_text())
        ]
    )
    for each in found.values():
        pod = each["spec"].get("template", {}).get("spec", {})
        for container in pod.get("containers", []):
            container["image"] = images.get(container["image"], container["image"])
    return found


def rendered(values: dict[str, Any]) -> Objects:
    """Return the objects that Helm makes of the chart with the values."""
    with Chart.load(CHART) as chart:
        texts = chart.render(values, name="tuneserve", namespace="default")
    manifests = [text for path, text in texts.items() if path.endswith(".yaml")]
    return by_name([document for text in manifests for document in yaml.safe_load_all(text)])


def canonical(value: Any) -> Any:
    """Return the object with variables in the order of their names, without annotations."""
    if isinstance(value, dict):
        kept = {name: canonical(each) for name, each in value.items() if name != "annotations"}
        if isinstance(kept.get("env"), list):
            kept["env"] = sorted(kept["env"], key=lambda each: str(each["name"]))
        return kept
    return [canonical(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    """Run the checks; end with status 1 and the problems if there are any."""
    problems = [
        each["error"] for each in lint(CHART, strict=True)["messages"] if each["severity"] > 1
    ]
    everything = [plain(), *map(rendered, VARIANTS)]
    for objects in everything:
        for (kind, name), each in objects.items():
            for version in KUBERNETES:
                try:
                    kubernetes_validate.validate(each, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    problems.append(f"{kind} {name}, Kubernetes {version}: {error}")
    if canonical(everything[0]) != canonical(everything[1]):
        problems.append("the chart with its own values differs from deploy/kubernetes")
    if problems:
        sys.exit("\n".join(map(str, problems)))
    print(f"{sum(map(len, everything))} objects are valid; the chart equals deploy/kubernetes")


if __name__ == "__main__":
    main()
