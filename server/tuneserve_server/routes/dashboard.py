"""The dashboard's static files: they hold no data and need no key."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

import tuneserve_server
from tuneserve_server.errors import UnknownResource
from tuneserve_server.http.openapi import fails

router = APIRouter()

PREFIX = "/page"
FOLDER = Path(tuneserve_server.__file__).parent / "dashboard" / "static"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Scripts and styles come from this server only, and the page contacts no other host: a run's
    # name, which a tenant chooses, cannot become code.
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidated each time, so that page and API are of one release
}


@dataclass(frozen=True)
class _StaticFile:
    content: bytes
    media_type: str
    etag: str


def _read(path: Path) -> _StaticFile:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _StaticFile(content, _TYPES[path.suffix], etag)


_FILES = {
    path.relative_to(FOLDER).as_posix(): _read(path)
    for path in sorted(FOLDER.rglob("*"))
    if path.suffix in _TYPES
}
"""The files by name; a lookup here can reach no other file."""


@router.get("/", status_code=307, response_class=RedirectResponse)
@router.get("/page", status_code=307, response_class=RedirectResponse)
async def root() -> Response:
    """Redirect to the dashboard."""
    return RedirectResponse("page/", headers=HEADERS)


@router.get(
    "/page/{name:path}",
    response_class=Response,
    responses={
        200: {"content": {media_type: {} for media_type in _TYPES.values()}},
        304: {"description": "the caller has the current file"},
        **fails(UnknownResource),
    },
)
async def page(name: str, request: Request) -> Response:
    """Return a file of the dashboard; without a name, its HTML page."""
    found = _FILES.get(name or _INDEX)
    if found is None:
        raise UnknownResource("the dashboard has no such file; open /page/")
    headers = {**HEADERS, "ETag": found.etag}
    if request.headers.get("If-None-Match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)
