"""``stable_reinforce`` requests, joined with the recordings of the samples that they name.

The recordings are looked up before the request is accepted and stored in the request, so that a
run or a replay needs nothing but the request.
"""

import asyncio
from collections.abc import Mapping, Sequence

from tuneserve_engine.core import provenance, recordings
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import Job, JobKind
from tuneserve_engine.core.provenance import Provenance, Source
from tuneserve_engine.core.recordings import Gone, SampleKey
from tuneserve_engine.core.records import ModelRecord
from tuneserve_engine.store import refusals
from tuneserve_server.dependencies import Caller
from tuneserve_server.http.incoming import finished

LOSS = provenance.LOSS

_AT_ONCE = 256  # recordings that one call asks the store for
_MOST_BYTES = 64 * 2**20  # of the sequences that a request names: 4x its own tokens' bytes

_Wanted = dict[SampleKey, list[tuple[str, int]]]
"""The id and the index of each wanted sequence, by sample."""


async def joined(caller: Caller, model: ModelRecord, payload: bytes) -> bytes:
    """Return the request with the recordings of the sequences it names. Raises ``UserError``.

    This takes memory that is not counted: the recordings of one answer of the store, and a few
    times the request. Call it only in a turn of ``BodyMemory.lookups``.
    """
    if not caller.settings.stable_reinforce:
        raise UserError(
            f"loss_fn {LOSS!r} is turned off here (setting stable_reinforce); use "
            "importance_sampling, ppo or cispo, which train on the same data, or ask the operator"
        )
    asked = await finished(asyncio.to_thread(Provenance, payload, model.parent))
    await _look_up(caller, asked)
    return await finished(asyncio.to_thread(asked.joined))


async def _look_up(caller: Caller, asked: Provenance) -> None:
    """Look up the sequences that the request names, and give them to its spans batch by batch."""
    wanted: _Wanted = {}
    for sequence_id, (key, index) in asked.samples.items():
        wanted.setdefault(key, []).append((sequence_id, index))
    left = list(wanted)
    size = 0
    while left:
        count, found_bytes = await _look_up_some(caller, asked, left[:_AT_ONCE], wanted)
        left, size = left[count:], size + found_bytes
        if size > _MOST_BYTES:
            raise UserError(
                f"the sequences that the request names have more than {_MOST_BYTES} bytes "
                "together; split the request"
            )


async def _look_up_some(
    caller: Caller, asked: Provenance, keys: Sequence[SampleKey], wanted: _Wanted
) -> tuple[int, int]:
    """Return how many of these samples one answer of the store had, and their sequences' bytes."""
    bodies = await caller.store.recordings(caller.tenant, keys)
    found: dict[SampleKey, bytes] = {}
    for key, body in zip(keys, bodies, strict=False):
        if isinstance(body, Gone):
            raise UserError(f"{asked.first[key]}, {await _why(caller, key, body)}")
        found[key] = body
    return len(found), await finished(asyncio.to_thread(_take, asked, found, wanted))


def _take(asked: Provenance, found: Mapping[SampleKey, bytes], wanted: _Wanted) -> int:
    """Give the named sequences of these recordings to the spans; return the sequences' bytes."""
    size = 0
    for key, body in found.items():
        named = _named(body, wanted[key], asked.first[key])
        asked.take_sequences(named)
        size += sum(len(each.drawn.tokens) + len(each.drawn.logprobs) for each in named.values())
    return size


def _named(body: bytes, wanted: Sequence[tuple[str, int]], first: str) -> Mapping[str, Source]:
    """Return the wanted sequences of a recorded sample, by their ids."""
    recording = recordings.decode(body)
    count = len(recording.sequences)
    if any(index >= count for _, index in wanted):
        raise UserError(
            f"{first}, or another of its sample, which has {count} sequences: the last number of a "
            f"sequence_id is 0 to {count - 1}"
        )
    return {
        sequence_id: Source(recording.sequences[index], recording.prompt)
        for sequence_id, index in wanted
    }


async def _why(caller: Caller, key: SampleKey, gone: Gone) -> str:
    """Return why a sample has no recording, and what to do."""
    again = f"sample again, and train on it with {LOSS} soon after"
    if gone is Gone.UNUSED:
        kept_s = caller.settings.recording_ttl_s
        return f"which was dropped because no training used it for {kept_s:g} s; {again}"
    if gone is Gone.NO_ROOM:
        limit = caller.settings.max_recording_bytes
        return (
            "which was dropped to make room: your recordings may have "
            f"{limit} bytes, and the least recently used are dropped first; {again}, or ask the "
            "operator for a larger max_recording_bytes"
        )
    job = Job(caller.tenant, JobKind.SAMPLE, key.scope, key.seq)
    state = await caller.store.request(refusals.request_id(caller.secret, job))
    if state is None:
        return f"which this server does not know (any more); {again}"
    if state.state in ("held", "ready"):
        return "which is still being sampled; wait for its result first"
    if state.failed:
        return "but its sample failed; leave it out"
    return (
        "which was sampled without record_stability_info, or by a sampler that was deleted before "
        "the sample ended; create the sampling client with record_stability_info=True, and sample "
        "again"
    )
