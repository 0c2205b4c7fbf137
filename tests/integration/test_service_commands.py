"""The commands that look at a running service and stop it, against the real processes."""

import json
import os
import subprocess
import sys

import pytest

from tests import quick_service
from tests.support.command_line import called
from tuneserve_client import Client
from tuneserve_server.cli.local_server import LocalServer, free_port
from tuneserve_server.cli.readiness import health_of


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_service_is_looked_at_and_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    served = LocalServer(tmp_path, **quick_service.QUICK)
    with served as server:
        monkeypatch.setenv("TUNESERVE_URL", server.url)
        shown = called("status").stdout
        for text in (server.url, "tuneserve/tiny, workers: 1", "sqlite", "problems     none"):
            assert text in shown
        told = json.loads(called("status", "--json").stdout)
        assert (told["problems"], told["worker"]) == ([], "ready")
        (model,) = json.loads(called("models", "--json").stdout)
        assert (model["name"], model["workers"]) == ("tuneserve/tiny", 1)
        (row,) = called("models").stdout.splitlines()[1:]
        assert row.split()[:5] == [
            *("tuneserve/tiny", model["architecture"]),
            *(f"{model['context_length']}", f"{model['max_rank']}", "1"),
        ]
        with Client(server.url) as client:
            path = client.create_model(rank=4).save("kept").result()
        children = subprocess.run(
            ["pgrep", "-P", str(server.pid)], capture_output=True, text=True, check=True
        )
        said = called("stop", "--data-dir", server.data_dir).stdout
        assert said.strip() == f"stopped the service of {server.data_dir} (process {server.pid})"
        assert server._process.wait(1) == 0
        assert not any(map(lives, map(int, children.stdout.split())))
        assert "does not answer" in called("status", status=1).stderr
        said = called("stop", "--data-dir", server.data_dir, status=1).stderr
        assert "no API process answers at" in said and "--data-dir" in said
        server.start()
        with Client(server.url) as client:
            assert [each.tinker_path for each in client.checkpoints()] == [path]


@pytest.mark.skipif(sys.platform != "linux", reason="signals through /proc")
def test_an_api_process_without_a_supervisor_is_stopped_too(tmp_path):
    port, folder = free_port(), tmp_path / "data"
    command = [sys.executable, "-m", "tuneserve_server", "api"]
    process = subprocess.Popen([*command, "--port", str(port), "--data-dir", str(folder)])
    try:
        while not health_of(f"http://127.0.0.1:{port}"):
            assert process.poll() is None
        shown = called("status", "--url", f"http://127.0.0.1:{port}", status=1).stdout
        assert "no worker trains here" in shown and "none yet" in shown
        said = called("models", "--url", f"http://127.0.0.1:{port}").stderr
        assert "no worker has offered a base model yet" in said
        assert f"(process {process.pid})" in called("stop", "--data-dir", folder).stdout
        process.wait(5)
    finally:
        process.kill()
        process.wait()
