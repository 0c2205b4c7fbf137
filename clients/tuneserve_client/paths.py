"""The paths of checkpoints."""

PATH_PREFIX = "tinker://"


def split_path(path: str) -> tuple[str, str, str]:
    """Return the model, kind and name in a checkpoint's path. Raises ``ValueError``."""
    parts = path.removeprefix(PATH_PREFIX).split("/")
    if not path.startswith(PATH_PREFIX) or len(parts) != 3 or not all(parts):
        raise ValueError(
            f"{path!r} is not a checkpoint's path; it must be tinker://<model>/<kind>/<name>, as "
            "saving returns it"
        )
    return parts[0], parts[1], parts[2]
