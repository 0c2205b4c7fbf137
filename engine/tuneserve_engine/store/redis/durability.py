"""Checks that a Redis server keeps its data: its version, its settings and its access control."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

logger = logging.getLogger(__name__)

OLDEST = (7, 0)  # first with script flags; fsyncs before each answer, whatever else runs
SETTINGS = {
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "maxmemory-policy": "noeviction",
}

# CVE-2025-49844: a user who may run scripts may run any program. The first releases without it, by
# series; distributions patch older releases without changing their number.
_PATCHED: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {
    "redis": {(7, 2): (7, 2, 11), (7, 4): (7, 4, 6), (8, 0): (8, 0, 4), (8, 2): (8, 2, 2)},
    "valkey": {(7, 2): (7, 2, 11), (8, 0): (8, 0, 6), (8, 1): (8, 1, 4)},
}


class Unsafe(RedisError):
    """The server may lose accepted data, or needs no password; the message says what to do."""


class Checker:
    """A check of each server start: a server that was started again has another run id."""

    def __init__(self, durability_asserted: bool) -> None:
        self._durability_asserted = durability_asserted
        self._verified: str | None = None
        self.durability: Literal["always", "asserted"] = "always"

    @property
    def run_id(self) -> str:
        """The run id of the last verified server; it changes with every start."""
        return self._verified or ""

    async def verify(self, connection: Any, stranger: Callable[[], Any]) -> None:
        """Check that the server can be trusted. Raises ``Unsafe`` if it cannot.

        ``stranger`` makes a connection to the same server that does not log in.
        """
        facts = _facts(await _ask(connection, "INFO"))
        run_id = facts.get("run_id", "")
        if run_id and run_id == self._verified:
            return
        _check_server(facts)
        self.durability = await self._check_settings(connection)
        is_elsewhere = not await asyncio.to_thread(is_local, connection)  # may ask DNS
        if is_elsewhere and await _lets_anybody_in(stranger()):
            raise Unsafe(
                "it lets anybody in, and it is not on this machine; set a password in its "
                "configuration (requirepass, or users in an ACL file) and in the store's address"
            )
        self._verified = run_id

    async def _check_settings(self, connection: Any) -> Literal["always", "asserted"]:
        try:
            answer = await _ask(connection, "CONFIG", "GET", *SETTINGS)
        except (NoPermissionError, ResponseError) as error:
            if self._durability_asserted:
                return "asserted"
            raise Unsafe(
                f"its settings cannot be read ({error}); allow CONFIG GET, or, if you know that it "
                "writes to disk before it answers and evicts nothing, say so with "
                "store_durability_asserted = true"
            ) from error
        found = {name.decode(): value.decode() for name, value in _pairs(answer)}
        wrong = {n: found.get(n, "") for n, wanted in SETTINGS.items() if found.get(n) != wanted}
        if wrong:
            raise Unsafe(
                "it may lose what it has accepted: "
                + ", ".join(f"{name} is {value!r}" for name, value in wrong.items())
                + "; set in its configuration: "
                + ", ".join(f"{name} {SETTINGS[name]}" for name in wrong)
            )
        return "always"


async def _ask(connection: Any, *command: str) -> Any:
    await connection.send_command(*command, check_health=False)
    return await connection.read_response()


def _pairs(flat: list[bytes]) -> "zip[tuple[bytes, bytes]]":
    return zip(flat[::2], flat[1::2], strict=True)


def _facts(info: bytes) -> dict[str, str]:
    """Return the answer to ``INFO`` as a dictionary."""
    lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def _check_server(facts: dict[str, str]) -> None:
    product = "valkey" if "valkey_version" in facts else "redis"
    release = facts.get(f"{product}_version", "")
    if _version(facts.get("redis_version", "")) < OLDEST:
        raise Unsafe(f"it is {product} {release}, and the oldest that will do is 7.0; upgrade it")
    if facts.get("redis_mode", "standalone") == "cluster":
        raise Unsafe(
            "it is a node of a cluster, and all keys of the store would be on one node; give the "
            "address of a server of its own"
        )
    if facts.get("role", "master") != "master":
        raise Unsafe("it is a replica, which takes no writes; give the address of the primary")
    if is_known_unpatched(product, _version(release)):
        _warn_unpatched(product, release)


@cache
def _warn_unpatched(product: str, release: str) -> None:
    """Log the warning once, not for every connection that finds the server started again."""
    logger.warning(
        "the store's server is %s %s, which as first published has a hole that lets its users "
        "run programs (CVE-2025-49844); see that your distribution has closed it, or upgrade",
        product,
        release,
    )


def is_known_unpatched(product: str, version: tuple[int, ...]) -> bool:
    """Return whether the release, as its makers published it, is open to CVE-2025-49844."""
    patched = _PATCHED[product]
    if version[:2] in patched:
        return version < patched[version[:2]]
    return version[:2] < max(patched)


def is_local(connection: Any) -> bool:
    """Return whether only this machine can reach the server at the connection's address."""
    host = getattr(connection, "host", None)
    if host is None:
        return True  # a Unix socket
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(each[4][0]).is_loopback for each in found)


async def _lets_anybody_in(stranger: Any) -> bool:
    try:
        await stranger.connect()
        await _ask(stranger, "PING")
    except AuthenticationError:
        return False
    except RedisError as error:
        logger.info("the store's server refuses strangers: %s", error)
        return False
    finally:
        await stranger.disconnect(nowait=True)
    return True
