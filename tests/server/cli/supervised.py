"""Run ``tuneserve up`` with a worker that needs no model: ``python supervised.py <data
directory>``.

Settings come from the environment, as for the children.
"""

import asyncio
import os
import sys
from pathlib import Path

from tuneserve_server.cli.killed import tell_killed
from tuneserve_server.cli.readiness import report_progress
from tuneserve_server.cli.setting_options import say
from tuneserve_server.cli.supervisor import (
    ChildSpec,
    RestartPolicy,
    Supervisor,
    child_command,
    is_from_outside,
)
from tuneserve_server.settings import ApiSettings

ROOT = str(Path(__file__).parents[3])
WORKER = str(Path(__file__).parents[2] / "support" / "fake_worker.py")


async def main() -> int:
    settings = ApiSettings()
    worker = [sys.executable, WORKER, str(settings.data_dir), str(os.getpid())]
    children = [
        ChildSpec("api", child_command("api"), os.environ),
        ChildSpec("worker", worker, {**os.environ, "PYTHONPATH": ROOT}),
    ]
    policy = RestartPolicy(first_delay_s=0.1)

    async def ended(name: str, status: int) -> None:
        if name == "worker" and is_from_outside(status):
            await tell_killed(settings, "worker")

    supervisor = Supervisor(children, say, policy, ended)
    return await supervisor.supervise(lambda: asyncio.create_task(report_progress(settings, say)))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
