"""Bounded, timed memory of what is over (tombstones) and of what came too early (marks)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TimedTable(Generic[K, V]):
    """Entries vanish `ttl_s` after they were put, or earlier, oldest first, when there are more than
    `max_entries`. Nobody waits for them to vanish, so they need no timer of their own."""

    __slots__ = ("_entries", "_max", "_ttl", "evicted")

    def __init__(self, ttl_s: float, max_entries: int) -> None:
        self._ttl = ttl_s
        self._max = max_entries
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()
        self.evicted = 0  # gone before their time, for lack of room

    def put(self, key: K, value: V, now_s: float) -> None:
        """Remember; a new value for a key starts its time again."""
        self.expire(now_s)
        self._entries.pop(key, None)
        while len(self._entries) >= self._max:
            self._entries.popitem(last=False)
            self.evicted += 1
        self._entries[key] = (now_s + self._ttl, value)

    def get(self, key: K, now_s: float) -> V | None:
        entry = self._entries.get(key)
        return entry[1] if entry is not None and entry[0] > now_s else None

    def pop(self, key: K, now_s: float) -> V | None:
        entry = self._entries.pop(key, None)
        return entry[1] if entry is not None and entry[0] > now_s else None

    def expire(self, now_s: float) -> None:
        """Drop what has had its time. Entries were put in order of time, so the oldest is first."""
        entries = self._entries
        while entries:
            key = next(iter(entries))
            if entries[key][0] > now_s:
                return
            del entries[key]

    def __len__(self) -> int:
        return len(self._entries)
