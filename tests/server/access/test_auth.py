"""Keys: their parts, tenants and lifetimes, and the limits on failed logins."""

import asyncio
import hashlib
import hmac
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.memory_store import MemoryStore
from tuneserve_engine.core.records import KeyRecord, Scope, Update
from tuneserve_engine.store.base import R
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_server.access import auth, tokens
from tuneserve_server.access.auth import (
    LOGINS_PER_S,
    LOOKUPS_PER_S,
    Authenticator,
    Identity,
    RateLimit,
    digest,
    open_tenant,
)
from tuneserve_server.errors import ApiError, KeyRefused, TokenRefused, TooManyLogins

pytestmark = pytest.mark.anyio

PEPPER = b"pepper"
SECRET = "5" * 64
HERE = "192.0.2.1"
NOW_S = 1_000_000.0


class Clock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


class Store(MemoryStore):
    """A store that counts its queries, and can be unreachable or silent."""

    asked = 0
    is_away = False

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()

    async def _ask(self) -> None:
        self.asked += 1
        await self.answers.wait()
        if self.is_away:
            raise StoreFailed("away")

    async def get_record(self, record_type: type[R], key: str) -> R | None:
        await self._ask()
        return await super().get_record(record_type, key)

    async def page_of_records(self, *args: Any, **options: Any) -> Any:
        await self._ask()
        return await super().page_of_records(*args, **options)

    async def make(self, key_id: str = "a", secret: str = SECRET, **fields: Any) -> str:
        values = {"tenant": "alice", "parent": "alice", "created_s": NOW_S, **fields}
        values.setdefault("scopes", [Scope.TRAIN, Scope.SAMPLE])
        await self.put_record(KeyRecord(key_id, digest=digest(PEPPER, key_id, secret), **values))
        return f"tml-{key_id}-{secret}"


@pytest.fixture
async def store(anyio_backend: str) -> AsyncIterator[Store]:
    opened = Store()
    yield opened
    await opened.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def door(store: Store, clock: Clock) -> Authenticator:
    return Authenticator(store, PEPPER, require_keys=True, clock=clock, wall_clock=clock)


async def said_to(door: Authenticator, key: str | None, address: str = HERE) -> ApiError:
    with pytest.raises((KeyRefused, TooManyLogins)) as refusal:
        await door.authenticate(key, address)
    error: ApiError = refusal.value
    return error


async def is_let_in(door: Authenticator, key: str, address: str = HERE) -> bool:
    try:
        await door.authenticate(key, address)
    except KeyRefused:
        return False
    return True


# --- keys ----------------------------------------------------------------------------------------


def test_secrets_have_256_random_bits_and_no_part_contains_a_dash() -> None:
    secrets, ids = {auth.new_secret() for _ in range(100)}, {auth.new_id() for _ in range(100)}
    assert len(secrets) == len(ids) == 100
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in secrets)
    assert all(re.fullmatch("[0-9a-f]{12}", each) for each in ids)


def test_the_store_has_an_hmac_that_is_valid_for_one_key_of_one_store() -> None:
    message = b"api-key|a|" + SECRET.encode()
    assert digest(PEPPER, "a", SECRET) == hmac.new(PEPPER, message, hashlib.sha256).hexdigest()
    assert len({digest(p, i, SECRET) for p in (b"1", b"2") for i in "ab"}) == 4


async def test_a_valid_key_yields_its_tenant_and_scopes(store: Store, door: Authenticator) -> None:
    both = await store.make("a")
    one = await store.make("b", tenant="bob", scopes=[Scope.SAMPLE])
    another = await store.make("c", "7" * 64)
    assert await door.authenticate(both, HERE) == Identity(
        "alice", frozenset({Scope.TRAIN, Scope.SAMPLE}), "a"
    )
    assert await door.authenticate(one, HERE) == Identity("bob", frozenset({Scope.SAMPLE}), "b")
    assert (await door.authenticate(another, HERE)).tenant == "alice"


