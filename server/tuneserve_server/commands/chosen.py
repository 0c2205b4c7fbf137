"""The checkpoints that requests name by their paths: which may be sampled from and trained on."""

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.records import CheckpointRecord
from tuneserve_server.dependencies import Caller
from tuneserve_server.errors import UnknownResource


async def sampled_checkpoint(caller: Caller, path: str) -> CheckpointRecord:
    """Return the checkpoint at ``path``, of the caller or published.

    Raises ``UserError`` for an export.
    """
    checkpoint = await caller.readable(path)
    if checkpoint.is_export:
        raise UserError(
            f"{path} is an export for download; sample from a sampler_weights or weights path"
        )
    return checkpoint


async def training_checkpoint(
    caller: Caller, path: str, access_token: str | None = None
) -> CheckpointRecord:
    """Return the checkpoint at ``path``, of the caller or published.

    Raises ``UserError`` if training cannot go on from it, or if only ``access_token`` could open
    it.
    """
    try:
        checkpoint = await caller.readable(path)
    except UnknownResource as error:
        raise UserError(f"{error}{token_hint(access_token)}") from None
    if checkpoint.is_export:
        raise UserError(
            f"{path} is an export for download; to continue training, load a "
            "tinker://.../weights/... path, as save_state returns, or go on from the weights alone "
            "of a tinker://.../sampler_weights/... path"
        )
    return checkpoint


def token_hint(access_token: str | None) -> str:
    """Return the words to add to the refusal of a path that was sent with a token."""
    if access_token is None:
        return ""
    return (
        "; the weights_access_token opens nothing: this server issues no such tokens; ask the "
        "checkpoint's owner to publish it"
    )
