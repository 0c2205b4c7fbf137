"""The names that clients give to checkpoints."""

import re

from tuneserve_engine.core.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(field: str, name: str) -> None:
    """Raise ``UserError`` unless ``name`` can be the last part of a checkpoint's path."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise UserError(
            f"{field} is not a checkpoint name: use 1 to 128 letters, digits, '.', '_' and '-', "
            "starting with a letter or digit, without '..'"
        )