async def test_a_token_is_its_key_as_long_as_both_are_valid(
    store: Store, door: Authenticator, clock: Clock
) -> None:
    await store.make("a", scopes=[Scope.SAMPLE])
    claims = tokens.TokenClaims("alice", "a", clock.now_s + 3600)
    token = tokens.new_token(PEPPER, claims, clock.now_s)
    found = Identity("alice", frozenset({Scope.SAMPLE}), "a", clock.now_s + 3600)
    assert await door.authenticate(token, HERE) == found
    forged = tokens.new_token(b"another store", claims, clock.now_s)
    unknown = tokens.new_token(PEPPER, replace(claims, key_id="b"), clock.now_s)
    without = tokens.new_token(PEPPER, replace(claims, key_id=""), clock.now_s)
    for text in (forged, unknown, without, f"{token}x"):
        refusal = await said_to(door, text)
        assert (refusal.status, refusal.code) == (401, "unauthorized")
        assert refusal.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'
    clock.now_s += 3600
    assert "expired" in str(await said_to(door, token))


async def test_a_token_ends_with_its_key(store: Store, door: Authenticator, clock: Clock) -> None:
    await store.make("a")
    claims = tokens.TokenClaims("alice", "a", clock.now_s + 3600)
    token = tokens.new_token(PEPPER, claims, clock.now_s)
    assert (await door.authenticate(token, HERE)).tenant == "alice"
    await store.update_record(Update("key", "a", {"revoked_s": clock.now_s}))
    clock.now_s += auth.FRESH_S
    assert await said_to(door, token)


async def test_forged_tokens_are_limited_like_wrong_keys(door: Authenticator, clock: Clock) -> None:
    forged = tokens.new_token(b"x", tokens.TokenClaims("a", "a", clock.now_s + 9), clock.now_s)
    codes = [(await said_to(door, forged)).code for _ in range(auth.LOGINS_PER_S + 1)]
    assert codes == ["unauthorized"] * auth.LOGINS_PER_S + ["too_many_failed_logins"]


async def test_a_token_of_the_open_mode_is_for_its_tenant_until_there_are_keys(
    store: Store, clock: Clock
) -> None:
    door = Authenticator(store, PEPPER, require_keys=False, clock=clock, wall_clock=clock)
    open_claims = tokens.TokenClaims(auth.open_tenant("tml-you"), "", clock.now_s + 3600)
    token = tokens.new_token(PEPPER, open_claims, clock.now_s)
    found = await door.authenticate(token, HERE)
    assert found.tenant == (await door.authenticate("tml-you", HERE)).tenant
    # A refused token must not become the name of another tenant, as other texts do.
    for text in (tokens.new_token(b"x", open_claims, clock.now_s), f"{token}x"):
        assert isinstance(await said_to(door, text), TokenRefused)
    door.require_keys()
    assert isinstance(await said_to(door, token), TokenRefused)


async def test_every_invalid_key_gets_the_same_answer(
    store: Store, door: Authenticator, clock: Clock
) -> None:
    right = await store.make("a")
    await store.make("b", expires_s=NOW_S)
    await store.make("c", revoked_s=NOW_S - 1)
    await store.make("d", "7" * 64)
    wrong = [
        *(None, "", "tml-local", "eyJhbGciOiJIUzI1NiJ9.e30.x", right[4:], right.upper()),
        *(f"{right}0", right[:-1], f" {right}", f"{right}\n", f"tml-a-{SECRET[:-1]}6"),
        *(f"tml-{key_id}-{SECRET}" for key_id in ("b", "c", "d", "nobody", "", "a" * 33, "\u0661")),
        *(f"tml-a-{digest(PEPPER, 'a', SECRET)}", "tml-a-", "tml--", "x" * 10_000),
    ]
    answers = set()
    for key in wrong:
        clock.now_s += 1  # otherwise the failed logins would exceed the limit
        refused = await said_to(door, key)
        answers.add((refused.status, refused.code, str(refused)))
    assert len(answers) == 1
    ((status, code, message),) = answers
    assert (status, code) == (401, "unauthorized")
    assert "tuneserve keys create" in message
    assert await is_let_in(door, right)


async def test_a_key_is_valid_until_it_expires(
    store: Store, door: Authenticator, clock: Clock
) -> None:
    key = await store.make("a", expires_s=NOW_S + 10)
    for at_s, good in ((0, True), (9.9, True), (10, False), (10.1, False)):
        clock.now_s = NOW_S + at_s
        assert await is_let_in(door, key) == good


# --- known keys -----------------------------------------------------------------------------------


