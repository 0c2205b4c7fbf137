"""A worker that decomposes as slowly as one with a large base model does."""

import os
import time
from typing import Any

from tuneserve_engine import __main__ as process
from tuneserve_engine.triples import Triples

WEIGHT_S = "TEST_WEIGHT_S"
"""In the environment: how long a weight takes at least."""
_of = Triples.of


def _slowly(*args: Any) -> Any:
    time.sleep(float(os.environ[WEIGHT_S]))
    return _of(*args)


if __name__ == "__main__":
    Triples.of = _slowly  # type: ignore[method-assign]
    os._exit(process.main())
