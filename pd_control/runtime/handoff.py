"""The two queues between an engine's core thread and the driver's loop thread.

`ToLoop`   core → loop.  Callers: the core thread (any thread is safe). Items reach the loop thread
           in the order in which they were put. Putting never blocks and never waits for the loop.
`ToCore`   loop → core.  Callers: the loop thread (any thread is safe). Items reach the core thread,
           in order, when it calls `drain`; `wake` tells it that there is something to drain.

Neither loses a wake-up: the consumer clears the "told" flag *before* it takes items, so an item
put after that either is taken by this very pass or sets the flag again and wakes the consumer once
more. At most one wake is outstanding, however many items are put. A spurious wake is possible,
never a missing one.

After `close`: `put` returns False and the item is dropped and counted; what was put before is still
delivered by the next `drain` (ToCore) or was already scheduled (ToLoop). Leases travel in items of
`ToCore`, therefore the owner closes it only after the engine's last drain.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

DRAIN_SLICE_ITEMS = 256
"""Items handled in one loop callback before other callbacks get their turn (some 2 ms of work)."""


class ToLoop(Generic[T]):
    """Core thread → loop thread. `handle` runs on the loop thread, once an item, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[T], None]) -> None:
        self._loop = loop
        self._handle = handle
        self._items: collections.deque[T] = collections.deque()
        self._told = False
        self._closed = False
        self.dropped = 0

    def put(self, item: T) -> bool:
        """Any thread. False if closed (the item is dropped and counted)."""
        if self._closed:
            self.dropped += 1
            return False
        self._items.append(item)
        if not self._told:
            self._told = True
            try:
                self._loop.call_soon_threadsafe(self._run)
            except RuntimeError:  # the loop was closed between our check and the call
                self._closed = True
                self.dropped += 1
                return False
        return True

    def __len__(self) -> int:
        return len(self._items)

    def _run(self) -> None:
        self._told = False
        for _ in range(DRAIN_SLICE_ITEMS):
            try:
                item = self._items.popleft()
            except IndexError:
                return
            self._handle(item)
        if self._items and not self._told:
            self._told = True
            self._loop.call_soon(self._run)

    def close(self) -> None:
        """Loop thread. Later puts are refused; items already queued are still handled."""
        self._closed = True


class ToCore(Generic[T]):
    """Loop thread → core thread. `wake` is the engine's own callback: any thread, any moment."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._items: collections.deque[T] = collections.deque()
        self._told = False
        self._closed = False
        self.dropped = 0

    def put(self, item: T) -> bool:
        """Any thread. False if closed (the item is dropped and counted)."""
        if self._closed:
            self.dropped += 1
            return False
        self._items.append(item)
        if not self._told:
            self._told = True
            self._wake()
        return True

    def __len__(self) -> int:
        return len(self._items)

    def drain(self, handle: Callable[[T], None]) -> int:
        """Core thread. Handles what was there on entry and returns how many that was.

        An item put by `handle` itself waits for the next drain (it woke the engine again), so a
        drain always ends. If `handle` raises, that item is gone and the rest stays queued with a
        wake outstanding.
        """
        self._told = False
        count = len(self._items)
        for done in range(count):
            item = self._items.popleft()
            try:
                handle(item)
            except BaseException:
                if done + 1 < count and not self._told:
                    self._told = True
                    self._wake()
                raise
        return count

    def close(self) -> None:
        """After the engine's last drain, or when the engine is gone."""
        self._closed = True
