"""Adapter states as files: our resumable format, and the PEFT layout for export.

Both use safetensors and JSON only, so that reading a file cannot run code. Checksums cover every
bit of both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyrage
from safetensors import SafetensorError, safe_open

from tuneserve_engine.adapters import export_files, peft_export, tensor_file
from tuneserve_engine.adapters.checkpoint_format import (
    FORMAT,
    FRESH,
    MEMBER,
    config_in,
    metadata_of,
)
from tuneserve_engine.adapters.state import AdapterState, Tensors
from tuneserve_engine.core.errors import FileDamaged, ServerError, UserError

_NAME = "checkpoint"


def to_members(
    state: AdapterState, base_model: str, revision: str = "", *, name: str = ""
) -> dict[str, bytes]:
    """Return the state as one safetensors file.

    Its tensors are ``weights/…`` and, if the state has them, ``*_moment/…`` and ``accumulator/…``
    (in recovery points only). ``name`` is the file's name in later messages.
    """
    metadata = metadata_of(state.config, base_model, state.step, revision)
    return {
        MEMBER: tensor_file.encoded(state.to_tensors(), metadata | ({_NAME: name} if name else {}))
    }


def read_checkpoint(
    directory: Path, base_model: str, revision: str = "", *, name: str = ""
) -> AdapterState:
    """Return the state saved in ``directory``, bit for bit.

    Messages call it ``name``, or by default the name that it was saved under.

    Raises ``UserError`` if the file is gone (deleted or expired), or was trained on another model
    than ``base_model``, or on another revision of it (whose weights may have the same shapes).
    Raises ``FileDamaged`` if the file differs from what was written.
    """
    path = directory / MEMBER
    if not path.is_file():
        raise UserError(
            "the checkpoint's file is gone: it was deleted or has expired; load another"
        )
    try:
        header = tensor_file.read_header(path)
        name = name or header.metadata.get(_NAME, "")
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ServerError(
                    f"checkpoint format is {metadata.get('format')!r}; this version reads {FORMAT}"
                )
            if metadata["base_model"] != base_model:
                raise UserError(
                    f"the checkpoint was trained on {metadata['base_model']!r} and this server "
                    f"runs {base_model!r}; load one that was trained on it"
                )
            trained_on = metadata.get("base_model_revision", "")
            if trained_on and revision and trained_on != revision:
                raise UserError(
                    f"the checkpoint was trained on revision {trained_on} of {base_model!r} and "
                    f"this server runs {revision}; load one that was trained on it, or ask the "
                    "operator for a worker with that base_model_revision under another "
                    "base_model_name"
                )
            tensors: Tensors = {}
            for key in file.keys():
                tensors[key] = _float32(key, file.get_tensor(key))
                header.check(key, tensors[key])
            state = AdapterState.from_tensors(config_in(metadata), int(metadata["step"]), tensors)
            if metadata.items() >= FRESH.items():
                zeros = {name: np.zeros(x.shape, x.dtype) for name, x in state.weights.items()}
                state = replace(state, first_moment=zeros, second_moment=zeros)
            return state
    except _DAMAGE as error:
        called = f"the checkpoint {name}" if name else "the checkpoint"
        raise FileDamaged(
            f"{called} is damaged, in its file {directory.name}/{MEMBER}: {error}; load another "
            "checkpoint, or ask the operator to restore that file from a backup",
            str(error),
        ) from error


_DAMAGE = (
    SafetensorError,
    msgspec.MsgspecError,
    OSError,
    KeyError,
    TypeError,
    ValueError,
    RecursionError,
)


def _float32(name: str, tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if tensor.dtype != np.float32:
        raise ValueError(f"{name} is {tensor.dtype}, not float32")
    return tensor


def peft_members(state: AdapterState, base_model: str, revision: str = "") -> dict[str, bytes]:
    """Return the adapter in PEFT's layout, for ``PeftModel.from_pretrained`` on the base model."""
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for target in state.config.targets:
        a, b = state.weights[f"{target}.A"], state.weights[f"{target}.B"]
        layers = zip([a], [b], strict=True) if a.ndim == 2 else zip(a, b, strict=True)
        for module, pair in zip(peft_export.modules(target, a.shape), layers, strict=True):
            for part, matrix in zip("AB", pair, strict=True):
                tensors[peft_export.tensor_name(module, part)] = np.ascontiguousarray(matrix.T)
    config = peft_export.encoded_config(state.config, base_model, revision)
    return {
        export_files.CONFIG: config,
        export_files.WEIGHTS: tensor_file.encoded(tensors, peft_export.metadata_of(config)),
    }


def encrypt(members: Mapping[str, bytes], recipients: Sequence[str]) -> dict[str, bytes]:
    """Encrypt each member for the age recipients; the results are named ``*.age``.

    Raises ``UserError`` for a recipient that is not an age public key.
    """
    keys = []
    for recipient in recipients:
        try:
            keys.append(pyrage.x25519.Recipient.from_str(recipient))
        except pyrage.RecipientError as error:
            raise UserError(
                f"age_encryption_recipients has {recipient!r}, no age public key: {error}"
            ) from error
    return {f"{name}.age": pyrage.encrypt(data, keys) for name, data in members.items()}
