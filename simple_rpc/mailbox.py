"""Hand-off from the loop thread to a thread that is not a loop: a queue and a wake-up.

Contract
  callers        `put`: any thread, never blocks. `take_all`: the consumer's thread. `close`: any.
  order          items are taken in the order in which they were put.
  wake           `wake()` runs on the putting thread when the mailbox goes from "nothing new" to
                 "something new": at most once per `take_all`. It must not block, and it must be
                 safe between the consumer's "is it empty?" and its going to sleep.
  after close    `put` returns False and drops its item; what was put before stays until it is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """See the module's contract. `num_refused` counts items put after close."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._items: list[T] = []
        self._is_closed = False
        self.num_refused = 0

    def put(self, item: T) -> bool:
        """True if the consumer will find the item; False, with nothing done, after `close`."""
        with self._lock:
            if self._is_closed:
                self.num_refused += 1
                return False
            must_wake = not self._items
            self._items.append(item)
        # Outside the lock: wake is foreign code and may take the mailbox's content at once.
        if must_wake:
            self._wake()
        return True

    def take_all(self) -> list[T]:
        """Everything put so far, oldest first; empty if there is nothing. Also after `close`."""
        with self._lock:
            items, self._items = self._items, []
        return items

    def close(self) -> None:
        """Refuses further items. Repeating it does nothing."""
        with self._lock:
            self._is_closed = True

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"<Mailbox {'closed' if self._is_closed else 'open'} items={len(self._items)}>"
