"""The commands that start a service, plan its memory, compile its programs or examine it."""

import asyncio
import os
import socket
import sys
from collections.abc import Collection
from importlib.util import find_spec
from typing import Annotated

import typer

from tuneserve_engine.core.errors import REFUSED
from tuneserve_engine.core.gpus import DEVICE_KINDS, DRIVERS, GPU_MIB
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.telemetry import logs
from tuneserve_server.cli import supervisor
from tuneserve_server.cli.output import FAILED, print_json
from tuneserve_server.cli.setting_options import Given, command, say, settings_from, variable
from tuneserve_server.listening import CannotStart, listen
from tuneserve_server.settings import ApiSettings


@command(ApiSettings, WorkerSettings)
def up(given: Given) -> None:
    """Start the API and a worker, and keep both running."""
    settings = settings_from(ApiSettings, given)
    # Settings that a child would refuse are reported before the port is checked: another service
    # on the port must not be taken for the child.
    worker_settings = settings_from(WorkerSettings, given)
    if worker_settings.sample_only:
        say(
            "sample_only is set, and models would wait for a worker that trains; unset it, and "
            "start workers that only sample by tuneserve worker --sample-only"
        )
        raise typer.Exit(REFUSED)
    from tuneserve_server.cli.killed import tell_killed  # refusals need not wait for these
    from tuneserve_server.cli.readiness import report_progress

    if settings.log_format == "json":
        logs.start("up", settings)
    _check_engine()
    _check_port(settings)
    # Every restarted worker gets the same name, so that it takes over at once.
    given.setdefault("worker_name", worker_settings.worker_name or _worker_name(settings))
    environment = _environment(given)
    children = [
        supervisor.ChildSpec(name, supervisor.child_command(name), environment)
        for name in ("api", "worker")
    ]

    async def ended(name: str, status: int) -> None:
        if name == "worker" and supervisor.is_from_outside(status):
            await tell_killed(settings, given["worker_name"])

    keeper = supervisor.Supervisor(children, say, supervisor.RestartPolicy(), ended)

    async def run() -> int:
        return await keeper.supervise(lambda: asyncio.create_task(report_progress(settings, say)))

    raise typer.Exit(asyncio.run(run()))


@command(ApiSettings)
def api(given: Given) -> None:
    """Start the API process alone."""
    settings = settings_from(ApiSettings, given)
    from tuneserve_server.serve import serve_api  # other commands need not wait for the application

    raise typer.Exit(serve_api(settings))


@command(WorkerSettings)
def worker(given: Given) -> None:
    """Start a worker alone, for a running API process."""
    settings_from(WorkerSettings, given)
    _check_engine()
    os.execve(
        sys.executable, [sys.executable, "-m", "tuneserve_engine.worker"], _environment(given)
    )


_GPU = Annotated[
    str | None,
    typer.Option(metavar="|".join(GPU_MIB), help="Plan for this GPU, which need not be there."),
]


@command(WorkerSettings, further={"device": _GPU}, json="Print JSON instead of text.")
def plan(given: Given) -> None:
    """Show a worker's plan of the device's memory, line by line."""
    flags = ["--json"] if given.pop("json", None) is not None else []
    if device := given.pop("device", None):
        _check_choice("--device", device, GPU_MIB)
        flags += ["--device", device]
    settings_from(WorkerSettings, given)
    _check_engine()
    command = [sys.executable, "-m", "tuneserve_engine.backend.jax.memory.report", *flags]
    os.execve(sys.executable, command, _environment(given))


_COMPILED = {
    "out": Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Directory for the programs. Default, without --device: that of the worker.",
        ),
    ],
    "device": Annotated[
        str | None,
        typer.Option(
            metavar="|".join(DEVICE_KINDS), help="Compile for this GPU, which need not be there."
        ),
    ],
    "driver": Annotated[
        str | None,
        typer.Option(
            metavar="|".join(DRIVERS),
            help=f"Branch of the absent GPU's driver. Default: {max(DRIVERS)}.",
        ),
    ],
}


@command(WorkerSettings, further=_COMPILED, json="Print JSON instead of text.")
def compile_(given: Given) -> None:
    """Compile a worker's programs ahead of its start, without loading the base model."""
    flags = ["--json"] if given.pop("json", None) is not None else []
    choices = {"device": DEVICE_KINDS, "driver": DRIVERS}
    for name in _COMPILED:
        if (value := given.pop(name, None)) is not None:
            if name in choices:
                _check_choice(f"--{name}", value, choices[name])
            flags += [f"--{name}", value]
    settings_from(WorkerSettings, given)
    _check_engine()
    command = [sys.executable, "-m", "tuneserve_engine.backend.jax.precompile", *flags]
    os.execve(sys.executable, command, _environment(given))


@command(ApiSettings, WorkerSettings, json="Print JSON instead of text.")
def doctor(given: Given) -> None:
    """Check whether a service with these settings would run here. Exits with status 1 if not."""
    as_json = given.pop("json", None) is not None
    settings = settings_from(ApiSettings, given)
    settings_from(WorkerSettings, given)
    from tuneserve_server.cli import doctor as checks  # refusals need not wait for it

    findings = checks.examine(settings, _environment(given))
    if as_json:
        print_json(checks.facts(findings))
    else:
        for each in findings:
            typer.echo(f"{each.level:<4}  {each.name:<9}  {each.text}")
    raise typer.Exit(FAILED if checks.has_failed(findings) else 0)


def _check_choice(option: str, value: str, choices: Collection[str]) -> None:
    """Exit with the reason unless the value is one of the choices."""
    if value not in choices:
        say(f"{option} is {value!r}; it must be {' or '.join(choices)}")
        raise typer.Exit(REFUSED)


def _worker_name(settings: ApiSettings) -> str:
    """Return a worker name that no other ``tuneserve up`` on the same store uses."""
    if settings.store_kind == "sqlite":
        return "worker"
    return f"worker-{socket.gethostname()}-{settings.port}"


def _environment(given: Given) -> dict[str, str]:
    """Return this environment plus the options: child processes read their settings from it."""
    return {**os.environ, **{variable(name): text for name, text in given.items()}}


def _check_engine() -> None:
    if find_spec("jax") is None:
        say("a worker needs the engine, which is not installed: pip install '.[engine]' in a clone")
        raise typer.Exit(REFUSED)


def _check_port(settings: ApiSettings) -> None:
    try:
        listen(settings).close()
    except CannotStart as error:
        say(str(error))
        raise typer.Exit(REFUSED) from None
