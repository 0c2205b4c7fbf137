"""The parts of an upload by signed links: one file each, kept as records until the upload ends.

A part is the record of a checkpoint under a tenant's name of its own, which no key has: so no route
finds it as a checkpoint, its expiry and its file are the store's business, and its size can be
counted apart.
"""

import time
from dataclasses import dataclass

from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.records import CheckpointKind, CheckpointRecord, Update
from tuneserve_engine.store.base import CheckpointUsage, Store
from tuneserve_engine.store.files import new_file_id
from tuneserve_server.errors import UnknownResource
from tuneserve_server.transfer import tar
from tuneserve_server.transfer.peft_upload import LONGEST_S

PARTS = (tar.CONFIG, tar.WEIGHTS)
MOST_OPEN = 4
"""The most unfinished uploads of a tenant."""


@dataclass(frozen=True)
class UploadParts:
    """The parts of one upload, by the names of their files."""

    config: CheckpointRecord
    weights: CheckpointRecord

    @property
    def base_model(self) -> str:
        return self.config.base_model

    @property
    def asked(self) -> AdapterConfig:
        """The rank and the targets that the client announced."""
        return self.config.config

    @property
    def expires_s(self) -> float:
        """The time until which a file may begin to arrive."""
        assert self.config.expires_s is not None
        return self.config.expires_s - LONGEST_S

    def check_whole(self) -> None:
        """Raise ``UserError`` if a file has not arrived."""
        for each in (self.config, self.weights):
            if not each.size_bytes:
                raise UserError(
                    f"{each.name} has not arrived; send it with PUT to its link before you finish "
                    "the upload"
                )


def holder(tenant: str) -> str:
    """Return the name under which a tenant's parts are kept; a colon is in no tenant's name."""
    return f"uploads:{tenant}"


async def begin(  # noqa: PLR0913 - facts of the upload
    store: Store,
    tenant: str,
    upload_id: str,
    base_model: str,
    config: AdapterConfig,
    *,
    project_id: str | None,
    ttl_s: float,
) -> UploadParts:
    """Return the parts of the upload, new or as they are.

    Raises ``UserError`` if the tenant has too many unfinished uploads.
    """
    now_s = time.time()
    held = await usage(store, tenant)
    if held.count >= MOST_OPEN * len(PARTS) and await _part(store, upload_id, tar.CONFIG) is None:
        raise UserError(
            f"you have {held.count // len(PARTS)} unfinished uploads, which is the limit; finish "
            "one of them, or wait until its links have expired"
        )
    made = [
        await store.put_new_record(
            CheckpointRecord(
                key=_key(upload_id, member),
                tenant=holder(tenant),
                parent=upload_id,
                kind=CheckpointKind.EXTERNAL,
                name=member,
                file_id=new_file_id(),  # of no file, until the part arrives
                base_model=base_model,
                config=config,
                created_s=now_s,
                expires_s=now_s + ttl_s + LONGEST_S,
                project_id=project_id,
            )
        )
        for member in PARTS
    ]
    return UploadParts(*made)


async def parts_of(store: Store, tenant: str, upload_id: str) -> UploadParts:
    """Return the tenant's unfinished upload. Raises ``UnknownResource``."""
    config, weights = [await _part(store, upload_id, member) for member in PARTS]
    if config is None or weights is None or config.tenant != holder(tenant):
        raise UnknownResource(
            f"this upload does not exist, or it has expired, or it is not yours: "
            f"{upload_id[:256]} (your tenant: {tenant}); start another"
        )
    return UploadParts(config, weights)


async def keep(store: Store, part: CheckpointRecord, file_id: str, size: int) -> bool:
    """Make the file the part's; return False if the upload has ended meanwhile."""
    changes = {"file_id": file_id, "size_bytes": size}
    await store.update_record(Update("checkpoint", part.key, changes))
    kept = await store.get_record(CheckpointRecord, part.key)
    return kept is not None and kept.file_id == file_id


async def forget(store: Store, parts: UploadParts) -> None:
    """Delete the parts, but not their files."""
    for each in (parts.config, parts.weights):
        await store.delete_record(CheckpointRecord, each.key)


async def usage(
    store: Store, tenant: str, *, but: CheckpointRecord | None = None
) -> CheckpointUsage:
    """Return the number and the bytes of the tenant's parts, without one of them."""
    return await store.checkpoint_usage(holder(tenant), but.key if but else "")


async def _part(store: Store, upload_id: str, member: str) -> CheckpointRecord | None:
    found = await store.get_record(CheckpointRecord, _key(upload_id, member))
    return None if found is None or found.has_expired(time.time()) else found


def _key(upload_id: str, member: str) -> str:
    return f"upload://{upload_id}/{member}"
