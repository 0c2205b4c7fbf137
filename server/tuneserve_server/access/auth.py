"""Authentication: API keys, their lookup, and the limits on failed logins.

A key is ``tml-<id>-<secret>``. The store has the HMAC of the secret, never the secret. Until
the store has had a key, and unless the settings require keys, any text that begins like a key
names a tenant (open mode).
"""

import asyncio
import hashlib
import hmac
import ipaddress
import math
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tuneserve_engine.core.records import KeyRecord, Scope
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_server.access import tokens
from tuneserve_server.errors import KeyRefused, TokenRefused, TooManyLogins

FRESH_S = 2.0  # with PATIENCE_S, a revoked key is refused within 5 s
PATIENCE_S = 2.0  # for a store that does not answer about a cached key
GRACE_S = 60.0  # without an answer, a key used this recently stays valid; polls take 40 s
LONGEST_GRACE_S = 900.0  # but only this long after its last read: it may have been revoked
LOGINS_PER_S = 10
LOOKUPS_PER_S = 100  # of keys new to this process, per address with too many failed logins
MOST_KNOWN = 10_000  # cached keys, and remembered addresses
PREFIXES = ("tml-", "eyJ")
ALL_SCOPES = frozenset(Scope)

T = TypeVar("T")

_KEY = re.compile(r"tml-([0-9a-z]{1,32})-([0-9a-z]{1,128})")
_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class Identity:
    """The tenant of a request, the scopes of its key, and the key's public id.

    In open mode, there is no id. ``until_s`` is set if the client sent a token in place of the key:
    the token's expiry, in unix seconds.
    """

    tenant: str
    scopes: frozenset[Scope]
    key_id: str = ""
    until_s: float | None = None


# --- keys ---------------------------------------------------------------------------------------


def new_secret() -> str:
    return secrets.token_hex(32)


def new_id() -> str:
    return secrets.token_hex(6)


def digest(pepper: bytes, key_id: str, secret: str) -> str:
    """Return the HMAC of a key, which the store holds; ``pepper`` is the store's secret."""
    return hmac.new(pepper, f"api-key|{key_id}|{secret}".encode(), hashlib.sha256).hexdigest()


def open_tenant(api_key: str | None) -> str:
    """Return the tenant of a key in open mode, where any text with a key's prefix is a tenant.

    Raises ``KeyRefused`` for other texts.
    """
    if api_key is None or not api_key.startswith(PREFIXES):
        raise KeyRefused(
            "no usable API key in X-API-Key; send any key that starts with tml- (each key is a "
            "tenant), for example with TINKER_API_KEY=tml-local; to /v1, OpenAI clients send it as "
            "Authorization: Bearer tml-..."
        )
    return "t-" + hashlib.sha256(api_key.encode()).hexdigest()[:16]


def _refused() -> KeyRefused:
    """Return the one answer to all faults of a key: a stranger learns nothing from it."""
    return KeyRefused(
        "this server does not accept this API key: it is missing, wrong, expired or revoked; send "
        "a key of this server in X-API-Key (set TINKER_API_KEY=tml-...), or to /v1 as "
        "Authorization: Bearer tml-...; the operator makes one with: tuneserve keys create"
    )


async def has_keys(store: Store) -> bool:
    """Return whether a key was ever made. Revoked keys stay, so this never becomes false again."""
    return (await store.page_of_records(KeyRecord, limit=0)).total > 0


async def _read(reading: Awaitable[T], known: T | None) -> T:
    """Return the store's answer, or ``known`` if the store does not answer in ``PATIENCE_S``.

    Without ``known``, this waits for the store and raises its failure.
    """
    try:
        async with asyncio.timeout(None if known is None else PATIENCE_S):
            return await reading
    except (StoreFailed, ConnectionError, TimeoutError):
        if known is None:
            raise
        return known


