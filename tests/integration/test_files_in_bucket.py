"""A tenant's work on a service whose files are in a bucket: real processes, the embedded model.

The service stops, loses its local copies, starts again and reads the same checkpoints.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.quick_service import QUICK
from tests.s3_server import S3Server
from tuneserve_client import Client, next_token_datum
from tuneserve_server.cli.local_server import LocalServer

DATA = [next_token_datum([1, 2, 3, 4, 5])]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def test_checkpoints_outlive_every_local_file(s3: S3Server, tmp_path: Path) -> None:
    with LocalServer(tmp_path, **QUICK, files_url=s3.url, sweep_s="0.5") as server:
        files = server.data_dir / "files"
        with Client(server.url, "tml-mine") as client:
            model = client.create_model(rank=4, seed=3)
            for _ in range(2):
                model.forward_backward(DATA)
                model.optim_step(learning_rate=0.01).result()
            whole = model.save("whole").result()
            exported = model.export("out").result()
            sampler = model.save_sampler("frozen")
            path = sampler.path
            assert path is not None
            tokens = sampler.sample([1, 2], max_tokens=8, seed=5).result().samples[0].tokens
            downloads = {
                each: contents(client.download(each, tmp_path / each.rpartition("/")[2]))
                for each in (whole, exported, path)
            }
            shutil.rmtree(files)  # while the service runs
            assert contents(client.download(whole, tmp_path / "lost")) == downloads[whole]
            uploaded = client.import_peft(tmp_path / "out", name="back")
            loss = model.forward_backward(DATA).result().loss
        assert len(s3.keys("ids/")) >= 4
        assert not [each for each in files.iterdir() if each.name != "cache"]
        server.stop()
        shutil.rmtree(files)
        server.start()
        with Client(server.url, "tml-mine") as client:
            again = client.load_model(whole)
            assert again.forward_backward(DATA).result().loss == loss
            assert client.load_model(uploaded).forward_backward(DATA).result().loss > 0
            drawn = client.sampler(path).sample([1, 2], max_tokens=8, seed=5).result()
            assert drawn.samples[0].tokens == tokens
            for number, (each, expected) in enumerate(downloads.items()):
                folder = client.download(each, tmp_path / f"again-{number}")
                assert contents(folder) == expected
        log = server.log.read_text()
        assert f"files in {s3.url}" in log
        assert "Traceback" not in log and os.environ["AWS_SECRET_ACCESS_KEY"] not in log


def test_training_goes_on_while_the_bucket_does_not_answer(tmp_path: Path) -> None:
    """A save waits for it, and recovery points are written later."""
    with (
        S3Server(tmp_path / "s3") as s3,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        with LocalServer(tmp_path, **QUICK, files_url=s3.url, point_s="0.5") as server:
            with Client(server.url, "tml-mine") as client:
                model = client.create_model(rank=4, seed=3)
                s3.pause()
                for _ in range(3):
                    model.forward_backward(DATA)
                    model.optim_step(learning_rate=0.01).result()
                saving = model.save("whole")
                s3.go_on()
                assert saving.result().endswith("/weights/whole")
                model.forward_backward(DATA).result()
        log = server.log.read_text()
        assert "Traceback" not in log
