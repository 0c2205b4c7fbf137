"""The documentation names every setting with its default, every route and every error code."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from tuneserve_engine.settings.common import TINY_MODEL, CommonSettings
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.telemetry.metric_names import WORKER_METRICS
from tuneserve_server import errors
from tuneserve_server.app import AT_ROOT, PREFIX, ROUTERS
from tuneserve_server.metric_names import API_METRICS
from tuneserve_server.settings import ApiSettings

ROOT = Path(__file__).parent.parent
SETTINGS = {"Both": CommonSettings, "API": ApiSettings, "Worker": WorkerSettings}


def documented(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def own_fields(part: str) -> list[tuple[str, object, str]]:
    shared = CommonSettings.model_fields if part != "Both" else {}
    return [
        (name, None if field.default_factory else field.default, field.description or "")
        for name, field in SETTINGS[part].model_fields.items()
        if name not in shared
    ]


@pytest.mark.parametrize("part", SETTINGS)
def test_every_setting_is_documented_with_its_default_and_description(part):
    page = documented("configuration.md")
    for name, default, description in own_fields(part):
        shown = "the embedded model" if default == str(TINY_MODEL) else f"`{default}`"
        row = f"| `{name}` | {'none' if default in (None, '') else shown} | {description} |"
        assert row in page, f"docs/configuration.md lacks the row\n{row}"


def test_no_setting_is_documented_that_does_not_exist():
    known = {name for part in SETTINGS for name, _, _ in own_fields(part)}
    assert set(re.findall(r"^\| `(\w+)` \|", documented("configuration.md"), re.M)) == known


def test_the_documented_routes_are_the_routes():
    mounted = {
        f"{method} {prefix}{route.path}"
        for prefix, modules in ((PREFIX, ROUTERS), ("", AT_ROOT))
        for module in modules
        for route in module.router.routes
        for method in route.methods
    }
    assert set(re.findall(r"^\| `(\w+ /[^\s`]*)` \|", documented("api.md"), re.M)) == mounted


def test_the_documented_metrics_are_the_metrics_with_their_descriptions():
    rows = re.findall(r"^\| `tuneserve_(\w+)` \| (.*) \|$", documented("api.md"), re.M)
    meanings = {name: meaning for name, meaning in rows if name != "workers"}
    assert meanings == WORKER_METRICS | API_METRICS
    assert "workers" in dict(rows)


def test_dashboard_and_alerts_query_existing_metrics():
    known = {f"tuneserve_{name}" for name in [*WORKER_METRICS, *API_METRICS, "workers"]}
    known |= {f"{name}_bucket" for name in known if name.endswith("_duration_seconds")}
    dashboard = json.loads(documented("grafana/tuneserve.json"))
    asked = [each["expr"] for panel in dashboard["panels"] for each in panel["targets"]]
    assert len(asked) == len(dashboard["panels"]) > 0
    alerts = documented("grafana/alerts.yaml")
    rules = re.findall(r"expr: (?:>-\n)?((?:.|\n)+?)\n +(?:for|labels):", alerts)
    assert len(rules) == alerts.count("alert:")
    for expression in asked + rules:
        named = set(re.findall(r"\btuneserve_\w+", expression))
        assert named and named <= known, (expression, named - known)


def test_every_error_code_is_documented_with_its_status():
    page = documented("api.md")
    for error in errors.ApiError.__subclasses__():
        assert re.search(rf"^\| {error.status} \| `{error.code}` \|", page, re.M), error


def test_every_make_target_of_the_readme_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"make ([a-z-]+)", text)) <= targets


def test_every_relative_link_leads_to_a_file():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("docs/*/*.md")]:
        if ".venv" in page.parts or ".compat" in page.parts:
            continue
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_the_constraints_pin_every_direct_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    wanted = list(project["dependencies"])
    for name, extra in project["optional-dependencies"].items():
        # Harnesses have an environment of their own: tests/compat/requirements-eval.txt. Trackers
        # are installed by their users.
        wanted += extra if name not in {"eval", "mlflow", "trackio", "wandb"} else []
    names = {re.split(r"[\[=<>! ]", spec)[0].lower() for spec in wanted} - {"tuneserve"}
    assert names <= pinned, names - pinned


def test_every_example_is_short():
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) < 80, path
