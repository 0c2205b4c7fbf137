"""The names of models in requests: base models, checkpoints, sampling sessions."""

import re
from dataclasses import dataclass

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.records import CheckpointRecord
from tuneserve_server.base_model_text import BaseText
from tuneserve_server.base_models import is_same
from tuneserve_server.commands import chosen
from tuneserve_server.dependencies import Caller
from tuneserve_server.errors import ModelNotFound, ModelUnavailable, UnknownResource

_PATH = "tinker://"
_SAMPLER = re.compile(r"s-\w+:sample:\d+")


@dataclass(frozen=True)
class Target:
    """The base model, its tokenizer and the checkpoint's file that a model's name means."""

    info: BaseModelInfo
    text: BaseText
    file_id: str | None


async def resolve_target(caller: Caller, asked: str) -> Target:
    """Return the target that a model's name means.

    Raises ``ModelNotFound``, ``ModelUnavailable``.
    """
    file_id = None
    try:
        if is_checkpoint(asked):
            checkpoint = await named_checkpoint(caller, asked)
            file_id = checkpoint.file_id
            name = await caller.served.resolve(checkpoint.base_model)
        elif _SAMPLER.fullmatch(asked):
            sampler = await caller.sampler(asked)
            file_id = (await caller.weights_of(sampler)).file_id
            name = await caller.served.resolve(sampler.base_model)
        else:
            name = await caller.served.resolve(asked)
    except (UnknownResource, UserError) as error:
        raise ModelNotFound(f"{error} (GET /v1/models lists the models)") from None
    info = await caller.served.info(name)
    if info is None:
        raise ModelUnavailable(
            f"no worker has served {name!r} yet; send the request again when a worker is ready"
        )
    return Target(info, await caller.tokenizers.load_base_text(info), file_id)


def is_checkpoint(asked: str) -> bool:
    """Return whether a model's name is that of a checkpoint."""
    return _PATH in asked


async def named_checkpoint(caller: Caller, asked: str) -> CheckpointRecord:
    """Return the checkpoint named ``<path>`` or, as on the hosted service, ``<base model>;<path>``.

    Raises ``UnknownResource``, and ``UserError`` for another base model than the checkpoint's.
    """
    base, _, path = asked.rpartition(";")
    checkpoint = await chosen.sampled_checkpoint(caller, path)
    if base and not is_same(base, checkpoint.base_model):
        raise UserError(
            f"{path} is a checkpoint of {checkpoint.base_model!r}, not of {base[:256]!r}; put the "
            "checkpoint's base model before the semicolon, or send the path alone"
        )
    return checkpoint
