"""A worker that decomposes as slowly as one with a large base model does."""

import os
import time
from typing import Any

import numpy as np

from tuneserve_engine import __main__ as process

WEIGHT_S = "TEST_WEIGHT_S"
"""In the environment: how long a weight takes at least."""
_svd = np.linalg.svd


def _slowly(*args: Any, **options: Any) -> Any:
    time.sleep(float(os.environ[WEIGHT_S]))
    return _svd(*args, **options)


if __name__ == "__main__":
    np.linalg.svd = _slowly
    os._exit(process.main())
