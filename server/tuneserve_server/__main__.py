"""The ``tuneserve`` command, also run by ``python -m tuneserve_server``."""

from tuneserve_server.cli import main as cli


def main() -> None:
    """Run the command line."""
    cli.app()


if __name__ == "__main__":
    main()
