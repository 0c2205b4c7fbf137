"""Who is calling: API keys, how they are looked up, and what failed logins meet.

A key is ``tml-<id>-<secret>``. The store has the HMAC of the secret, never the secret. As long as
no key was ever made in the store, and the settings do not ask for keys, any text that begins like
one names a tenant of its own (open mode).
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

from tuneserve_engine.queue.base import Store, StoreFailed
from tuneserve_engine.records import Key, Scope
from tuneserve_server.errors import TooManyLogins, Unauthorized

FRESH_S = 2.0  # with PATIENCE_S, a revoked key is refused within 5 s
PATIENCE_S = 2.0  # with a store that does not say what became of a key that is known
GRACE_S = 60.0  # while it does not, a key is good that was used so long ago; polls take 40 s
LONGEST_GRACE_S = 900.0  # but not for longer than this: it may have been revoked
LOGINS_PER_S = 10
LOOKUPS_PER_S = 100  # of keys that are new here, for an address with too many failed logins
MOST_KNOWN = 10_000  # keys, and addresses, of which something is remembered
PREFIXES = ("tml-", "eyJ")
ALL_SCOPES = frozenset(Scope)

T = TypeVar("T")

_KEY = re.compile(r"tml-([0-9a-z]{1,32})-([0-9a-z]{1,128})")
_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class Login:
    """In whose name a request is made, and what it may do."""

    tenant: str
    scopes: frozenset[Scope]


# --- keys ---------------------------------------------------------------------------------------


def new_secret() -> str:
    return secrets.token_hex(32)


def new_id() -> str:
    return secrets.token_hex(6)


def digest(pepper: bytes, key_id: str, secret: str) -> str:
    """What the store keeps of a key; ``pepper`` is the store's secret."""
    return hmac.new(pepper, f"api-key|{key_id}|{secret}".encode(), hashlib.sha256).hexdigest()


def open_tenant(api_key: str | None) -> str:
    """The tenant that a key stands for where there are no keys; any well-formed one is one."""
    if api_key is None or not api_key.startswith(PREFIXES):
        raise Unauthorized(
            "no usable API key in X-API-Key; send any key that starts with tml- (the same key is "
            "the same tenant), for example with TINKER_API_KEY=tml-local; to /v1, OpenAI clients "
            "send it as Authorization: Bearer tml-..."
        )
    return "t-" + hashlib.sha256(api_key.encode()).hexdigest()[:16]


def _refused() -> Unauthorized:
    """The same for whatever is wrong with a key: a stranger learns nothing from it."""
    return Unauthorized(
        "this server does not accept this API key: it is missing, wrong, expired or revoked; send "
        "a key of this server in X-API-Key (with TINKER_API_KEY=tml-...), to /v1 as "
        "Authorization: Bearer tml-...; the operator makes one with: tuneserve keys create"
    )


async def has_keys(store: Store) -> bool:
    """Whether a key was ever made. Revoked ones stay, so this never becomes false again."""
    return (await store.page(Key, limit=0)).total > 0


async def _read(reading: Awaitable[T], known: T | None) -> T:
    """What the store says; what was ``known`` before, if it does not say so in time."""
    try:
        async with asyncio.timeout(None if known is None else PATIENCE_S):
            return await reading
    except (StoreFailed, ConnectionError, TimeoutError):
        if known is None:
            raise
        return known


class KnownKeys:
    """The store's keys, as they were at most ``FRESH_S`` ago. While it cannot be read, those in use
    are as they were last known: clients must not see their polls fail."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        # When it was last asked for, when it was last read, and what it was.
        self._known: OrderedDict[str, tuple[float, float, Key | None]] = OrderedDict()

    def knows(self, key_id: str) -> bool:
        """Whether there was such a key when it was last looked up."""
        return self._known.get(key_id, (0.0, 0.0, None))[2] is not None

    async def get(self, key_id: str) -> Key | None:
        now_s = self._clock()
        looked_s, read_s, known = self._known.get(key_id, (-math.inf, -math.inf, None))
        if now_s - looked_s < FRESH_S:
            return known
        in_use = now_s - looked_s < GRACE_S and now_s - read_s < LONGEST_GRACE_S
        found = await _read(self._store.get(Key, key_id), known if in_use else None)
        self._known[key_id] = (now_s, read_s if found is known and in_use else now_s, found)
        self._known.move_to_end(key_id)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return found


# --- failed logins ------------------------------------------------------------------------------


class Allowance:
    """Counts something by address: ``per_s`` on average, and as many at once."""

    def __init__(self, per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # when, and how many

    def is_over(self, address: str) -> bool:
        return self._left_now(_network(address)) < 1

    def note(self, address: str) -> None:
        network = _network(address)
        self._left[network] = (self._clock(), max(self._left_now(network) - 1, 0.0))
        self._left.move_to_end(network)
        if len(self._left) > MOST_KNOWN:
            self._left.popitem(last=False)  # the longest without one

    def _left_now(self, network: str) -> float:
        noted_s, left = self._left.get(network, (0.0, float(self._per_s)))
        return min(left + self._per_s * (self._clock() - noted_s), self._per_s)


def _network(address: str) -> str:
    """The address, for IPv6 the /64 that one client has for itself."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 4:
        return address
    return str(ipaddress.ip_network((int(found), 64), strict=False))


# --- the door -----------------------------------------------------------------------------------


class Door:
    """Lets requests in, in the name of a tenant."""

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
        self._looked_s = -math.inf  # for keys, finding none
        self._keys = KnownKeys(store, clock)
        self._failures = Allowance(LOGINS_PER_S, clock)
        self._lookups = Allowance(LOOKUPS_PER_S, clock)

    async def wants_keys(self) -> bool:
        """Whether only keys from the store are let in."""
        now_s = self._clock()
        age_s = now_s - self._looked_s
        if not self._keyed and age_s >= FRESH_S:
            known = False if age_s < GRACE_S else None
            self._keyed = await _read(has_keys(self._store), known) or self._keyed
            self._looked_s = now_s
        return self._keyed

    async def enter(self, api_key: str | None, address: str) -> Login:
        """Raises ``Unauthorized``, or ``TooManyLogins`` for one address that fails again and again.
        Others there get in meanwhile, unless the flood is so large that keys which this process has
        not seen are no longer looked up."""
        if not await self.wants_keys():
            return Login(open_tenant(api_key), ALL_SCOPES)
        if not api_key:
            raise _refused()
        parts = _KEY.fullmatch(api_key)
        key_id, secret = parts.groups() if parts else ("", "")
        is_over = self._failures.is_over(address)
        if is_over and not self._keys.knows(key_id):
            if self._lookups.is_over(address):
                raise TooManyLogins()
            self._lookups.note(address)
        key = await self._keys.get(key_id) if parts else None
        given = digest(self._pepper, key_id, secret)
        is_right = hmac.compare_digest(given, _NO_DIGEST if key is None else key.digest)
        if key is None or not is_right or not key.is_valid(self._wall_clock()):
            if is_over:
                raise TooManyLogins()
            self._failures.note(address)
            raise _refused()
        return Login(key.tenant, frozenset(key.scopes))
