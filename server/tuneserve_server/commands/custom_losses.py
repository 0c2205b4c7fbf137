"""Custom losses: created in a session, and joined with the requests that name them.

A graph is checked when it is created, and stored with its session. Every request that names it is
stored with the graph, so that a run or a replay needs nothing but the request.
"""

import asyncio
import time

from tuneserve_client.wire import custom_loss_types as types
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_client.wire.proto.scan import read_config
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import Outcome, Rejection
from tuneserve_engine.core.records import CustomLossRecord, ModelRecord, SessionRecord
from tuneserve_engine.custom_loss import graph
from tuneserve_engine.store.errors import LimitReached
from tuneserve_server.dependencies import Caller
from tuneserve_server.http import body
from tuneserve_server.http.incoming import finished

LOSS = "custom"

_MARK = ":loss:"
_LOSS_ID, _GRAPH = "loss_id", "graph"
_MOST_CONFIG_BYTES = 4096
_MOST_BODY_BYTES = 4 * graph.MAX_TEXT_BYTES
_RETRY_S = 30

MOST_TENANT_LOSSES = 1000
"""The most custom losses of a tenant, in all its sessions that have not ended."""


async def create(
    caller: Caller,
    session: SessionRecord,
    keys: types.CustomLossKey,
    parsed: types.CreateCustomLossRequest | UserError,
    size: int,
) -> str:
    """Store the loss, or the reason why it cannot be run; return the id of its future.

    The id is also that of the loss. A repeated request keeps the first one's loss. ``size`` is that
    of the request's body in bytes. Raises ``LimitReached`` beyond ``MOST_TENANT_LOSSES``.
    """
    key = f"{session.key}{_MARK}{keys.custom_loss_seq_id}"
    text = error = ""
    # Checking holds up other requests for some milliseconds, and the limit counts one at a time.
    async with caller.body_memory.turns.wait_for_turn(caller.tenant):
        await _check_count(caller, key)
        try:
            if size > _MOST_BODY_BYTES:
                raise UserError(
                    f"the request has {size} bytes; the limit is {_MOST_BODY_BYTES}; make the loss "
                    "smaller, or run it on the client"
                )
            request = body.accepted(parsed)
            text = await finished(asyncio.to_thread(_checked, request))
        except UserError as refusal:
            error = str(refusal)
        now_s = time.time()
        record = CustomLossRecord(key, session.tenant, session.key, now_s, text, error)
        caller.disk.admit(len(text))
        return (await caller.store.put_new_record(record)).key


async def _check_count(caller: Caller, key: str) -> None:
    """Raise ``LimitReached`` if the loss is new, and its tenant has as many as it may."""
    if await caller.store.get_record(CustomLossRecord, key) is not None:
        return
    losses = await caller.store.page_of_records(CustomLossRecord, tenant=caller.tenant, limit=0)
    if losses.total >= MOST_TENANT_LOSSES:
        raise LimitReached(
            f"you have {losses.total} custom losses in sessions that have not ended, which is the "
            "limit; nothing was created; finish sessions that you no longer need, and use one loss "
            "for many requests",
            _RETRY_S,
        )


def _checked(request: types.CreateCustomLossRequest) -> str:
    """Return the text of the graph, which can be run. Raises ``UserError``."""
    text = graph.to_text(
        request.name,
        [each.model_dump(include={"name", "rank"}) for each in request.inputs],
        [
            each.model_dump(include={"op", "name", "target", "args", "kwargs"})
            for each in request.graph.nodes
        ],
    )
    graph.parse(text)
    return text


def is_future(request_id: str) -> bool:
    """Return whether a future is that of a custom loss."""
    return _MARK in request_id


async def outcome(caller: Caller, request_id: str) -> Outcome | None:
    """Return the outcome of the caller's creation of a loss; None if there is none."""
    record = await caller.store.get_record(CustomLossRecord, request_id)
    if record is None or record.tenant != caller.tenant:
        return None
    if record.error:
        return Outcome(request_id, rejection=Rejection(record.error))
    response = types.CreateCustomLossResponse(loss_id=record.key)
    return Outcome(request_id, response.model_dump_json().encode())


async def joined(caller: Caller, model: ModelRecord, message: bytes) -> bytes:
    """Return the request with the graph of the loss that it names. Raises ``UserError``."""
    entries = read_config(message, _MOST_CONFIG_BYTES)
    if entries is None:
        raise UserError("loss_fn_config of a custom loss has more than a loss_id; send only that")
    config = wire.ForwardBackwardRequest.FromString(entries).loss_fn_config_v2
    loss_id = config[_LOSS_ID].text if _LOSS_ID in config else ""
    record = await caller.store.get_record(CustomLossRecord, loss_id[:256]) if loss_id else None
    # The same words for a loss of another session or tenant, and for one that does not exist.
    if record is None or (record.tenant, record.parent) != (model.tenant, model.parent):
        raise UserError(
            "loss_fn_config names no custom loss of the model's session as its loss_id; create "
            "the loss by create_custom_loss of the ServiceClient that made the model"
        )
    if record.error:
        raise UserError(f"the custom loss could not be created: {record.error}")
    # Later fields of a message are merged into it, and a later entry of a map replaces it.
    added = wire.ForwardBackwardRequest()
    added.loss_fn_config_v2[_GRAPH].text = record.graph
    return message + added.SerializeToString(deterministic=True)
