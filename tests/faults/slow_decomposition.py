"""A worker that decomposes as slowly as one with a large base model."""

import os
import time
from typing import Any

from tuneserve_engine.adapters.svd_process import SvdProcess
from tuneserve_engine.worker import __main__ as process

WEIGHT_S = "TEST_WEIGHT_S"
"""The environment variable for the minimum time per weight."""
_of = SvdProcess.decompose


def _slowly(*args: Any) -> Any:
    time.sleep(float(os.environ[WEIGHT_S]))
    return _of(*args)


if __name__ == "__main__":
    SvdProcess.decompose = _slowly  # type: ignore[method-assign]
    os._exit(process.main())
