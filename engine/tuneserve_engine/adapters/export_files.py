"""The members of exports in PEFT's layout, and the check that a member is unchanged.

NumPy only: the API process serves exports.
"""

from pathlib import Path

from tuneserve_engine.adapters.tensor_file import Damaged, check, checksum, read_header

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check_member(folder: Path, member: str) -> None:
    """Raise ``Damaged`` if the member differs from what was written. May raise ``OSError``.

    The configuration's checksum is in the metadata of the weights, under its name. An encrypted
    member is not read: age authenticates it, so decryption detects any change.
    """
    try:
        if member == WEIGHTS:
            check(folder / WEIGHTS)
        elif member == CONFIG:
            expected = read_header(folder / WEIGHTS).metadata.get(CONFIG)
            if expected not in (None, checksum((folder / CONFIG).read_bytes())):
                raise Damaged(f"{CONFIG} does not have its checksum")
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(str(error)) from error
