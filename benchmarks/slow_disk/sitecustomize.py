"""Makes every durable commit of the SQLite store take as long as on a disk with a slow fsync.

Python imports this module at its start when the folder is on PYTHONPATH; the benchmarks put it
there. ``SLOW_FSYNC_S`` is added to each commit that changed something: in WAL mode with
``synchronous=FULL`` such a commit is one fsync.
"""

import os
import time

if extra_s := float(os.environ.get("SLOW_FSYNC_S", "0")):
    from tuneserve_engine.store.sqlite import group_commit

    fast = group_commit.commit

    def slow(connection, calls, now_s):
        before = connection.total_changes
        answer = fast(connection, calls, now_s)
        if connection.total_changes != before:
            time.sleep(extra_s)
        return answer

    group_commit.commit = slow
