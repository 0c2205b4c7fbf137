"""Reads the container files without Docker: images, and services with their variables."""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"


@dataclass
class Image:
    """The last stage of a Dockerfile, with the files and commands of its build stage."""

    arguments: dict[str, str] = field(default_factory=dict)  # build arguments with their defaults
    bases: list[str] = field(default_factory=list)  # base images of all stages
    copied: list[str] = field(default_factory=list)  # files copied from the build context
    runs: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    # values of USER, WORKDIR, VOLUME and EXPOSE
    settings: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    health_options: dict[str, str] = field(default_factory=dict)


def image(dockerfile: str, **arguments: str) -> Image:
    """The image that a build with the arguments produces.

    Raises ``ValueError`` for an instruction that this reader does not know.
    """
    found = Image()
    for line in _logical_lines((ROOT / dockerfile).read_text()):
        name, _, rest = line.partition(" ")
        _READERS.get(name, _unknown)(found, rest.strip(), arguments)
    return found


def _logical_lines(text: str) -> list[str]:
    kept = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return "\n".join(kept).replace("\\\n", " ").splitlines()


def _unknown(found: Image, rest: str, arguments: dict[str, str]) -> None:
    raise ValueError(f"an instruction that the tests cannot read, about {rest!r}")


def _filled(found: Image, text: str) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda m: found.arguments.get(m[1], m[0]), text)


def _from(found: Image, rest: str, _: dict[str, str]) -> None:
    found.bases.append(_filled(found, rest).split()[0])
    found.environment.clear()  # a stage inherits nothing from the one before


def _arg(found: Image, rest: str, arguments: dict[str, str]) -> None:
    name, _, default = rest.partition("=")
    found.arguments[name] = arguments.get(name, default)


def _copy(found: Image, rest: str, _: dict[str, str]) -> None:
    if not rest.startswith("--from"):
        found.copied += rest.split()[:-1]


def _run(found: Image, rest: str, _: dict[str, str]) -> None:
    found.runs.append(" ".join(_filled(found, rest).split()))


def _env(found: Image, rest: str, _: dict[str, str]) -> None:
    found.environment |= dict(word.split("=", 1) for word in shlex.split(rest))


def _cmd(found: Image, rest: str, _: dict[str, str]) -> None:
    found.command = json.loads(rest)


def _healthcheck(found: Image, rest: str, _: dict[str, str]) -> None:
    options, _, command = rest.partition("CMD")
    found.health = json.loads(command)
    found.health_options = dict(word.removeprefix("--").split("=") for word in options.split())


def _setting(name: str) -> Any:
    def read(found: Image, rest: str, _: dict[str, str]) -> None:
        found.settings[name] = rest

    return read


_READERS = {
    "FROM": _from,
    "ARG": _arg,
    "COPY": _copy,
    "RUN": _run,
    "ENV": _env,
    "CMD": _cmd,
    "HEALTHCHECK": _healthcheck,
    **{name: _setting(name) for name in ("USER", "WORKDIR", "VOLUME", "EXPOSE")},
}


def compose(name: str, **variables: str) -> dict[str, Any]:
    """The compose file with its variables filled in.

    Raises ``KeyError`` for a required variable that is not given.
    """
    read: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())
    return _interpolated(read, variables)


def _interpolated(value: Any, variables: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolated(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [_interpolated(each, variables) for each in value]
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables[match[1]]

    return re.sub(r"\$\$|\$\{(\w+)(?::\?[^}]*)?\}", fill, value)


def image_of(service: dict[str, Any]) -> Image:
    """The image of a service that the compose file builds."""
    build = service["build"]
    return image(build["dockerfile"], **build.get("args", {}))
