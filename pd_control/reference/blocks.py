"""The block pool: reference-counted KV blocks with prefix caching. Core thread only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

BlockHash = bytes


def chain_hashes(
    token_ids: Sequence[int], block_tokens: int, salt: bytes = b"", known: Sequence[bytes] = ()
) -> list[BlockHash]:
    """One 16-byte hash per *full* block; each covers its whole prefix. ``known`` are the first ones."""
    hashes = list(known)
    parent = hashes[-1] if hashes else blake2b(salt, digest_size=16).digest()
    for start in range(len(hashes) * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        block = token_ids[start : start + block_tokens]
        packed = b"".join(t.to_bytes(4, "little") for t in block)
        parent = blake2b(parent + packed, digest_size=16).digest()
        hashes.append(parent)
    return hashes


class BlockPool:
    """Blocks ``0 … num_blocks-1``, each free (no reference) or held (one reference or more).

    A free block may still be *cached*: its contents are known by hash and a later prompt with that
    prefix takes it back. Free blocks are reused least recently freed first, uncached ones before that.

    Invariant: every block is in exactly one of {held, free}; a hash points to at most one block.
    """

    def __init__(self, num_blocks: int, block_tokens: int, *, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise ValueError(f"a pool needs blocks, got {num_blocks} of {block_tokens} tokens")
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self.prefix_caching = prefix_caching
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    def refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, their old contents forgotten; None if too few."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """One more reference on each; a free cached block becomes held."""
        for block in block_ids:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One reference less on each.

        Raises:
            RuntimeError: a block has none; blocks before it in the list are already released.
        """
        for block in block_ids:
            if self._refs[block] == 0:
                raise RuntimeError(f"block {block} released more often than acquired")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest cached prefix, *not* acquired."""
        if not self.prefix_caching:
            return []
        found = []
        for h in hashes:
            block = self._block_of.get(h)
            if block is None:
                break
            found.append(block)
        return found

    def register(self, block_id: int, block_hash: BlockHash) -> None:
        """Block's contents are complete and are those of this hash; the first block of a hash wins."""
        if self.prefix_caching and block_hash not in self._block_of:
            self._forget(block_id)
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def forget(self, block_ids: Iterable[int]) -> None:
        """The contents of these blocks are void: no later prompt may take them as a prefix."""
        for block in block_ids:
            self._forget(block)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
