"""A health check: the exit status says whether the worker with these settings holds its lease.

    python -m tuneserve_engine.worker.health

The check asks neither the worker nor the store: it costs no more than reading a file's date.
"""

import logging
import sys
import time
from pathlib import Path

from tuneserve_engine.settings.worker import WorkerSettings

logger = logging.getLogger(__name__)


class LivenessFile:
    """The file that shows that a worker renews its lease; None turns it off.

    A file that another worker left is removed. Raises ``OSError`` if the file cannot be made.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        if file is not None:
            try:
                file.touch()
                file.unlink()
            except OSError as error:
                raise OSError(
                    f"cannot make the file {file}: {error.strerror}; choose another with "
                    "--alive-file"
                ) from error

    def touch(self) -> None:
        """Touch the file. A worker that cannot touch it continues, but health checks will fail."""
        if self._file is not None:
            try:
                self._file.touch()
            except OSError as error:
                logger.warning("cannot touch %s: %s", self._file, error)


def unhealthy_reason(settings: WorkerSettings, now_s: float) -> str | None:
    """Return why the worker with these settings does not count as alive; None if it does."""
    file = settings.alive_file
    if file is None:
        return "no alive_file is set, here and for the worker: nothing to look at"
    try:
        silent_s = now_s - file.stat().st_mtime
    except FileNotFoundError:
        return f"{file} is not there: the worker has no lease yet, or has another alive_file"
    if silent_s > settings.lease_ttl_s:
        return (
            f"the lease was last renewed {silent_s:.1f} s ago, and ends after "
            f"{settings.lease_ttl_s:g} s (lease_ttl_s)"
        )
    return None


def main() -> int:
    """Print the finding and return the exit status: 0 if the worker holds its lease, else 1."""
    found = unhealthy_reason(WorkerSettings(), time.time())
    print(found or "the worker holds its lease")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
