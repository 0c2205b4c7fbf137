"""The route that serves the base models' tokenizers, so that clients need no hub."""

from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import FileResponse

from tuneserve_server.dependencies import CallerDep
from tuneserve_server.errors import BadRequest, ModelUnavailable, UnknownResource
from tuneserve_server.http.openapi import BINARY, fails

router = APIRouter()

_BYTES = "application/octet-stream"
File = Literal["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


@router.get(
    "/tokenizer",
    response_class=FileResponse,
    responses={
        200: {"content": {_BYTES: BINARY}},
        304: {"description": "the file has the ETag that was sent"},
        **fails(BadRequest, UnknownResource, ModelUnavailable),
    },
)
async def tokenizer(
    caller: CallerDep,
    base_model: Annotated[str, Query(max_length=256)],
    file: File = "tokenizer.json",
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Return a file of the base model's tokenizer.

    A tokenizer may lack ``tokenizer_config.json`` or ``chat_template.jinja``; the chat template can
    be in either.
    """
    name = await caller.served.resolve(base_model)
    info = await caller.served.info(name)
    if info is None:
        raise ModelUnavailable(
            f"no worker has served {name!r} yet; send the request again when a worker is ready"
        )
    path = (await caller.tokenizers.load_base_text(info)).folder / file
    if not path.is_file():
        raise UnknownResource(f"the tokenizer of {name!r} has no {file}")
    stat = path.stat()
    tag = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if tag in (if_none_match or ""):
        return Response(status_code=304, headers=headers)
    return FileResponse(path, media_type=_BYTES, headers=headers)
