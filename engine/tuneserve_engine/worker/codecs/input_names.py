"""The names of a request's ``loss_fn_inputs``: those that the loss reads, ignores, or that are
misspelt.

A misspelt optional input would be ignored, and the model trained on something else than was meant.
Extra inputs are legal: the official SDK sends any name, and its cookbook keeps a ``mask`` there.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.errors import UserError, shown
from tuneserve_engine.core.misspelt import meant

logger = logging.getLogger(__name__)

_CLOSE = 0.8  # no two inputs are nearer; "target_mask" is 0.67 from "target_tokens"


def check_unread(
    unread: AbstractSet[str],
    data: Sequence[wire.Datum],
    loss: str,
    read: Sequence[str],
    known: Collection[str],
) -> None:
    """Log the names in the data that the loss ignores; ``read`` are those it reads, ``known`` those
    of any loss. Raises ``UserError`` if one seems to be a misspelt name of ``read``.

    Compares each name once, however many datums have it.
    """
    misspelt = {
        name: close
        for name in unread
        if name not in known and (close := meant(name, read, close=_CLOSE)) is not None
    }
    if misspelt:
        _refuse_misspelt(data, loss, read, misspelt)
    names = ", ".join(map(shown, sorted(unread)[:8]))
    logger.warning("%s does not read %s in loss_fn_inputs; ignored", loss, names)


def _refuse_misspelt(
    data: Sequence[wire.Datum], loss: str, read: Sequence[str], misspelt: Mapping[str, str]
) -> None:
    """Raise ``UserError`` for the first datum with a misspelt name and without the right one."""
    for i, datum in enumerate(data):
        inputs = datum.loss_fn_inputs
        for name in sorted(misspelt.keys() & inputs.keys()):
            if misspelt[name] not in inputs:
                raise UserError(
                    f"data[{i}].loss_fn_inputs has {shown(name)}, which {loss} does not read; did "
                    f"you mean {misspelt[name]!r}? It reads {', '.join(read)}; rename the input, "
                    "or leave it out"
                )
