"""The documentation site: static files that hold no data and need no key."""

import base64
import hashlib
import re
from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

import tuneserve_server
from tuneserve_server.errors import UnknownResource
from tuneserve_server.http.openapi import fails
from tuneserve_server.routes import dashboard

router = APIRouter()

PREFIX = "/docs"
_PACKAGE = Path(tuneserve_server.__file__).parent
FOLDERS = (_PACKAGE / "site", _PACKAGE.parents[1] / "docs" / "_build" / "html")
"""The site in a wheel, and in a repository."""
_MARKDOWN = "docs/index.md"
_NOT_BUILT = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>tuneserve documentation</title></head><body>
<h1>The documentation site is not built</h1>
<p>Run <code>make docs</code> in the repository, then load this page again. You can read the same
pages as Markdown there: start with <code>{_MARKDOWN}</code> or <code>README.md</code>.</p>
<p><a href="../page/">To the dashboard</a></p></body></html>
"""
_INLINE = re.compile(r"<script>(.*?)</script>", re.S)


def site_folder() -> Path | None:
    """Return the folder of the built site, or None if there is none."""
    return next((each for each in FOLDERS if (each / "index.html").is_file()), None)


@lru_cache(maxsize=4)
def _policy(index: str) -> str:
    """Return the dashboard's policy, which also allows the scripts that the theme writes inline."""
    digests = [hashlib.sha256(each.encode()).digest() for each in _INLINE.findall(index)]
    scripts = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
    return (
        f"{dashboard.HEADERS['Content-Security-Policy']}; script-src 'self' {scripts}; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data:"
    ).replace("form-action 'none'", "form-action 'self'")


@router.get("/docs", status_code=307, response_class=RedirectResponse)
async def documentation_root() -> Response:
    """Redirect to the documentation site."""
    return RedirectResponse("docs/", headers=dashboard.HEADERS)


@router.get(
    "/docs/{name:path}",
    response_class=HTMLResponse,
    responses={304: {"description": "the caller has the current file"}, **fails(UnknownResource)},
)
async def documentation(name: str, request: Request) -> Response:
    """Return a file of the documentation site; without a name, its first page."""
    folder = site_folder()
    if folder is None and not name:
        return HTMLResponse(_NOT_BUILT, headers=dashboard.HEADERS)
    missing = UnknownResource("the documentation has no such page; open /docs/")
    if folder is None or "\0" in name:
        raise missing
    try:
        answer = await StaticFiles(directory=folder).get_response(
            name or "index.html", request.scope
        )
    except HTTPException:
        raise missing from None
    policy = _policy((folder / "index.html").read_text())
    answer.headers.update(dashboard.HEADERS | {"Content-Security-Policy": policy})
    return answer