async def test_a_revoked_key_is_refused_within_five_seconds_by_every_process(
    store: Store, clock: Clock
) -> None:
    doors = [
        Authenticator(store, PEPPER, require_keys=False, clock=clock, wall_clock=clock)
        for _ in "ab"
    ]
    key = await store.make("a")
    for door in doors:
        assert await is_let_in(door, key)
        clock.now_s += 0.7  # the processes do not query the store at the same moments
    for _ in range(100):  # the key is in use all the time
        clock.now_s += 0.1
        assert [await is_let_in(door, key) for door in doors] == [True, True]
    await store.update_record(Update("key", "a", {"revoked_s": clock.now_s}))
    revoked_s = clock.now_s
    refused: set[Authenticator] = set()
    while len(refused) < 2:
        clock.now_s += 0.1
        assert clock.now_s < revoked_s + 3.05, "one second remains for a slow store"
        refused |= {door for door in doors if not await is_let_in(door, key)}
    for door in doors:
        assert not await is_let_in(door, key)


async def test_an_idle_key_is_looked_up_before_it_is_used_again(
    store: Store, door: Authenticator, clock: Clock
) -> None:
    key = await store.make("a")
    assert await is_let_in(door, key)
    await store.update_record(Update("key", "a", {"revoked_s": NOW_S}))
    clock.now_s += 3600
    assert not await is_let_in(door, key)


async def test_valid_and_invalid_keys_are_looked_up_every_other_second_only(
    store: Store, door: Authenticator, clock: Clock
) -> None:
    right, wrong = await store.make("a"), f"tml-b-{SECRET}"
    for _ in range(5):
        assert await is_let_in(door, right)
        assert not await is_let_in(door, wrong)
    assert store.asked == 2
    clock.now_s += 2.0
    assert await is_let_in(door, right)
    assert store.asked == 3


async def test_the_number_of_remembered_keys_is_limited(
    store: Store, door: Authenticator, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "MOST_KNOWN", 100)
    for n in range(300):
        clock.now_s += 0.1
        await is_let_in(door, f"tml-{n}-{SECRET}", address=f"192.0.2.{n}")
    assert len(door._keys._known) == len(door._failures._left) == 100


async def test_while_the_store_is_away_a_known_key_is_valid(
    store: Store, door: Authenticator, clock: Clock
) -> None:
    known, other = await store.make("a", expires_s=NOW_S + 800), await store.make("b")
    assert await is_let_in(door, known)
    store.is_away = True
    while clock.now_s < NOW_S + 800:  # the key is in use all the time
        assert await is_let_in(door, known)
        with pytest.raises(StoreFailed):
            await door.authenticate(other, HERE)
        clock.now_s += 40
    assert not await is_let_in(door, known), "it has expired"
    store.is_away = False
    assert await is_let_in(door, other)


async def test_a_key_that_was_not_read_for_long_is_refused_though_it_is_in_use(
    store: Store, door: Authenticator, clock: Clock
) -> None:
    """The key may have been revoked, and the store may be unreachable for this key alone."""
    key = await store.make("a")
    assert await is_let_in(door, key)
    store.is_away = True
    while clock.now_s < NOW_S + 900:
        assert await is_let_in(door, key)
        clock.now_s += 30
    with pytest.raises(StoreFailed):
        await door.authenticate(key, HERE)


async def test_while_the_store_is_away_an_idle_key_is_refused(
    store: Store, door: Authenticator, clock: Clock
) -> None:
    """The key may have been revoked long ago."""
    key = await store.make("a")
    assert await is_let_in(door, key)
    store.is_away = True
    clock.now_s += 61
    with pytest.raises(StoreFailed):
        await door.authenticate(key, HERE)


async def test_a_silent_store_does_not_hold_up_known_keys(
    store: Store, door: Authenticator, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "PATIENCE_S", 0.05)
    key = await store.make("a")
    assert await is_let_in(door, key)
    store.answers.clear()
    clock.now_s += 2
    assert await is_let_in(door, key)
    clock.now_s += 100
    waiting = asyncio.create_task(is_let_in(door, key))
    await asyncio.sleep(0.2)
    assert not waiting.done(), "it may have been revoked since"
    await store.update_record(Update("key", "a", {"revoked_s": clock.now_s}))
    store.answers.set()
    assert not await asyncio.wait_for(waiting, 5)


# --- without keys --------------------------------------------------------------------------------


def test_without_keys_a_text_with_the_prefix_of_a_key_names_a_tenant() -> None:
    assert open_tenant("tml-you") == "t-1b6f0b79fed9cad6"  # the first 64 bits of its SHA-256
    assert open_tenant("eyJ.x") != open_tenant("eyJ.y")
    for wrong in (None, "", "tm", "sk-1", " tml-a"):
        with pytest.raises(KeyRefused, match="TINKER_API_KEY=tml-local"):
            open_tenant(wrong)


