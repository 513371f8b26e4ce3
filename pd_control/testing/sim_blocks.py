"""A paged block pool with reference counts and a prefix cache, as in vLLM, plus the checks of the simulation.

Used on the engine's core thread only. A block with no reference stays findable by its hash until it is
handed out again. ``guard`` is asked when a block loses its last reference and again before it is handed out:
it knows which blocks an open grant or an unread send still covers, and raises :class:`Violation` (R3, R4).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable

from pd_control.testing.sim_trace import Violation


class BlockPool:
    __slots__ = ("block_hash", "by_hash", "free", "guard", "num_blocks", "refs", "rng")

    def __init__(
        self, num_blocks: int, rng: random.Random, guard: Callable[[int], None] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.free: deque[int] = deque(range(num_blocks))
        self.block_hash: list[int | None] = [None] * num_blocks
        self.by_hash: dict[int, int] = {}
        self.guard = guard
        self.rng = rng

    @property
    def num_free(self) -> int:
        return len(self.free)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` fresh blocks with one reference each, or None (nothing is taken then)."""
        if count > len(self.free):
            return None
        if self.rng.random() < 0.3:
            # Any order of reuse must be right; now and then take the most recently freed first.
            self.free.rotate(count)
        out = []
        for _ in range(count):
            block = self.free.popleft()
            if self.refs[block]:
                raise Violation("pool", f"block {block} is free with {self.refs[block]} references")
            if self.guard is not None:
                self.guard(block)
            self._forget_hash(block)
            self.refs[block] = 1
            out.append(block)
        return out

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference on each block; each must already have one (a hit uses :meth:`touch`)."""
        for block in blocks:
            if self.refs[block] <= 0:
                raise Violation("lease", f"block {block} held while nobody owns it")
            self.refs[block] += 1

    def touch(self, blocks: Iterable[int]) -> None:
        """Reference blocks found in the prefix cache; takes them off the free list."""
        for block in blocks:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference each."""
        for block in blocks:
            refs = self.refs[block] - 1
            if refs < 0:
                raise Violation("lease", f"block {block} released twice")
            self.refs[block] = refs
            if refs == 0:
                if self.guard is not None:
                    self.guard(block)
                self.free.append(block)

    # -- prefix cache --------------------------------------------------------------------------

    def lookup(self, hashes: Iterable[int | None]) -> list[int]:
        """The blocks of the longest cached prefix."""
        out = []
        for block_hash in hashes:
            block = None if block_hash is None else self.by_hash.get(block_hash)
            if block is None:
                break
            out.append(block)
        return out

    def register(self, block: int, block_hash: int | None) -> None:
        """Make a full, finished block findable (the first of equal ones wins)."""
        if block_hash is None or block_hash in self.by_hash or self.block_hash[block] is not None:
            return
        self.by_hash[block_hash] = block
        self.block_hash[block] = block_hash

    def _forget_hash(self, block: int) -> None:
        block_hash = self.block_hash[block]
        if block_hash is not None:
            self.block_hash[block] = None
            del self.by_hash[block_hash]

    def drop_cache(self, blocks: Iterable[int] | None = None) -> None:
        """Forget cached content: of some blocks, or of all (a rank lost its memory)."""
        for block in range(self.num_blocks) if blocks is None else blocks:
            self._forget_hash(block)

    def held(self) -> list[int]:
        """Blocks with at least one reference, in order (for the end-of-run check)."""
        return [block for block, refs in enumerate(self.refs) if refs]
