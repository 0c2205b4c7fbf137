"""The ``tuneserve`` command, also run by ``python -m tuneserve_server``."""

import sys


def main() -> None:
    """Run the command line; exit with what to install if only the client is installed."""
    try:
        from tuneserve_server.cli import main as cli
    except ModuleNotFoundError as error:
        sys.exit(
            f"tuneserve: {error.name} is not installed; the service needs more than its client: "
            "in a clone of its repository, pip install '.[server,engine]'"
        )
    cli.app()


if __name__ == "__main__":
    main()
