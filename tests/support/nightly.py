"""Parameters of a test that only repeat, on another side, what the others show."""

from typing import Any

import pytest


def at_night(*values: Any, **options: Any) -> Any:
    """Return a parameter with which the test runs under ``make test-nightly`` only."""
    return pytest.param(*values, marks=pytest.mark.nightly, **options)
