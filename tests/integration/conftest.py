"""Collects the sockets that the SDK leaves to the garbage collector, where the cause is known."""

import gc
import warnings

import pytest


@pytest.fixture(autouse=True)
def sockets_of_the_sdk_are_collected_quietly():
    yield
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()
