"""T2 with files in a bucket: workers that die around uploads, and an object store that fails.

No acknowledged request is lost. Results and states equal those of an undisturbed run, bit for bit.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.faults.killed_worker import KILL_POINTS
from tests.faults.s3_proxy import KINDS, S3Proxy, some
from tests.faults.test_kills import check
from tests.redis_server import RedisServer
from tests.s3_server import S3Server, environment
from tuneserve_engine.settings.common import CommonSettings

OF_FILES = tuple(each for each in KILL_POINTS if each.startswith(("file-", "point-")))
"""In a bucket, ``file-before-rename`` is between the upload of the members and the manifest."""


@contextmanager
def on_s3(store: str, folder: Path, failing: float = 0.0) -> Iterator[CommonSettings]:
    """Settings with the files in a bucket, of which this share of requests fails."""
    with S3Server(folder / "s3") as server, S3Proxy(server.port, some(failing, seed=3)) as proxy:
        settings = CommonSettings(
            data_dir=folder / "data", files_url=server.url, job_attempts=10**6, min_free_bytes=0
        )
        with patch.dict(os.environ, environment(proxy.port if failing else server.port)):
            if store == "sqlite":
                yield settings
            else:
                with RedisServer(folder / "redis") as redis:
                    yield settings.model_copy(update={"store": redis.url})
        if failing:
            print(f"{ {kind: proxy.counts[kind] for kind in KINDS} } of {len(proxy.requests)}")
            assert min(proxy.counts[kind] for kind in KINDS) > 0
        assert proxy.disagreements == []


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_killed_workers_lose_nothing_of_a_bucket(tmp_path: Path, store: str) -> None:
    with on_s3(store, tmp_path) as settings:
        check(settings, tmp_path, 6, seed=1, points=OF_FILES)


def test_a_failing_object_store_costs_no_request_and_no_bit(tmp_path: Path) -> None:
    with on_s3("redis", tmp_path, failing=0.2) as settings:
        check(settings, tmp_path, 4, seed=2)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("failing", [0.0, 0.2])
@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_a_hundred_killed_workers_lose_nothing_of_a_bucket(
    tmp_path: Path, store: str, failing: float
) -> None:
    with on_s3(store, tmp_path, failing) as settings:
        check(settings, tmp_path, 100, seed=4)
