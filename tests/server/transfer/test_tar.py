"""Archives of the two files of an adapter: their places, and every other content refused."""

import io
import tarfile
from pathlib import Path

import pytest

from tuneserve_server.errors import Malformed
from tuneserve_server.transfer.tar import Member, members

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def file(name: str, content: bytes = b"x") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info, content


def link(name: str, kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info, b""


def archive(
    path: Path, *files: tuple[tarfile.TarInfo, bytes], form: int = tarfile.USTAR_FORMAT
) -> Path:
    with tarfile.open(path, "w", format=form) as made:
        for info, content in files:
            made.addfile(info, io.BytesIO(content))
    return path


def test_both_files_are_found_at_their_places(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", file(f"./{CONFIG}", b"{}" * 300), file(WEIGHTS, b"tensors"))
    # A header has 512 bytes, and content is padded to a multiple of that: 600 bytes take 1024.
    assert members(path) == {CONFIG: Member(512, 600), WEIGHTS: Member(2048, 7)}


def test_an_extended_header_is_skipped(tmp_path: Path) -> None:
    info, content = file(CONFIG, b"{}")
    info.mtime = 1.5  # type: ignore[assignment] - only an extended header can hold it
    path = archive(tmp_path / "a.tar", (info, content), file(WEIGHTS), form=tarfile.PAX_FORMAT)
    assert members(path) == {CONFIG: Member(1536, 2), WEIGHTS: Member(2560, 1)}


def test_a_long_extended_header_is_refused(tmp_path: Path) -> None:
    info, content = file(CONFIG)
    info.pax_headers = {"comment": "x" * 65536}
    path = archive(tmp_path / "a.tar", (info, content), file(WEIGHTS), form=tarfile.PAX_FORMAT)
    with pytest.raises(Malformed, match="an extended header of the archive has"):
        members(path)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ((file(CONFIG),), f"the archive has no {WEIGHTS}"),
        ((), f"the archive has no {CONFIG}"),
        ((file(CONFIG), file("adapter_model.bin")), "has 'adapter_model.bin'; it may hold only"),
        ((file(CONFIG), file(WEIGHTS), file(f"./{CONFIG}")), f"has '{CONFIG}'; .* each once"),
        ((file(f"../{CONFIG}"),), "it may hold only two files"),
        ((file(f"/{CONFIG}"),), "it may hold only two files"),
        ((link(CONFIG, tarfile.SYMTYPE),), f"{CONFIG} in the archive is a link"),
        ((link(WEIGHTS, tarfile.LNKTYPE),), f"{WEIGHTS} in the archive is a link"),
        ((link(CONFIG, tarfile.DIRTYPE),), "special file"),
    ],
)
def test_any_other_content_is_refused_with_the_command_that_works(
    files: tuple[tuple[tarfile.TarInfo, bytes], ...], told: str, tmp_path: Path
) -> None:
    with pytest.raises(Malformed, match=told) as refused:
        members(archive(tmp_path / "a.tar", *files))
    assert f"tar -cf - -C FOLDER {CONFIG} {WEIGHTS}" in str(refused.value)


def test_a_cut_archive_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", file(CONFIG), file(WEIGHTS, b"x" * 5000))
    whole = path.read_bytes()
    path.write_bytes(whole[:4096])
    with pytest.raises(Malformed, match="has 4096 bytes and should have 6536 or more: it was cut"):
        members(path)


def test_another_file_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"PK" * 512)
    with pytest.raises(Malformed, match="the body is not a tar archive"):
        members(path)
    path.write_bytes(b"")
    with pytest.raises(Malformed, match="has no adapter_config"):
        members(path)


def test_an_endless_row_of_headers_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type = tarfile.XHDTYPE
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.USTAR_FORMAT) * 40)
    with pytest.raises(Malformed, match="more than 16 headers"):
        members(tmp_path / "a.tar")
