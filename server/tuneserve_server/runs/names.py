"""The names of runs, and the texts of their metadata that have a meaning."""

import json
from collections import OrderedDict
from contextlib import suppress

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.records import ModelRecord, SessionRecord
from tuneserve_engine.store.base import Store
from tuneserve_server.dashboard.run_states import OUTCOMES

_KEPT = 65_536  # names of sessions, each of up to 1 KiB


class RunNames:
    """The names of models: their own, else that of their session, which never changes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sessions: OrderedDict[str, str] = OrderedDict()

    async def name_of(self, model: ModelRecord) -> str:
        """Return the name, or an empty text."""
        if name := model.user_metadata.get("name", ""):
            return name
        if model.parent not in self._sessions:
            session = await self._store.get_record(SessionRecord, model.parent)
            self._sessions[model.parent] = (session and session.display_name) or ""
            if len(self._sessions) > _KEPT:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(model.parent)
        return self._sessions[model.parent]


def tags_of(model: ModelRecord) -> list[str]:
    found = (each.strip() for each in model.user_metadata.get("tags", "").split(","))
    return [each for each in found if each]


def is_archived(model: ModelRecord) -> bool:
    return model.user_metadata.get("archived", "") == "true"


def steps_asked(model: ModelRecord) -> int | None:
    """Return the number of steps in the configuration that the training loop left."""
    with suppress(ValueError, RecursionError):
        config = json.loads(model.user_metadata.get("config", ""))
        steps = config.get("steps") if isinstance(config, dict) else None
        return steps if type(steps) is int and steps > 0 else None
    return None


def check_outcome(outcome: str | None) -> None:
    """Raise ``UserError`` for an outcome that no run can have."""
    if outcome is not None and outcome not in OUTCOMES:
        raise UserError(
            f"the outcome of a run is {outcome[:64]!r}; it must be {', '.join(OUTCOMES[:-1])} or "
            f"{OUTCOMES[-1]}, or null for a run that goes on"
        )
