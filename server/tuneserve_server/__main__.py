"""``python -m tuneserve_server``: the same as the ``tuneserve`` command."""

from tuneserve_server.cli import main

if __name__ == "__main__":
    main()
