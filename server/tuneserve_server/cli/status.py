"""``tuneserve status`` and ``tuneserve models``: the state of a server and its base models."""

from typing import TYPE_CHECKING

import typer

from tuneserve_server.cli.options import HERE, ApiKey, AsJson, Url, connected
from tuneserve_server.cli.output import FAILED, print_facts, print_json, print_table

if TYPE_CHECKING:
    from tuneserve_client.wire import types


def status(url: Url = HERE, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show whether a server works: its workers, store and disk. Exits with status 1 if not."""
    with connected(url, api_key) as client:
        health = client.health()
    problems = _problems(health)
    if as_json:
        print_json({"url": url, "problems": problems, **health.model_dump(mode="json")})
    else:
        print_facts(
            {
                "server": url,
                "page": f"{url}/page/",
                "keys": "required" if health.keys_required else "not required",
                "base models": [_model(each) for each in health.base_models] or ["none yet"],
                "store": f"{health.store}, on disk before requests are accepted: "
                f"{health.durability}; check: {health.store_check}",
                "disk": health.disk,
                "problems": problems or ["none"],
            }
        )
    raise typer.Exit(FAILED if problems else 0)


def models(url: Url = HERE, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the base models that a server trains and samples."""
    with connected(url, api_key) as client:
        found = client.health().base_models
    if as_json:
        print_json([each.model_dump(mode="json") for each in found])
        return
    rows = [
        [
            each.name,
            each.architecture or "-",
            f"{each.context_length or '-'}",
            f"{each.max_rank or '-'}",
            f"{each.workers}",
            each.warming or "ready",
        ]
        for each in found
    ]
    head = ["name", "architecture", "context", "max rank", "workers", "programs"]
    print_table(head, rows, empty="no worker has offered a base model yet; see its log")


def _model(model: "types.ServedBaseModel") -> str:
    samplers = f", {model.samplers} only sample" if model.samplers else ""
    state = f"; {model.warming}" if model.warming else ""
    return f"{model.name}, workers: {model.workers}{samplers}{state}"


def _problems(health: "types.HealthResponse") -> list[str]:
    problems = [each.failing for each in health.base_models if each.failing]
    problems += [each for each in (health.store_damage, health.files_kept) if each]
    if health.worker == "absent":
        problems.append("no worker trains here: start one, or read the log of yours")
    if health.disk == "full":
        problems.append("the disk is nearly full, and new requests are refused: make room")
    return problems
