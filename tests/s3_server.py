"""An S3 server (moto) for the tests, with one bucket. When it ends, it loses everything."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

_START_S = 30.0
BUCKET = "bucket"


class S3Server:
    """A server on a free port of this machine, which logs to ``folder``.

    Call ``stop``, or use the server as a context manager. A process needs ``environment`` to reach
    it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self.url = f"s3://{BUCKET}/prefix"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.port)

    def start(self) -> None:
        """Start an empty server and return when it has its bucket."""
        command = [sys.executable, str(Path(__file__).resolve()), str(self.port)]
        with (self.folder / "s3.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline_s = time.monotonic() + _START_S
        make = urllib.request.Request(f"http://127.0.0.1:{self.port}/{BUCKET}", method="PUT")
        while True:
            try:
                urllib.request.urlopen(make, timeout=5).close()
                return
            except OSError:
                assert self._process.poll() is None, (self.folder / "s3.log").read_text()
                assert time.monotonic() < deadline_s, f"no S3 server within {_START_S} s"
                time.sleep(0.02)

    def client(self, prefix: str = "prefix") -> S3Store:
        """A client of the test's own."""
        return S3Store(
            BUCKET,
            prefix=prefix,
            config={
                "endpoint": f"http://127.0.0.1:{self.port}",
                "access_key_id": "key",
                "secret_access_key": "secret",
                "region": "us-east-1",
            },
            client_options={"allow_http": True},
        )

    def keys(self, prefix: str = "") -> set[str]:
        """The keys of all objects that begin with the prefix."""
        found = (each["path"] for page in obstore.list(self.client()) for each in page)
        return {key for key in found if key.startswith(prefix)}

    def pause(self) -> None:
        """Let the server accept connections but answer no request, until ``go_on``."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def __enter__(self) -> "S3Server":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def environment(port: int) -> dict[str, str]:
    """The variables with which a process reaches the server, or a proxy, on this port."""
    return {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _one_by_one(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Return the application, one request at a time.

    moto looks whether the object of a conditional write exists, and writes it, in two steps: two
    threads could both find that it does not. The body is read before, so a slow client holds up no
    other.
    """
    lock = threading.Lock()

    def call(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        size = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(size)
        if len(body) < size:
            start_response("400 Bad Request", [("Content-Length", "0")])
            return []
        environ["wsgi.input"] = io.BytesIO(body)
        with lock:
            return list(app(environ, start_response))

    return call


def _serve(port: int) -> None:
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import run_simple

    class Persistent(MotoRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None:
            pass

    app = DomainDispatcherApplication(create_backend_app)
    run_simple("127.0.0.1", port, _one_by_one(app), threaded=True, request_handler=Persistent)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
