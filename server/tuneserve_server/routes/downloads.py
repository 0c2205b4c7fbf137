"""The route of downloads by signed links: clients download without a key."""

import asyncio
import hashlib
import hmac
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse

from tuneserve_engine.adapters import export_files
from tuneserve_engine.adapters.checkpoint_format import MEMBER
from tuneserve_engine.adapters.tensor_file import Damaged
from tuneserve_engine.core.records import SessionRecord
from tuneserve_server import session_trace
from tuneserve_server.dependencies import Caller, Services, ServicesDep
from tuneserve_server.errors import CheckpointDamaged, LinkInvalid, TooManyRequests, UnknownResource
from tuneserve_server.http.openapi import BINARY, fails
from tuneserve_server.transfer import peft_download

router = APIRouter()


def _signature(secret: bytes, file_id: str, member: str, expires_s: int, tenant: str) -> str:
    text = f"download|{tenant}|{expires_s}|{file_id}|{member}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def signed_url(caller: Caller, base_url: str, file_id: str, member: str, expires_s: int) -> str:
    """Return a signed link to one member of the file, to its archive, or to a session's trace.

    The link is valid until ``expires_s`` (unix seconds).
    """
    query = {
        "expires": expires_s,
        "tenant": caller.tenant,
        "signature": _signature(caller.secret, file_id, member, expires_s, caller.tenant),
    }
    path = f"/api/v1/files/{file_id}/{quote(member, safe='')}"
    return f"{base_url.rstrip('/')}{path}?{urlencode(query)}"


async def _until_sent() -> AsyncIterator[AsyncExitStack]:
    """Yield a stack that closes when the answer has been sent."""
    async with AsyncExitStack() as stack:
        yield stack


@router.get(
    "/files/{file_id}/{member}",
    response_class=FileResponse,
    responses={
        200: {"content": {"application/octet-stream": BINARY}},
        **fails(LinkInvalid, UnknownResource, CheckpointDamaged, TooManyRequests),
    },
)
async def download(  # noqa: PLR0913 - the parts of the link
    file_id: str,
    member: str,
    request: Request,
    services: ServicesDep,
    sending: Annotated[AsyncExitStack, Depends(_until_sent)],
    expires: int = 0,
    tenant: str = "",
    signature: str = "",
) -> Response:
    """Return the file's bytes; any client with a valid signed link may fetch them."""
    expected = _signature(services.secret, file_id, member, expires, tenant)
    if not hmac.compare_digest(expected.encode(), signature.encode()) or expires < time.time():
        raise LinkInvalid("this download link is not valid or has expired; request a new one")
    if member == session_trace.NAME:
        sending.enter_context(services.archives.counted(tenant))
        return await _trace(services, file_id, tenant)
    if member == peft_download.NAME:
        sending.enter_context(services.archives.counted(tenant))
        archive = await services.archives.opened(file_id, "of this link")
        size = {"Content-Length": str(archive.size)}
        return peft_download.ArchiveResponse(services.archives.sent(archive), headers=size)
    folder, members = await services.archives.located(file_id)
    if member in peft_download.CONVERTED and MEMBER in members:
        sending.enter_context(services.archives.counted(tenant))
        converted = await services.archives.converted(file_id, member)
        return peft_download.ArchiveResponse(
            services.archives.sent(converted),
            headers={"Content-Length": str(converted.size)},
            media_type="application/octet-stream",
        )
    if member not in members:
        raise UnknownResource("the file is gone: its checkpoint was deleted or has expired")
    if "range" not in request.headers:  # a resumed download was checked when it began
        await asyncio.to_thread(_check, folder, member)
    return FileResponse(folder / member, media_type="application/octet-stream", filename=member)


async def _trace(services: Services, session_id: str, tenant: str) -> Response:
    """Return the trace of a session as it is now."""
    session = await services.store.get_record(SessionRecord, session_id)
    if session is None or session.tenant != tenant:
        raise UnknownResource("the session of this link is forgotten")
    content = await session_trace.trace_of(services.store, session)
    name = f"{session.key}.pftrace"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type="application/octet-stream", headers=headers)


def _check(folder: Path, member: str) -> None:
    try:
        export_files.check_member(folder, member)
    except Damaged as error:
        raise CheckpointDamaged(
            f"{member} of this export is damaged: {error}; export the model or its checkpoint "
            f"again, or ask the operator to restore {folder.name}/{member} from a backup"
        ) from error
    except FileNotFoundError:
        raise UnknownResource(
            "the file is gone: its checkpoint was deleted or has expired"
        ) from None
