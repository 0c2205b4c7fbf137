"""The folder that a checkpoint is written into. ``test_client_cli`` runs the commands."""

from pathlib import Path

import pytest
import typer

from tuneserve_server.cli.checkpoints import check_export


def test_a_new_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    check_export(tmp_path / "a" / "b")
    check_export(tmp_path / "a" / "b")  # it is empty
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize(
    ("name", "told"), [("full", "full is not empty"), ("file", "cannot write an adapter into")]
)
def test_a_folder_with_files_or_a_file_ends_the_command(
    name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(typer.Exit) as ending:
        check_export(tmp_path / name)
    assert ending.value.exit_code == 2
    assert told in capsys.readouterr().err
    assert (tmp_path / "full" / "notes").read_text() == "mine"
