"""The ``tuneserve`` command, called in the process of the test."""

from typing import Any

from typer.testing import CliRunner, Result

from tuneserve_server.cli import main as cli


def called(*arguments: object, status: int = 0, **options: Any) -> Result:
    """The result of the command, which must end with this status."""
    result = CliRunner().invoke(cli.app, [*map(str, arguments)], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def tuneserve(*arguments: object, status: int = 0, **options: Any) -> str:
    """The command's standard output or, if it fails, its standard error."""
    result = called(*arguments, status=status, **options)
    return result.stderr if status else result.stdout