class KeyCache:
    """The store's keys, as they were no longer than ``FRESH_S`` ago.

    While the store cannot be read, keys in use stay as last read, so polls do not fail.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        # By key id: when it was last asked for, when it was last read, and its record then.
        self._known: OrderedDict[str, tuple[float, float, KeyRecord | None]] = OrderedDict()

    def knows(self, key_id: str) -> bool:
        """Return whether the key existed when it was last looked up."""
        return self._known.get(key_id, (0.0, 0.0, None))[2] is not None

    async def find_key(self, key_id: str) -> KeyRecord | None:
        now_s = self._clock()
        looked_s, read_s, known = self._known.get(key_id, (-math.inf, -math.inf, None))
        if now_s - looked_s < FRESH_S:
            return known
        in_use = now_s - looked_s < GRACE_S and now_s - read_s < LONGEST_GRACE_S
        found = await _read(self._store.get_record(KeyRecord, key_id), known if in_use else None)
        self._known[key_id] = (now_s, read_s if found is known and in_use else now_s, found)
        self._known.move_to_end(key_id)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return found


# --- failed logins ------------------------------------------------------------------------------


class RateLimit:
    """A rate limit by address: ``per_s`` on average, and as many at once."""

    def __init__(self, per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # when, and how many left

    def is_over(self, address: str) -> bool:
        return self._left_now(_network(address)) < 1

    def record_failure(self, address: str) -> None:
        network = _network(address)
        self._left[network] = (self._clock(), max(self._left_now(network) - 1, 0.0))
        self._left.move_to_end(network)
        if len(self._left) > MOST_KNOWN:
            self._left.popitem(last=False)  # the address noted longest ago

    def _left_now(self, network: str) -> float:
        noted_s, left = self._left.get(network, (0.0, float(self._per_s)))
        return min(left + self._per_s * (self._clock() - noted_s), self._per_s)


def _network(address: str) -> str:
    """Return the address or, for IPv6, its /64 network, which belongs to one client."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 4:
        return address
    return str(ipaddress.ip_network((int(found), 64), strict=False))


# --- the authenticator ----------------------------------------------------------------------------


class Authenticator:
    """The check of API keys that admits requests on behalf of a tenant."""

    def __init__(
        self,
        store: Store,
        pepper: bytes,
        *,
        require_keys: bool,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._pepper = pepper
        self._keyed = require_keys
        self._clock = clock
        self._wall_clock = wall_clock
        self._looked_s = -math.inf  # the time of the last look for keys, which found none
        self._keys = KeyCache(store, clock)
        self._failures = RateLimit(LOGINS_PER_S, clock)
        self._lookups = RateLimit(LOOKUPS_PER_S, clock)

    def require_keys(self) -> None:
        """Accept only keys from the store from now on, because one was made."""
        self._keyed = True

    async def wants_keys(self) -> bool:
        """Return whether only keys from the store are accepted."""
        now_s = self._clock()
        age_s = now_s - self._looked_s
        if not self._keyed and age_s >= FRESH_S:
            known = False if age_s < GRACE_S else None
            self._keyed = await _read(has_keys(self._store), known) or self._keyed
            self._looked_s = now_s
        return self._keyed

    async def authenticate(self, api_key: str | None, address: str) -> Identity:
        """Return the identity of an API key that comes from ``address``.

        Raises ``KeyRefused``, or ``TooManyLogins`` for an address with too many failed logins.
        Valid keys from that address are still accepted, unless the flood is so large that keys new
        to this process are no longer looked up (``LOOKUPS_PER_S``).
        """
        if api_key is not None and tokens.is_token(api_key):
            return await self._by_token(api_key, address)
        if not await self.wants_keys():
            return Identity(open_tenant(api_key), ALL_SCOPES)
        if not api_key:
            raise _refused()
        parts = _KEY.fullmatch(api_key)
        key_id, secret = parts.groups() if parts else ("", "")
        is_over = self._failures.is_over(address)
        if is_over and not self._keys.knows(key_id):
            if self._lookups.is_over(address):
                raise TooManyLogins()
            self._lookups.record_failure(address)
        key = await self._keys.find_key(key_id) if parts else None
        given = digest(self._pepper, key_id, secret)
        is_right = hmac.compare_digest(given, _NO_DIGEST if key is None else key.digest)
        if key is None or not is_right or not key.is_valid(self._wall_clock()):
            if is_over:
                raise TooManyLogins()
            self._failures.record_failure(address)
            raise _refused()
        return Identity(key.tenant, frozenset(key.scopes), key.key)

    async def _by_token(self, token: str, address: str) -> Identity:
        """Return the identity of a token's key, as it is now. Raises ``TokenRefused``."""
        now_s = self._wall_clock()
        claims = tokens.read_token(self._pepper, token)
        if claims is None:
            if self._failures.is_over(address):
                raise TooManyLogins()
            self._failures.record_failure(address)
        elif now_s < claims.expires_s:
            if not await self.wants_keys():
                if not claims.key_id:
                    return Identity(claims.tenant, ALL_SCOPES, until_s=claims.expires_s)
            elif claims.key_id:
                key = await self._keys.find_key(claims.key_id)
                if key is not None and key.is_valid(now_s):
                    scopes = frozenset(key.scopes)
                    return Identity(key.tenant, scopes, key.key, claims.expires_s)
        raise TokenRefused(
            "this token is not of this server, or it has expired, or its key is expired or "
            "revoked; send your key to POST /api/v1/auth/token for another, or send the key itself"
        )
