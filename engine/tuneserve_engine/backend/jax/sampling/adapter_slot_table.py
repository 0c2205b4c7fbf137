"""The bookkeeping of adapter slots of decoding: their number, their content and their users.

Plain Python; the device's adapter slots themselves are in ``adapter_slots``.
"""

_MOST_ADAPTERS = 16
"""Adapters that decode together on a GPU, of one rank bucket. In each step, all that are used are
read: 16 of rank 32 are a third of the bytes of an 8B model."""


def adapter_slot_count(decode_slots: int, *, is_shared: bool) -> int:
    """Return the number of adapter slots for this many decode slots, which may share them."""
    return min(decode_slots, _MOST_ADAPTERS) if is_shared else decode_slots


class AdapterSlotTable:
    """Hands out the adapter slots of one rank bucket.

    If decode slots share adapter slots, a snapshot is in at most one of them. It stays there after
    its last user until another snapshot needs the slot; the least recently used one goes first.
    Otherwise every decode slot has the adapter slot of its own number.
    """

    def __init__(self, count: int, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._names: list[str | None] = [None] * count
        self._users = [0] * count
        self._idle = dict.fromkeys(range(count))  # least recently used first
        self._used: dict[int, None] = {}  # in use for the longest first

    @property
    def in_use(self) -> list[str]:
        """The snapshots that are in use, those in use for the longest first."""
        return [name for slot in self._used if (name := self._names[slot]) is not None]

    def find(self, name: str, decode_slot: int) -> int | None:
        """Return the adapter slot for the snapshot; None if other snapshots are in use in all."""
        if not self._is_shared:
            return decode_slot
        if name in self._names:
            return self._names.index(name)
        return next(iter(self._idle), None)

    def add_user(self, slot: int, name: str) -> bool:
        """Add a user of the adapter slot. Returns whether the snapshot has to be placed there."""
        is_new = self._names[slot] != name
        self._names[slot] = name
        self._users[slot] += 1
        self._idle.pop(slot, None)
        self._used.setdefault(slot)
        return is_new

    def remove_user(self, slot: int) -> None:
        """Remove a user of the adapter slot."""
        self._users[slot] -= 1
        if not self._users[slot]:
            self._idle[slot] = None
            del self._used[slot]
