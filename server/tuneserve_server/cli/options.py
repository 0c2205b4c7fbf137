"""The shared options of the commands for a running server, their client, and its errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import tuneserve_client as sdk  # its names are imported on first use
from tuneserve_client.defaults import DEFAULT_URL, OPEN_KEY
from tuneserve_engine.core.errors import REFUSED
from tuneserve_server.cli.output import FAILED, end, this_command

Url = Annotated[
    str,
    typer.Option(envvar=["TUNESERVE_URL", "TINKER_BASE_URL"], help="Address of the server."),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=["TUNESERVE_API_KEY", "TINKER_API_KEY"],
        help="API key. Set it in the environment, because other users of the machine can see "
        "options. Default: tml-local, which a server without keys accepts.",
        metavar="KEY",
    ),
]
What = Annotated[
    str | None,
    typer.Argument(
        metavar="[PATH|BASE_MODEL]",
        help="Checkpoint (path, run name, start of the id, or last) or base model. Default: the "
        "only base model.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Force = Annotated[
    bool, typer.Option("--force", help="Write into a directory that is not empty; replace files.")
]

HERE = DEFAULT_URL
QUICK_S, PATIENT_S = 3.0, 300.0
"""The times for which a request is retried.

``QUICK_S`` is for a command that a user waits for. ``PATIENT_S`` is for a command that must not
lose its work when the server restarts.
"""


@contextmanager
def connected(
    url: str, api_key: str | None, *, deadline_s: float = QUICK_S, name: str = "tuneserve"
) -> Iterator["sdk.Client"]:
    """Yield a client. An error of the client ends the command with a one-line reason."""
    if not url.startswith(("http://", "https://")):
        end(f"the address is {url!r}; it must begin with http:// or https://", REFUSED)
    import httpx  # a wrong argument is refused before these are imported
    from pydantic import ValidationError

    try:
        if deadline_s > QUICK_S:
            _knock(url)
        with sdk.Client(url, api_key or OPEN_KEY, deadline_s=deadline_s, name=name) as client:
            yield client
    except sdk.Unauthorized as error:
        way_out = "" if api_key else "; give a key with TUNESERVE_API_KEY or --api-key"
        end(f"{error}{way_out}", FAILED)
    except sdk.Unreachable as error:
        way_out = (
            f"; start one with: {this_command()} up" if url == HERE and error.__cause__ else ""
        )
        end(f"{error}{way_out}", FAILED)
    except (sdk.TuneserveError, OSError, ImportError) as error:
        end(_in_options(str(error)), FAILED)
    except ValidationError as error:
        end("; ".join(f"{_place(each)}: {each['msg']}" for each in error.errors()), REFUSED)
    except (ValueError, httpx.InvalidURL) as error:
        end(str(error), REFUSED)


_OPTIONS = {
    **{"lora_config.rank": "--rank", "adapter.rank": "--rank", "adapter.kind": "--adapter"},
    **{"adapter.unfreeze_ratio": "--unfreeze-ratio", "adapter.form": "--form"},
    **{"adam_params.learning_rate": "--learning-rate"},
}
"""The options by the field of the API that each sets."""


def _in_options(text: str) -> str:
    """Return the server's reason with options in place of fields of the API."""
    for field, option in _OPTIONS.items():
        text = text.replace(field, option)
    return text


def _knock(url: str) -> None:
    """Raise at once if no server answers, which the client would report only after minutes."""
    with sdk.Client(url, OPEN_KEY, deadline_s=QUICK_S) as client:
        client.health()


def _place(problem: Any) -> str:
    return ".".join(map(str, problem["loc"]))


class ListFirst(TyperGroup):
    """A group of commands whose default command is ``list``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's, or its copy's
        is_listing = not args or (args[0].startswith("-") and args[0] not in ("-h", "--help"))
        if is_listing and not ctx.resilient_parsing:  # that of a shell's completion
            args = ["list", *args]
        rest: list[str] = super().parse_args(ctx, args)
        return rest
