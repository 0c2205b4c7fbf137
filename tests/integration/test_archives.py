"""Archives of checkpoints from the real API process: links need no key and expire."""

import io
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.test_sdk_wire import Server, running_server
from tuneserve_client import Client, Model, next_token_datum

TTL_S = 3
FILES = ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]


def ids(runs):
    """Their other figures may change with time."""
    return [each.training_run_id for each in runs]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NO_PROXY", "127.0.0.1")
        environment.setenv("TUNESERVE_DOWNLOAD_TTL_S", str(TTL_S))
        environment.setenv("TUNESERVE_ACCESS_LOG", "true")
        yield from running_server(tmp_path_factory.mktemp("data"))


def learnt(client: Client) -> Model:
    model = client.create_model(rank=4, seed=3)
    model.forward_backward([next_token_datum([1, 2, 3])])
    model.optim_step(learning_rate=0.01).result()
    return model


def asked(server: Server, path: str, key: str) -> httpx.Response:
    route = path.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
    url = f"{server.url}/api/v1/training_runs/{route}/archive"
    return httpx.get(url, headers={"X-API-Key": key})


def fetched(url: str) -> dict[str, bytes]:
    """The files of the archive, fetched as the SDK does: from the bare address."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        content = answer.read()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        opened = {each.name: archive.extractfile(each) for each in archive}
        return {name: file.read() for name, file in opened.items() if file is not None}


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_link_gives_its_checkpoint_to_every_holder_until_it_expires(
    server: Server, tmp_path: Path
) -> None:
    with Client(server.url, "tml-mine") as client:
        model = learnt(client)
        sampler = model.save_sampler("frozen").path
        assert sampler is not None
        paths = [model.save("whole").result(), sampler, model.export("out").result()]
        urls = [asked(server, path, "tml-mine").raise_for_status().json()["url"] for path in paths]
        found = [fetched(url) for url in urls]
        assert list(found[0]) == FILES
        assert found[0] == found[1] == found[2]
        assert len(found[0]["adapter_model.safetensors"]) > 1000

        signature = urls[0].rpartition("signature=")[2]
        assert status(urls[0].replace(signature, signature[::-1])) == 403
        assert status(urls[0].replace(signature, urls[1].rpartition("signature=")[2])) == 403
        theirs = asked(server, paths[0], "tml-theirs")
        assert (theirs.status_code, theirs.json()["code"]) == (404, "not_found")

        time.sleep(TTL_S + 1)
        assert [status(url) for url in urls] == [403] * 3
        again = asked(server, paths[0], "tml-mine").json()["url"]
        assert fetched(again) == found[0]

        before = ids(client.runs()), client.checkpoints()
        for path in paths:
            folder = client.download(path, tmp_path / path.split("/")[-1])
            written = {each.name: each.read_bytes() for each in folder.iterdir()}
            assert written == {name: found[0][name] for name in FILES[:2]}
        assert (ids(client.runs()), client.checkpoints()) == before
    log = (server.data_dir / "log").read_text()
    assert "/api/v1/files/{file_id}/{member} 200" in log
    assert not any(url.rpartition("signature=")[2] in log for url in [*urls, again])
