"""``tuneserve keys`` and ``tuneserve tenants``: an operator's commands to a running API process.

The commands use the socket in the data directory of the process.
"""

import re
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import quote

import typer

from tuneserve_engine.core.errors import REFUSED
from tuneserve_engine.core.records import Scope
from tuneserve_server.access.tenant_names import TENANT_PATTERN
from tuneserve_server.cli import output
from tuneserve_server.cli.output import day, print_json, print_table

keys = output.application(no_args_is_help=True, help="Manage API keys: create, list, revoke.")
tenants = output.application(no_args_is_help=True, help="Manage tenants: their weights and limits.")

_TIMEOUT_S = 30.0
_AS_SET = "none"

DataDir = Annotated[
    Path | None, typer.Option(help="Data directory of the API process.", metavar="DIR")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


# --- keys ---------------------------------------------------------------------------------------


@keys.command("create")
def create_key(  # noqa: PLR0913 - options
    tenant: Annotated[
        str, typer.Option(help="Tenant that owns the key. A new name creates a tenant.")
    ],
    name: Annotated[str, typer.Option(help="Label of the key in the list.")] = "",
    scope: Annotated[
        list[Scope] | None,
        typer.Option(
            help="Scope of the key. Repeat the option for several. Default: train and sample."
        ),
    ] = None,
    expires_days: Annotated[
        int | None, typer.Option(help="Days until the key expires. Default: never.", metavar="N")
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and show it once: the server stores only its HMAC."""
    _check_tenant(tenant)
    new: dict[str, Any] = {"tenant": tenant, "name": name, "expires_days": expires_days}
    if scope:
        new["scopes"] = [each.value for each in scope]
    made = call("POST", "/keys", data_dir, new)
    if as_json:
        print_json(made)
        return
    typer.echo(made["key"])
    scopes = " and ".join(made["scopes"])
    typer.echo(
        f"key {made['id']} of tenant {made['tenant']} for {scopes}, {_expiry(made)}; save it now, "
        "because it cannot be shown again",
        err=True,
    )


@keys.command("list")
def list_keys(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List all keys, newest first. Their secrets are not stored."""
    found = call("GET", "/keys", data_dir)
    if as_json:
        print_json(found)
        return
    rows = [
        [
            each["id"],
            each["tenant"],
            ",".join(each["scopes"]),
            each["state"],
            day(each["created_s"]),
            day(each["expires_s"]),
            each["name"],
        ]
        for each in found
    ]
    head = ["id", "tenant", "scopes", "state", "created (UTC)", "expires (UTC)", "name"]
    none = "no keys yet; make one with: tuneserve keys create --tenant NAME"
    print_table(head, rows, empty=none)


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key. It is refused within 5 s. ID is the middle part of the key."""
    if key_id.count("-") == 2:
        _end("give the id alone, the middle part of the key: never put a secret on a command line")
    revoked = call("POST", f"/keys/{_part(key_id)}/revoke", data_dir)
    if as_json:
        print_json(revoked)
        return
    typer.echo(f"key {revoked['id']} of tenant {revoked['tenant']} is revoked")


# --- tenants ------------------------------------------------------------------------------------

_COLUMNS = [
    *("tenant", "weight", "max_jobs", "max_models", "max_checkpoints", "max_checkpoint_bytes"),
    "device_s_a_day",
]


@tenants.command("list")
def list_tenants(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the tenants that have keys, or their own weight or limits."""
    found = call("GET", "/tenants", data_dir)
    if as_json:
        print_json(found)
    else:
        _print_tenants(found)


@tenants.command("set")
def set_tenant(  # noqa: PLR0913 - options
    name: str,
    weight: Annotated[
        str | None, typer.Option(help="Share of device time; the default of a tenant is 1.")
    ] = None,
    max_jobs: Annotated[
        str | None, typer.Option(help="Largest number of unfinished requests.")
    ] = None,
    max_models: Annotated[str | None, typer.Option(help="Largest number of models in use.")] = None,
    max_checkpoints: Annotated[
        str | None, typer.Option(help="Largest number of checkpoints.")
    ] = None,
    max_checkpoint_bytes: Annotated[
        str | None,
        typer.Option(help="Size of checkpoints, such as 10GB, from which no more can be saved."),
    ] = None,
    device_s_a_day: Annotated[
        str | None, typer.Option(help="Budget of device time per day (UTC), such as 1h30m.")
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Set the weight or limits of a tenant. The value "none" restores the one of the settings."""
    _check_tenant(name)
    given = {
        "weight": weight,
        "max_jobs": max_jobs,
        "max_models": max_models,
        "max_checkpoints": max_checkpoints,
        "max_checkpoint_bytes": max_checkpoint_bytes,
        "device_s_a_day": device_s_a_day,
    }
    change = {
        field: None if text == _AS_SET else _value(field, text)
        for field, text in given.items()
        if text is not None
    }
    if not change:
        _end("nothing to set; give a weight or a limit: tuneserve tenants set --help")
    changed = call("PATCH", f"/tenants/{_part(name)}", data_dir, change)
    if as_json:
        print_json(changed)
    else:
        _print_tenants([changed])


def _check_tenant(name: str) -> None:
    if not re.fullmatch(TENANT_PATTERN, name):
        _end(
            f"the tenant's name is {name[:80]!r}; it must be 1 to 64 letters, digits, '.', '_' and "
            "'-', starting with a letter or digit"
        )


def _print_tenants(found: list[dict[str, Any]]) -> None:
    rows = [["-" if each[c] is None else f"{each[c]}" for c in _COLUMNS] for each in found]
    none = "no tenants have keys, or a weight or limits of their own"
    print_table(_COLUMNS, rows, empty=none)


# --- the connection -----------------------------------------------------------------------------


def call(method: str, path: str, data_dir: Path | None, body: Any = None) -> Any:
    """Return the answer of the API process; without one, end the command with the reason."""
    import httpx  # wrong arguments are refused before it is imported

    socket = output.settings_here(data_dir).admin_socket
    try:
        return ask(socket, method, path, body)
    except httpx.TransportError as error:
        _nobody_at(socket, str(error))


def ask(socket: Path, method: str, path: str, body: Any = None) -> Any:
    """Return the answer as ``call`` does, but raise ``TransportError`` if the socket is dead."""
    import httpx

    if not socket.is_socket():
        raise httpx.ConnectError("there is no such socket")
    transport = httpx.HTTPTransport(uds=str(socket))
    with httpx.Client(transport=transport, base_url="http://admin", timeout=_TIMEOUT_S) as http:
        answer = http.request(method, path, json=body)
    if answer.status_code != 200:
        _end(answer.json()["detail"], status=1)
    return answer.json()


def _nobody_at(socket: Path, reason: str) -> NoReturn:
    _end(
        f"no API process answers at {socket.absolute()} ({reason}); start one (tuneserve up or "
        "tuneserve api), name its data directory with --data-dir, and run as the same user",
        status=1,
    )


def _part(text: str) -> str:
    """Return the text quoted as one part of a path."""
    return quote(text, safe="")


def _end(text: str, status: int = REFUSED) -> NoReturn:
    output.end(text, status)


def _value(field: str, text: str) -> str | int | float:
    """Return the value of a limit. Ends the command for one that is not a size or a duration."""
    from tuneserve_engine.settings.units import bytes_of, seconds_of  # imports pydantic

    option = f"--{field.replace('_', '-')}"
    try:
        if field == "max_checkpoint_bytes":
            return bytes_of(text)
        return seconds_of(text) if field == "device_s_a_day" else text
    except ValueError as error:
        _end(f"{option} is {text!r}; {error}")


def _expiry(key: dict[str, Any]) -> str:
    return "no expiry" if key["expires_s"] is None else f"until {day(key['expires_s'])} UTC"
