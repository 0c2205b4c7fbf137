"""Services that pages start (docs/keys.md, docs/configuration.md).

Each service runs until the effect of its command can be seen, and is then stopped.
"""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.guides.pages import block_with
from tests.quick_service import QUICK
from tuneserve_server.access.auth import open_tenant
from tuneserve_server.cli.local_server import LocalServer, free_port
from tuneserve_server.cli.readiness import health_of

Environment = dict[str, str]


@pytest.fixture
def own(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An operator's environment: settings of a service that is ready soon, on its own port."""
    settings = QUICK | {"port": str(free_port())}
    clients = {"TUNESERVE_URL", "TUNESERVE_API_KEY", "TINKER_BASE_URL", "TINKER_API_KEY"}
    return {
        **{name: value for name, value in environment.items() if name not in clients},
        **{f"TUNESERVE_{name.upper()}": value for name, value in settings.items()},
    }


@contextmanager
def started(line: str, folder: Path, environment: Environment) -> Iterator[None]:
    """Run the command in the block. When it is stopped, it must end successfully."""
    log = folder / "log"
    with log.open("ab") as said:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line}"], cwd=folder, env=environment, stdout=said, stderr=said
        )
    try:
        yield
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        status = process.wait(40)
    assert status == 0, log.read_text()


def wait_for(is_so: Callable[[], object], folder: Path) -> None:
    until_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until_s, (folder / "log").read_text()
        time.sleep(0.1)


def url_of(environment: Environment) -> str:
    return f"http://127.0.0.1:{environment['TUNESERVE_PORT']}"


def status(url: str, key: str) -> int:
    headers = {"X-API-Key": key}
    return httpx.get(f"{url}/api/v1/sessions", headers=headers, trust_env=False).status_code


def test_a_service_that_requires_keys_accepts_a_key_created_beside_it(
    own: Environment, tmp_path: Path
) -> None:
    up, create = block_with("docs/keys.md", "tuneserve up --").code.splitlines()
    url = url_of(own)
    with started(up, tmp_path, own):
        wait_for(lambda: health_of(url), tmp_path)
        assert status(url, "tml-local") == 401
        made = subprocess.run(
            create.split(), cwd=tmp_path, env=own, capture_output=True, text=True, check=True
        )
        assert status(url, made.stdout.strip()) == 200


def test_an_api_process_applies_the_budgets_of_its_command(
    own: Environment, tmp_path: Path
) -> None:
    (line,) = block_with("docs/configuration.md", "tuneserve api --").code.splitlines()
    assert open_tenant("tml-local") in line
    url = url_of(own)
    with started(line, tmp_path, own):
        wait_for(lambda: health_of(url), tmp_path)
        answer = httpx.get(
            f"{url}/api/v1/usage", headers={"X-API-Key": "tml-local"}, trust_env=False
        )
        assert "3600" in json.dumps(answer.json()["budget"])


def test_more_workers_join_the_running_one(
    server: LocalServer, own: Environment, tmp_path: Path
) -> None:
    lines = [
        *block_with("docs/configuration.md", "--worker-name two").code.splitlines(),
        *block_with("docs/configuration.md", "worker --tenant-weights").code.splitlines(),
    ]
    (tmp_path / "data").symlink_to(server.data_dir)

    def are_there() -> bool:
        said = httpx.get(f"{server.url}/metrics", trust_env=False).text
        return re.findall(r"^tuneserve_workers{.*} (\d+)", said, re.M) == ["3"]

    with ExitStack() as stack:
        for line in lines:
            stack.enter_context(started(line, tmp_path, own))
        wait_for(are_there, tmp_path)
