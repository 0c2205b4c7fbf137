"""The ``tuneserve`` command, and ``python -m tuneserve_server``, which is the same."""

import sys


def main() -> None:
    """Runs the command line; ends with what to install if this is a client's installation."""
    try:
        from tuneserve_server import cli
    except ModuleNotFoundError as error:
        sys.exit(
            f"tuneserve: {error.name} is not installed; the service needs more than its client: "
            "in a clone of its repository, pip install '.[server,engine]'"
        )
    cli.app()


if __name__ == "__main__":
    main()
