"""The part of the sweep in SQLite that may have much to do, in steps of bounded time.

Each step is a transaction of its own: it holds the store for some ten milliseconds and needs little
room in the write-ahead log, which SQLite uses again after each checkpoint. So the sweep can make
room on a full disk.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar

from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.store import refusals
from tuneserve_engine.store.sqlite import expiry, recordings, retention
from tuneserve_engine.store.sqlite.group_commit import Transaction
from tuneserve_engine.store.sqlite.schema import FORGETTABLE

T = TypeVar("T")
RESULTS_AT_ONCE = 250
RESULT_BYTES_AT_ONCE = 2 * 2**20
REQUESTS_AT_ONCE = 500
PAGES_AT_ONCE = 100  # 400 KB of the write-ahead log, which may have no room to grow
SLACK_PAGES = 1024
"""Unused pages that the file keeps for new data: 4 MB, or a sixteenth of the file if more."""
VACUUM_STEPS = 1000  # most steps of one sweep: 400 MB

Step = Callable[[Transaction], int]
"""A step of the sweep: it returns how much it did, and 0 when nothing is left."""


class Do(Protocol):
    """A function that runs a step in a transaction."""

    def __call__(self, step: Callable[[Transaction], T], /) -> Awaitable[T]: ...


async def date_back(do: Do, now_s: float, by_s: float) -> None:
    """Move times of the future back by ``by_s``, or to now if they would stay in the future."""
    await _repeat(do, lambda tx: expiry.date_back(tx, now_s, by_s))


async def trim(do: Do, now_s: float, policy: SweepPolicy) -> None:
    """End and drop everything that is due, and give the space back; first what makes room."""
    results_s = now_s - policy.result_ttl_s
    requests_s = results_s - policy.result_ttl_s
    sessions_s = now_s - policy.ended_session_ttl_s
    await _repeat(do, lambda tx: _drop_results(tx, results_s))
    await _repeat(do, lambda tx: recordings.sweep(tx, now_s, policy))
    left = refusals.FORGOTTEN_AT_ONCE
    while left > 0:
        forgotten = await do(partial(_forget_requests, requests_s, min(left, REQUESTS_AT_ONCE)))
        left = left - forgotten if forgotten else 0
    steps = refusals.ENDED_AT_ONCE // refusals.RECORDS_AT_ONCE
    await _repeat(do, lambda tx: int(retention.forget_ended(tx, sessions_s)), steps)
    await _repeat(do, lambda tx: expiry.delete_expired(tx, now_s))
    await _repeat(do, lambda tx: expiry.end_silent_sessions(tx, now_s - policy.session_ttl_s))
    silence = expiry.Silence(now_s - policy.sample_ttl_s, policy.sample_ttl_s)
    scope: str | None = ""
    while scope is not None:
        scope = await do(partial(_drop_samples, silence, scope))
    if await _repeat(do, _vacuum, VACUUM_STEPS):
        await do(_shrink)


async def _repeat(do: Do, step: Step, most: int | None = None) -> int:
    """Run the step until nothing is left, or ``most`` times; return how often."""
    done = 0
    while done != most:
        found: int = await do(step)
        if not found:
            break
        done += 1
    return done


def _drop_samples(silence: expiry.Silence, after: str, tx: Transaction) -> str | None:
    return expiry.drop_silent_samples(tx, silence, after)


def _drop_results(tx: Transaction, before_s: float) -> int:
    dropped = size = 0
    for n, length in tx.execute(
        "SELECT n, LENGTH(body) FROM jobs WHERE state = 'done' AND finished_s < ? "
        "ORDER BY finished_s LIMIT ?",
        before_s,
        RESULTS_AT_ONCE,
    ).fetchall():
        size += length or 0
        if dropped and size > RESULT_BYTES_AT_ONCE:
            break
        tx.execute(
            "UPDATE jobs SET state = 'expired', error = NULL, category = NULL, body = NULL "
            "WHERE n = ?",
            n,
        )
        dropped += 1
    return dropped


def _forget_requests(before_s: float, most: int, tx: Transaction) -> int:
    return tx.execute(
        "DELETE FROM jobs WHERE n IN (SELECT n FROM jobs "
        f"WHERE {FORGETTABLE} AND finished_s < ? ORDER BY finished_s LIMIT ?)",
        before_s,
        most,
    ).rowcount


def _vacuum(tx: Transaction) -> int:
    """Remove unused pages from the end of the file; return how many."""
    row = tx.execute(
        "SELECT freelist_count, page_count FROM pragma_freelist_count, pragma_page_count"
    ).fetchone()
    assert row is not None
    unused, pages = row
    surplus = min(int(unused) - max(SLACK_PAGES, int(pages) // 16), PAGES_AT_ONCE)
    for _ in range(surplus):
        # One page per call: the statement returns after each page that it frees.
        tx.execute("PRAGMA incremental_vacuum(1)")
    return max(surplus, 0)


def _shrink(tx: Transaction) -> int:
    """Truncate the files after their contents, which frees the space."""
    tx.news.shrunk = True
    return 1
