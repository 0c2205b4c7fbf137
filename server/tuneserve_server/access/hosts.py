"""The host names this server answers to, so that another site's page cannot reach it.

If ``evil.example`` is made to resolve to 127.0.0.1 (DNS rebinding), a browser takes a page of
``http://evil.example`` and this server for one origin: the page may read every answer. The page's
requests still carry its own name in ``Host``, which a page cannot change.
"""

import ipaddress
import re
from collections.abc import Awaitable, Callable, Collection, Iterable
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tuneserve_engine.store.errors import StoreFailed
from tuneserve_server.errors import ApiError, BadRequest, HostNotAllowed, answer

LOOPBACK = ("localhost", "*.localhost")
ANY = "*"
_SHOWN = 128  # characters of a name that is refused
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::\d{0,5})?")


class AllowedHosts:
    """The names of this server.

    A literal IP address is always allowed: no name server answers for it, so a page that was
    loaded from it is this server's own.
    """

    def __init__(self, names: Iterable[str]) -> None:
        patterns = [name.lower().rstrip(".") for name in names]
        self._any = ANY in patterns
        self._names = {name for name in patterns if not name.startswith("*")}
        self._parents = tuple(name[1:] for name in patterns if name.startswith("*."))

    def has(self, host: str) -> bool:
        """Return whether the value of a ``Host`` header names this server."""
        if self._any:
            return True
        match = _HOST.fullmatch(host.strip().lower())
        name = match["name"].strip("[]").rstrip(".") if match else ""  # without the port
        if name in self._names or name.endswith(self._parents):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def names_of(host: str, public_url: str | None, allowed_hosts: Iterable[str]) -> list[str]:
    """Return the names of a server with these settings."""
    public = urlsplit(public_url).hostname if public_url else None
    return [*LOOPBACK, host, *([public] if public else []), *allowed_hosts]


class CheckHost:
    """A middleware that refuses requests with a wrong ``Host``.

    A request must have exactly one ``Host``. A request to another name than this server's is
    refused on every path while the server requires no keys, otherwise only on paths that need no
    key (``open_paths``, and paths that begin with ``page``). All other paths need a key or a signed
    download link, and another site's page has neither.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        allowed: AllowedHosts,
        wants_keys: Callable[[Scope], Awaitable[bool]],
        open_paths: Collection[str],
        page: str | tuple[str, ...],
    ) -> None:
        self._app = app
        self._allowed = allowed
        self._wants_keys = wants_keys
        self._open_paths = open_paths
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            problem: ApiError | None = None
            if len(hosts) != 1:
                problem = BadRequest(
                    f"the request has {len(hosts)} Host headers and must have exactly one (RFC "
                    "9112, section 3.2); send the address you call as Host"
                )
            elif not self._allowed.has(hosts[0]) and not await self._is_safe(scope):
                problem = HostNotAllowed(
                    f"this server does not answer to the name {hosts[0][:_SHOWN]!r}: it answers to "
                    "localhost, to IP addresses, and to the names in its setting allowed_hosts; "
                    "call it by one of these, or ask the operator to add the name there"
                )
            if problem is not None:
                await answer(Request(scope), problem)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _is_safe(self, scope: Scope) -> bool:
        """Return whether any name is allowed, because the path needs a key or a signed link."""
        path = scope["path"]
        if path in self._open_paths or path.startswith(self._page):
            return False
        try:
            return await self._wants_keys(scope)
        except (StoreFailed, ConnectionError):
            return False
