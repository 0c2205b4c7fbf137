"""The SDK leaves its sockets to the garbage collector: collect them here, where it is known why."""

import gc
import warnings

import pytest


@pytest.fixture(autouse=True)
def sockets_of_the_sdk_are_collected_quietly():
    yield
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()
