"""Base models by name: a directory, or a snapshot of the hub at a revision."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from tuneserve_engine.core.hub import BadCheckpoint, resolve_base_model, revision_of


@pytest.mark.parametrize("path", ["/no/such/model", "./model", "some/deep/model"])
def test_a_missing_directory_is_not_looked_up_in_the_hub(path: str) -> None:
    with pytest.raises(BadCheckpoint, match="no such directory"):
        resolve_base_model(path)


def test_a_hub_id_resolves_to_its_downloaded_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BadCheckpoint, match="'someone/model' is neither a directory nor"):
        resolve_base_model("someone/model")
    snapshot = tmp_path / "models--someone--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    refs = tmp_path / "models--someone--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert resolve_base_model("someone/model") == snapshot
    assert revision_of(snapshot) == "abc"


def test_a_pinned_revision_is_used_instead_of_the_main_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--someone--model"
    commits = {"main": "a" * 40, "v2": "b" * 40}
    (repo / "refs").mkdir(parents=True)
    for ref, commit in commits.items():
        (repo / "refs" / ref).write_text(commit)
        (repo / "snapshots" / commit).mkdir(parents=True)
    found = [resolve_base_model("someone/model", each) for each in (None, "v2", "b" * 40)]
    assert [revision_of(folder) for folder in found] == ["a" * 40, "b" * 40, "b" * 40]
    with pytest.raises(BadCheckpoint, match=r"'someone/model' at revision 'v3' is neither"):
        resolve_base_model("someone/model", "v3")


def test_a_directory_has_no_revision(tmp_path: Path) -> None:
    assert revision_of(tmp_path) == ""
    with pytest.raises(BadCheckpoint, match=r"base_model_revision is 'v2', and .* is a directory"):
        resolve_base_model(str(tmp_path), "v2")
