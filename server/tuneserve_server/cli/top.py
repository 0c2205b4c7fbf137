"""``tuneserve top``: the current load of the workers."""

from typing import Annotated

import typer

from tuneserve_server.cli.options import HERE, ApiKey, AsJson, Url, connected


def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between updates.")] = 2.0,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show the load of the workers: device use, tokens per second, adapters, the queue."""
    from tuneserve_server.cli.top_view import show  # a wrong argument is refused before

    with connected(url, api_key, name="top") as client:
        show(client, url, once=once, interval_s=interval, as_json=as_json)
