"""Deadlines of many owners in one heap; what is set again or cancelled is skipped when it comes up."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_push = heapq.heappush

_SLACK = 64  # stale heap entries tolerated besides as many again as there are live timers


class Timers(Generic[K]):
    """At most one deadline per key. Each operation costs O(log n) at worst, amortised; none scans."""

    __slots__ = ("_heap", "_live", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._live: dict[K, tuple[float, int, K]] = {}  # the heap's own entries
        self._serial = 0

    def set(self, key: K, deadline_s: float) -> None:
        """Set or move the key's deadline."""
        self._serial += 1
        live = self._live
        entry = live[key] = (deadline_s, self._serial, key)
        _push(self._heap, entry)
        if len(self._heap) > 2 * len(live) + _SLACK:
            self._heap = list(live.values())
            heapq.heapify(self._heap)

    def cancel(self, key: K) -> None:
        """Forget the key's deadline; fine if it has none."""
        self._live.pop(key, None)

    def get(self, key: K) -> float | None:
        found = self._live.get(key)
        return None if found is None else found[0]

    def next(self) -> float | None:
        """The earliest deadline."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if self._live.get(entry[2]) is entry:
                return entry[0]
            heapq.heappop(heap)
        return None

    def due(self, now_s: float) -> Iterator[K]:
        """Take out and yield each key whose deadline is not after `now_s`, earliest first; the
        consumer may set and cancel while it iterates."""
        while True:
            at = self.next()
            if at is None or at > now_s:
                return
            key = heapq.heappop(self._heap)[2]
            del self._live[key]
            yield key

    def __len__(self) -> int:
        return len(self._live)
