"""The members of an export are sent only as they were written."""

from pathlib import Path

import numpy as np
import pytest

from tuneserve_engine.adapters import tensor_file
from tuneserve_engine.adapters.export_files import CONFIG, WEIGHTS, check_member
from tuneserve_engine.adapters.tensor_file import Damaged


@pytest.fixture
def export(tmp_path: Path) -> Path:
    config = b'{"r": 8}'
    metadata = {"format": "pt", CONFIG: tensor_file.checksum(config)}
    weights = tensor_file.encoded({"a": np.ones(2, np.float32)}, metadata)
    (tmp_path / CONFIG).write_bytes(config)
    (tmp_path / WEIGHTS).write_bytes(weights)
    return tmp_path


def test_unchanged_members_pass(export: Path) -> None:
    for member in (CONFIG, WEIGHTS):
        check_member(export, member)


@pytest.mark.parametrize("member", [CONFIG, WEIGHTS])
def test_a_changed_member_is_damaged(export: Path, member: str) -> None:
    data = (export / member).read_bytes()
    (export / member).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Damaged, match="does not have its checksum"):
        check_member(export, member)


def test_an_encrypted_member_is_not_read(export: Path) -> None:
    check_member(export, f"{WEIGHTS}.age")


def test_a_missing_member_is_an_error_of_the_file_system(export: Path) -> None:
    (export / WEIGHTS).unlink()
    for member in (CONFIG, WEIGHTS):
        with pytest.raises(FileNotFoundError):
            check_member(export, member)
