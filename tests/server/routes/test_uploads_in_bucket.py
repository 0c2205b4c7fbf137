"""Uploads by signed links where the files are in a bucket."""

from pathlib import Path
from typing import Any

import pytest

from tests.server.routes.test_copies import loss_from
from tests.server.routes.test_external_uploads import finish, sent, uploaded
from tests.server.transfer.test_peft_upload import A, B
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio


@pytest.fixture
def settings(tmp_path: Path, s3_url: str) -> ApiSettings:
    return ApiSettings(
        data_dir=tmp_path,
        base_model_name="tuneserve/fake",
        poll_s=0.2,
        store_check_s=0,
        files_url=s3_url,
    )


async def test_an_upload_becomes_one_file_of_the_bucket(service: Any) -> None:
    path = await uploaded(service)
    assert len(service.services.files.ids()) == 1
    shift = 1.5 * 2 * 2 * (4 * A) * (4 * B)  # by hand, as in test_external_uploads.py
    expected = (1 + 3) / 8 + (1 + 5) / 8 - 2 * shift
    assert await loss_from(service, path, 0) == pytest.approx(expected)


async def test_the_files_of_an_unfinished_upload_wait_in_the_bucket(service: Any) -> None:
    upload_id = await sent(service)
    assert len(service.services.files.ids()) == 2
    assert (await finish(service, upload_id)).status_code == 200
