"""Check the containers on a Docker engine: training survives the death of its worker.

The services of docker/compose.yaml are built and started as a Compose project of their own, whose
volumes are removed at the end. One run trains undisturbed. The same run trains again, and its
worker is killed within its container. Both must export the same bytes. Port 8410 must be free.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMPOSE = [
    *("docker", "compose", "--project-name", "tuneserve-check"),
    *("--file", str(ROOT / "docker" / "compose.yaml")),
]
URL = "http://127.0.0.1:8410"
KILLED_AT_STEP = 20
STEPS = 100

# Kills the worker's process, and not the init process of the container, which ignores signals.
KILL = """
import os, pathlib, signal
for each in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if each.read_bytes().split(b"\\0")[1:3] == [b"-m", b"tuneserve_engine.worker"]:
        os.kill(int(each.parent.name), signal.SIGKILL)
"""


def compose(*arguments: str, check: bool = True) -> str:
    """Run Docker Compose and return its output."""
    done = subprocess.run([*COMPOSE, *arguments], stdout=subprocess.PIPE, text=True, check=check)
    return done.stdout.strip()


@contextmanager
def services() -> Iterator[None]:
    """Build and start the services, wait until all are healthy, and remove them at the end."""
    os.environ["REDIS_PASSWORD"] = secrets.token_hex(16)
    try:
        compose("up", "--build", "--detach", "--wait", "--wait-timeout", "900")
        yield
    except BaseException:
        print(compose("logs", "--tail", "50", check=False))
        raise
    finally:
        compose("down", "--volumes", "--timeout", "60", check=False)


def restarts() -> int:
    """Return how often the worker's container has been started again."""
    name = compose("ps", "--all", "--quiet", "worker")
    command = ["docker", "inspect", "--format", "{{.RestartCount}}", name]
    return int(subprocess.check_output(command, text=True))


def train(rows: Path, exported: Path, *, is_killed: bool) -> bytes:
    """Train on the rows, kill the worker in between if asked, and return the adapter's bytes."""
    command = [sys.executable, "-m", "tuneserve_server", "train", str(rows), "--url", URL]
    command += ["--epochs", str(STEPS), "--learning-rate", "1e-3", "--rank", "8"]
    command += ["--export", str(exported), "--json"]
    seen = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            seen += "grad_norm" in json.loads(line)
            if is_killed and seen == KILLED_AT_STEP:
                compose("exec", "-T", "worker", "python", "-c", KILL, check=False)
                is_killed = False
    if running.returncode or seen != STEPS:
        sys.exit(f"the training ended with status {running.returncode} after {seen} steps")
    return (exported / "adapter_model.safetensors").read_bytes()


def main() -> None:
    """Run the check; end with status 1 and the reason if it fails."""
    with services(), tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        rows = folder / "rows.jsonl"
        row = {"prompt": "Q: What colour is coal?\nA:", "completion": " Arr, black!"}
        rows.write_text(f"{json.dumps(row)}\n")
        key = compose("exec", "-T", "api", "tuneserve", "keys", "create", "--tenant", "check")
        os.environ["TUNESERVE_API_KEY"] = key
        undisturbed = train(rows, folder / "undisturbed", is_killed=False)
        before = restarts()
        killed = train(rows, folder / "killed", is_killed=True)
        if restarts() == before:
            sys.exit("the worker's container was not started again: the kill did not reach it")
        if killed != undisturbed:
            sys.exit("the adapter that was trained across the worker's death has other bytes")
    print(f"the worker was killed at step {KILLED_AT_STEP} of {STEPS}; the adapters are equal")


if __name__ == "__main__":
    main()
