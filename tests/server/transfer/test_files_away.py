"""The answer while the store of files does not answer; a full disk has an answer of its own."""

import errno

import pytest

from tuneserve_server.errors import StoreUnavailable
from tuneserve_server.transfer.files_away import told_away


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EINVAL])
def test_a_store_that_does_not_answer_is_unavailable(number: int) -> None:
    with pytest.raises(StoreUnavailable, match="send the request again"), told_away():
        raise OSError(number, "no answer")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_by_others(number: int) -> None:
    with pytest.raises(OSError) as caught, told_away():
        raise OSError(number, "full")
    assert caught.value.errno == number


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), told_away():
        raise KeyError("x")
