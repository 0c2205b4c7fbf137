"""Base models by the name that users give: a directory, or an id on the Hugging Face hub."""

from pathlib import Path

_HUB_FILES = ("*.json", "*.safetensors", "tokenizer*", "merges.txt", "vocab.*", "*.jinja")
_HUB_IGNORED = ("original/*", "onnx/*")


class BadCheckpoint(ValueError):
    """The error for files that do not hold the base model that their config.json describes."""


def local_folder(path_or_hub_id: str, revision: str | None = None) -> Path | None:
    """Return the folder of a base model; None for a name that can only be a hub id.

    Raises ``BadCheckpoint`` for a name that can be neither, and for a revision of a folder.
    """
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise BadCheckpoint(
                f"base_model_revision is {revision!r}, and base model {path_or_hub_id!r} is a "
                "directory, which has no revisions; leave the revision out, or name a hub id"
            )
        return folder
    if folder.is_absolute() or path_or_hub_id.startswith((".", "~")) or len(folder.parts) > 2:
        raise BadCheckpoint(
            f"base model {path_or_hub_id!r}: no such directory; give a directory with config.json "
            "and safetensors, or a hub id such as 'Qwen/Qwen3-0.6B'"
        )
    return None


def revision_of(folder: Path) -> str:
    """Return the commit of a folder in the hub's cache; an empty string for any other folder."""
    is_cached = folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")
    return folder.name if is_cached else ""


def resolve_base_model(path_or_hub_id: str, revision: str | None = None) -> Path:
    """Return the local folder of a base model; download the model first if the name is a hub id.

    The download is of the main branch, unless ``revision`` names another branch, a tag or a commit.
    Raises ``BadCheckpoint`` if there is neither a directory nor a downloadable model.
    """
    if folder := local_folder(path_or_hub_id, revision):
        return folder
    from huggingface_hub import snapshot_download  # slow to import, and most starts are local
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                path_or_hub_id,
                revision=revision,
                allow_patterns=list(_HUB_FILES),
                ignore_patterns=list(_HUB_IGNORED),
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise BadCheckpoint(
            f"base model {path_or_hub_id!r}{_at(revision)} is neither a directory nor a hub model "
            "that can be downloaded; check the name, the revision, the network and, for gated "
            f"models, `hf auth login` ({error})"
        ) from error


def _at(revision: str | None) -> str:
    return f" at revision {revision!r}" if revision else ""
