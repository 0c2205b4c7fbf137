"""``tuneserve conformance``: checks whether a server speaks the wire protocol."""

from dataclasses import asdict
from typing import Annotated

import typer

from tuneserve_client.defaults import OPEN_KEY
from tuneserve_engine.core.errors import REFUSED
from tuneserve_server.cli.options import HERE, ApiKey, AsJson
from tuneserve_server.cli.output import FAILED, end, print_json, print_table


def conformance(  # noqa: PLR0913 - options
    url: Annotated[str, typer.Argument(help="Address of the server.")] = HERE,
    api_key: ApiKey = None,
    base_model: Annotated[
        str | None,
        typer.Option(help="Base model. Default: the first that trains.", metavar="NAME"),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Name of a check; repeat it for more. Default: all.", metavar="NAME"),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the checks, and do not ask the server.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check any server of the Tinker protocol from outside. Exits with status 1 if a check fails.

    The checks create models of rank 4, train a few steps on a dozen tokens, sample, and save
    checkpoints in a session of their own.
    """
    from tuneserve_server.conformance.checks import chosen
    from tuneserve_server.conformance.suite import CHECKS, results
    from tuneserve_server.conformance.target import ServerUnderTest

    if not url.startswith(("http://", "https://")):
        end(f"the address is {url!r}; it must begin with http:// or https://", REFUSED)
    try:
        checks = chosen(CHECKS, only or [])
    except ValueError as error:
        end(str(error), REFUSED)
    if list_:
        if as_json:
            print_json([{"name": e.name, "rule": e.rule, "source": e.source} for e in checks])
        else:
            print_table(["check", "rule"], [[each.name, each.rule] for each in checks])
        return
    target = ServerUnderTest(url, api_key or OPEN_KEY, base_model)
    found = []
    try:
        for result in results(checks, target):
            found.append(result)
            if not as_json:
                typer.echo(f"{result.outcome}  {result.name}")
                if result.reason:
                    typer.echo(f"        {result.rule}\n        {result.reason}")
                    typer.echo(f"        source: {result.source}")
    finally:
        target.close()
    failed = [each.name for each in found if each.outcome == "failed"]
    if as_json:
        print_json(
            {
                "url": url,
                "passed": len(found) - len(failed),
                "failed": len(failed),
                "checks": [asdict(each) for each in found],
            }
        )
    else:
        typer.echo(f"{len(found) - len(failed)} of {len(found)} checks passed")
    raise typer.Exit(FAILED if failed else 0)
