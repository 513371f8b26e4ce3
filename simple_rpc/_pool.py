"""Which connection a call gets. Pure decisions: no I/O, no clock, no futures.

``PeerPool`` counts and orders the connections of one peer, ``Pools`` the peers. They answer with what
to do next; the client does it and tells them how it went. Waiters and connections are opaque here.

Every connection is in exactly one state: *opening* (``num_opening``), *idle* (in ``idle``) or *busy* (the
rest of ``num_open``); ``num_opening + num_open <= max_connections`` always, and nobody waits while a
connection is idle or another may be opened.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
C = TypeVar("C", bound=Hashable)
W = TypeVar("W")


class Todo(enum.Enum):
    """What a caller without an idle connection does next."""

    OPEN = "open"  # open one: the pool counts it as opening from now on
    WAIT = "wait"  # until ``wake`` names this waiter


class PeerPool(Generic[C, W]):
    """The connections of one peer. Idle ones are reused last in, first out: the warmest first, so that
    a pool that has grown for a burst can age at the other end."""

    __slots__ = ("idle", "max_connections", "num_open", "num_opening", "waiters")

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.idle: list[C] = []
        self.num_open = 0
        self.num_opening = 0
        self.waiters: deque[W] = deque()

    @property
    def num_busy(self) -> int:
        return self.num_open - len(self.idle)

    @property
    def is_unused(self) -> bool:
        """Nobody has or wants a connection: the whole pool may go."""
        return not (self.num_busy or self.num_opening or self.waiters)

    def take_idle(self) -> C | None:
        """An idle connection, which is busy from now on."""
        return self.idle.pop() if self.idle else None

    def without_idle(self) -> Todo:
        """What to do when ``take_idle`` gave None."""
        if self.num_open + self.num_opening < self.max_connections:
            self.num_opening += 1
            return Todo.OPEN
        return Todo.WAIT

    def opened(self) -> None:
        """An opening connection is open, and busy with the call it was opened for."""
        self.num_opening -= 1
        self.num_open += 1

    def open_failed(self) -> W | None:
        """An opening connection did not come about. Returns a waiter who may now open one (``Todo.OPEN`` is
        already counted for it)."""
        self.num_opening -= 1
        return self._room()

    def release(self, connection: C) -> W | None:
        """A busy connection is free and healthy. Returns the waiter who has it now, or None: it is idle."""
        if self.waiters:
            return self.waiters.popleft()
        self.idle.append(connection)
        return None

    def lost(self, connection: C) -> W | None:
        """An open connection, idle or busy, is gone. Returns a waiter who may now open one."""
        if connection in self.idle:
            self.idle.remove(connection)
        self.num_open -= 1
        return self._room()

    def give_up(self, waiter: W) -> None:
        """A waiter no longer waits. Nothing if it has been woken already."""
        if waiter in self.waiters:
            self.waiters.remove(waiter)

    def _room(self) -> W | None:
        if self.waiters and self.num_open + self.num_opening < self.max_connections:
            self.num_opening += 1
            return self.waiters.popleft()
        return None


class Pools(Generic[K, C, W]):
    """The pools of all peers, least recently used first, at most ``max_peers`` of them."""

    def __init__(self, max_peers: int, max_connections_per_peer: int) -> None:
        self._max_peers = max_peers
        self._max_connections = max_connections_per_peer
        self._pools: OrderedDict[K, PeerPool[C, W]] = OrderedDict()
        self._latest: tuple[K, PeerPool[C, W]] | None = None  # spares the reordering, mostly

    def __len__(self) -> int:
        return len(self._pools)

    def items(self) -> list[tuple[K, PeerPool[C, W]]]:
        return list(self._pools.items())

    def find(self, key: K) -> PeerPool[C, W] | None:
        """The pool of a known peer, now the most recently used."""
        if self._latest is not None and self._latest[0] == key:
            return self._latest[1]
        pool = self._pools.get(key)
        if pool is not None:
            self._pools.move_to_end(key)
            self._latest = (key, pool)
        return pool

    def add(self, key: K) -> tuple[PeerPool[C, W], list[C]] | None:
        """The pool of a new peer, and the idle connections of the peer that had to go for it, which are to
        be closed. None if every peer has a call: nothing may go."""
        evicted: list[C] = []
        if len(self._pools) >= self._max_peers:
            oldest = next((k for k, pool in self._pools.items() if pool.is_unused), None)
            if oldest is None:
                return None
            evicted = self._pools.pop(oldest).idle
        pool: PeerPool[C, W] = PeerPool(self._max_connections)
        self._pools[key] = pool
        self._latest = (key, pool)
        return pool, evicted

    def clear(self) -> None:
        self._pools.clear()
        self._latest = None
