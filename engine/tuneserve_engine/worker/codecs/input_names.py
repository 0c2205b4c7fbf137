"""The names of a request's ``loss_fn_inputs``: those that the loss reads, ignores, or that are
misspelt.

A misspelt optional input would be ignored, and the model trained on something else than was meant.
Extra inputs are legal: the official SDK sends any name, and its cookbook keeps a ``mask`` there.
"""

import difflib
import logging
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.errors import UserError, shown

logger = logging.getLogger(__name__)

_CLOSE = 0.8  # one letter swapped, left out or put in; "target_mask" is 0.67 from "target_tokens"
_LONGEST = 32  # a longer name resembles none, and comparing takes time quadratic in its length


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
    meant = {
        name: close
        for name in unread
        if name not in known and (close := _meant(name, read)) is not None
    }
    if meant:
        _refuse_misspelt(data, loss, read, meant)
    names = ", ".join(map(shown, sorted(unread)[:8]))
    logger.warning("%s does not read %s in loss_fn_inputs; ignored", loss, names)


def _meant(name: str, read: Sequence[str]) -> str | None:
    """Return the name that this one seems to misspell; None if there is none."""
    if len(name) > _LONGEST:
        return None
    spelt = name.lower().replace("-", "_").strip(" _")
    if any(f"_{each}_" in f"_{spelt}_" for each in read if each != spelt):
        return None  # composed on purpose: ref_logprobs, token_weights
    return next(iter(difflib.get_close_matches(spelt, read, 1, _CLOSE)), None)


def _refuse_misspelt(
    data: Sequence[wire.Datum], loss: str, read: Sequence[str], meant: Mapping[str, str]
) -> None:
    """Raise ``UserError`` for the first datum with a misspelt name and without the right one."""
    for i, datum in enumerate(data):
        inputs = datum.loss_fn_inputs
        for name in sorted(meant.keys() & inputs.keys()):
            if meant[name] not in inputs:
                raise UserError(
                    f"data[{i}].loss_fn_inputs has {shown(name)}, which {loss} does not read; did "
                    f"you mean {meant[name]!r}? It reads {', '.join(read)}; rename the input, or "
                    "leave it out"
                )
