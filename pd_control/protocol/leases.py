"""Leases: references on engine blocks that outlive the request (R3). Core thread only.

A lease is an extra reference on each of its blocks, taken before anybody may read or write them for
us and dropped once, on command of the loop thread, which has the proof that nobody can any more. No
timer, no finaliser and no error path releases one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pd_control.messages import BlockIds
from pd_control.protocol.errors import InvariantError


class BlockRefs(Protocol):
    """What the engine's block pool does for us; immediate, on the core thread."""

    def hold(self, block_ids: BlockIds) -> None:
        """Add one reference to each block (given per cache group)."""

    def release(self, block_ids: BlockIds) -> None:
        """Drop one reference from each block; free those that have none left."""


class LeaseKind(enum.Enum):
    HOLD = "hold"  # P: a request's KV, from its first step until taken, expired or aborted
    LOAD = "load"  # D: destination of a transfer
    SAVE = "save"  # KV being written to a store

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is Python code


@dataclass(slots=True)
class Lease:
    """One live lease. `block_ids` grows while a chunked prefill allocates."""

    lease_id: int
    kind: LeaseKind
    request_id: str
    block_ids: BlockIds

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.block_ids))


class LeaseTable:
    """All leases of one engine, with accounting by kind.

    Lease ids count upwards from 1 and are never used again. Each method is immediate; an error
    leaves the table as it was.
    """

    __slots__ = ("_leases", "_next_id", "_refs", "acquired", "blocks", "released")

    def __init__(self, refs: BlockRefs) -> None:
        self._refs = refs
        self._leases: dict[int, Lease] = {}
        self._next_id = 1
        self.acquired = dict.fromkeys(LeaseKind, 0)  # leases ever taken
        self.released = dict.fromkeys(LeaseKind, 0)  # leases ever dropped
        self.blocks = dict.fromkeys(LeaseKind, 0)  # references held now

    def acquire(self, kind: LeaseKind, request_id: str, block_ids: BlockIds) -> int:
        """Take a reference on each block; returns the lease's id."""
        self._refs.hold(block_ids)
        lease = Lease(self._next_id, kind, request_id, block_ids)
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        self.acquired[kind] += 1
        self.blocks[kind] += lease.num_blocks
        return lease.lease_id

    def extend(self, lease_id: int, block_ids: BlockIds) -> None:
        """Append blocks to each group of a live lease. Raises InvariantError for another one."""
        lease = self._live(lease_id, "extend")
        if len(block_ids) != len(lease.block_ids):
            raise InvariantError(
                f"lease {lease_id}: expected {len(lease.block_ids)} cache groups, "
                f"got {len(block_ids)}"
            )
        self._refs.hold(block_ids)
        lease.block_ids = tuple(
            old + new for old, new in zip(lease.block_ids, block_ids, strict=True)
        )
        self.blocks[lease.kind] += sum(map(len, block_ids))

    def release(self, lease_id: int) -> None:
        """Drop the references. Raises InvariantError if the lease is not live: a second release
        would take somebody else's reference."""
        lease = self._live(lease_id, "release")
        del self._leases[lease_id]
        self.released[lease.kind] += 1
        self.blocks[lease.kind] -= lease.num_blocks
        self._refs.release(lease.block_ids)

    def get(self, lease_id: int) -> Lease | None:
        return self._leases.get(lease_id)

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def _live(self, lease_id: int, verb: str) -> Lease:
        lease = self._leases.get(lease_id)
        if lease is None:
            past = "already released" if 0 < lease_id < self._next_id else "never issued"
            raise InvariantError(f"{verb} of lease {lease_id}, which was {past}")
        return lease
