"""The base models that clients may ask for, as reported by the workers that serve them."""

import time
from collections.abc import Callable

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.store.base import ServedModel, Store
from tuneserve_server.ttl_cache import CachedQuery

RECENT_S = 900.0
"""The time for which a base model still takes requests after its last worker was heard from.

The requests wait for a worker.
"""

_FRESH_S = 0.5
_DIGITS = 20  # of a context length; the rest of a longer number is not read


class BaseModels:
    """The base models in the store, asked for at most every ``fresh_s``."""

    def __init__(
        self,
        store: Store,
        fallback: str,
        *,
        fresh_s: float = _FRESH_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._fallback = fallback  # the only name until a worker has reported its own
        self._clock = clock
        self._served = CachedQuery(lambda: store.base_models(), fresh_s, clock)

    async def known(self) -> list[ServedModel]:
        """Return every base model that a worker has served at any time."""
        return await self._served.get()

    async def offered(self) -> list[ServedModel]:
        """Return the base models with a worker now or, if there are none, the last that had one."""
        known = await self.known()
        alive = [each for each in known if each.workers]
        return alive or _around(known, max((each.seen_s for each in known), default=0.0))

    async def info(self, name: str) -> BaseModelInfo | None:
        """Return the facts about the base model, or None if no worker ever served it."""
        found = (each.info for each in await self.known() if each.info.name == name)
        return next(found, None)

    async def resolve(self, asked: str) -> str:
        """Return the name of the base model that ``asked`` means; its ``:suffix`` may differ.

        Raises ``UserError`` if no worker serves the base model or did within ``RECENT_S``, or if
        the suffix asks for a longer context than the base model is served with.
        """
        accepted = await self._accepted(asked)
        if asked in accepted:
            return asked
        name = next((each for each in accepted if is_same(each, asked)), None)
        if name is None:
            raise _not_served(asked, accepted)
        _check_context(asked, await self.info(name))
        return name

    async def check(self, name: str) -> None:
        """Raise ``UserError`` if no worker serves exactly this name or did within ``RECENT_S``.

        A request for it would wait, perhaps forever.
        """
        accepted = await self._accepted(name)
        if name not in accepted:
            raise _not_served(name, accepted)

    async def _accepted(self, asked: str) -> list[str]:
        """Return the names that may be asked for, names with a worker first."""
        known = await self.known()
        if not any(each.info.name == asked and each.workers for each in known):
            known = await self._served.again()  # its worker may have come just now
        accepted = _around(known, self._clock()) or await self.offered()
        accepted = sorted(accepted, key=lambda each: not each.workers)
        return [each.info.name for each in accepted] or [self._fallback]


def _around(known: list[ServedModel], now_s: float) -> list[ServedModel]:
    """Return the base models with a worker now or within ``RECENT_S`` before ``now_s``."""
    return [each for each in known if each.workers or each.seen_s >= now_s - RECENT_S]


def warming(served: ServedModel) -> str | None:
    """Return how far the base model's workers have compiled ahead, or None if all are ready."""
    cold = [each for each in served.metrics.values() if each.get("ready", 1.0) == 0.0]
    if not cold:
        return None
    compiled, programs = (
        sum(each.get(name, 0.0) for each in cold) for name in ("programs_compiled", "programs")
    )
    return f"{compiled:.0f} of {programs:.0f} programs compiled"


def decomposing(served: ServedModel) -> str | None:
    """Return how far workers have decomposed the base model's weights, or None if none does."""
    parts = [
        (each.get("weights_decomposed", 0.0), each.get("weights_to_decompose", 0.0))
        for each in served.metrics.values()
    ]
    under_way = [(done, weights) for done, weights in parts if done < weights]
    if not under_way:
        return None
    done, weights = map(sum, zip(*under_way, strict=True))
    return f"the base model's directions: {done:.0f} of {weights:.0f} weights decomposed"


def failing(served: ServedModel) -> str | None:
    """Return how many programs the base model's workers cannot compile, or None if all compile."""
    broken = [each for each in served.metrics.values() if each.get("programs_failed", 0.0)]
    if not broken:
        return None
    failed, programs = (
        sum(each.get(name, 0.0) for each in broken) for name in ("programs_failed", "programs")
    )
    return (
        f"{failed:.0f} of {programs:.0f} programs cannot be compiled; requests that need one fail; "
        "the worker's log says why"
    )


def is_same(name: str, other: str) -> bool:
    """Return whether the names mean the same base model; a ``:suffix`` is not compared."""
    return name.partition(":")[0] == other.partition(":")[0]


def _check_context(asked: str, info: BaseModelInfo | None) -> None:
    """Raise ``UserError`` if the name ends in a context length, as in ``:peft:262144``, that is
    longer than the base model's."""
    suffix = asked.partition(":")[2].rpartition(":")[2]
    if info is None or not (suffix.isascii() and suffix.isdecimal()):
        return
    most = info.context_length
    if int(suffix[:_DIGITS]) > most:
        raise UserError(
            f"base model {asked[:256]!r} asks for a context of {suffix[:_DIGITS]} tokens; this "
            f"server has {info.name!r} with {most}: ask for it without the suffix, or with one of "
            f"up to {most}"
        )


def _not_served(asked: str, accepted: list[str]) -> UserError:
    names = ", ".join(repr(each) for each in accepted)
    return UserError(
        f"base model {asked[:256]!r} is not served here; this server has {names}; use one of these"
    )
