"""Threads of the API process yield the processor to a worker on the same machine."""

import os
import sys

import pytest

from tuneserve_server.http.incoming import BodyMemory
from tuneserve_server.settings import ApiSettings


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no separate priority here")
def test_decompressing_threads_yield_the_processor_to_a_worker(settings: ApiSettings) -> None:
    memory, own = BodyMemory.from_settings(settings), os.getpriority(os.PRIO_PROCESS, 0)
    theirs = memory.threads.submit(os.getpriority, os.PRIO_PROCESS, 0).result()
    memory.stop()
    assert theirs == min(own + 10, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