async def test_the_first_key_locks_out_all_clients_without_keys(store: Store, clock: Clock) -> None:
    door = Authenticator(store, PEPPER, require_keys=False, clock=clock, wall_clock=clock)
    assert not await door.wants_keys()
    assert await door.authenticate("tml-you", HERE) == Identity(
        open_tenant("tml-you"), frozenset(Scope)
    )
    key = await store.make("a")
    clock.now_s += 2.0
    assert not await is_let_in(door, "tml-you")
    assert await is_let_in(door, key)
    await store.update_record(Update("key", "a", {"revoked_s": clock.now_s}))
    clock.now_s += 60
    for shut in (door, Authenticator(store, PEPPER, require_keys=False, clock=clock)):
        assert await shut.wants_keys()
        assert not await is_let_in(shut, "tml-you")


async def test_without_keys_the_store_is_queried_for_keys_every_other_second_only(
    store: Store, clock: Clock
) -> None:
    door = Authenticator(store, PEPPER, require_keys=False, clock=clock)
    for _ in range(10):
        await door.authenticate("tml-you", HERE)
    assert store.asked == 1
    store.is_away = True
    for _ in range(10):
        clock.now_s += 40
        await door.authenticate("tml-you", HERE)  # no key was known, and the store is unreachable
    clock.now_s += 61
    with pytest.raises(StoreFailed):
        await door.authenticate("tml-you", HERE)


async def test_no_client_is_admitted_before_the_store_was_queried_for_keys(store: Store) -> None:
    store.is_away = True
    with pytest.raises(StoreFailed):
        await Authenticator(store, PEPPER, require_keys=False).authenticate("tml-you", HERE)


# --- failed logins --------------------------------------------------------------------------------


async def test_ten_failed_logins_a_second_are_answered_and_more_are_refused_for_now(
    door: Authenticator, clock: Clock
) -> None:
    for wanted in ([401] * 10 + [429] * 5, [401, 429]):
        answers = [await said_to(door, f"tml-b-{SECRET}") for _ in wanted]
        assert [each.status for each in answers] == wanted
        assert answers[-1].headers == {"Retry-After": "1"}
        clock.now_s += 0.15  # time for one more failure
    assert (await said_to(door, None)).status == 401  # a request without a key is not an attempt


async def test_one_address_does_not_lock_out_others(door: Authenticator) -> None:
    for n in range(20):
        await said_to(door, f"tml-{n}-{SECRET}", "2001:db8::1")
    assert (await said_to(door, "tml-b-0", "2001:db8:0:0:ffff::2")).status == 429  # in the same /64
    assert (await said_to(door, "tml-b-0", "2001:db8:0:1::1")).status == 401
    assert (await said_to(door, "tml-b-0", HERE)).status == 401


async def test_a_flood_of_wrong_keys_rarely_queries_the_store_and_locks_out_no_known_key(
    store: Store, door: Authenticator, clock: Clock
) -> None:
    known, new, late = await store.make("a"), await store.make("b"), await store.make("c")
    assert await is_let_in(door, known)
    for n in range(10):
        await said_to(door, f"tml-{n}-{SECRET}")
    before = store.asked
    for n in range(100, 190):
        assert (await said_to(door, f"tml-{n}-{SECRET}")).status == 429
    assert await is_let_in(door, new)  # another client behind the same address
    for n in range(200, 300):
        assert (await said_to(door, f"tml-{n}-{SECRET}")).status == 429
    assert store.asked == before + LOOKUPS_PER_S
    # another key's id does not help
    assert (await said_to(door, f"tml-a-{'6' * 64}")).status == 429
    assert (await said_to(door, late)).status == 429  # the number of look-ups per second is used up
    assert store.asked == before + LOOKUPS_PER_S
    assert await is_let_in(door, known)
    clock.now_s += 1.0
    assert await is_let_in(door, late)


def test_failures_are_forgotten_gradually() -> None:
    clock = Clock()
    failures = RateLimit(LOGINS_PER_S, clock)
    for _ in range(50):
        failures.record_failure(HERE)
    assert failures.is_over(HERE)
    clock.now_s += 0.15
    assert not failures.is_over(HERE)
    clock.now_s += 3600
    for _ in range(10):
        assert not failures.is_over(HERE)
        failures.record_failure(HERE)
    assert failures.is_over(HERE)
