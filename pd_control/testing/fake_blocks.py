"""A block pool with reference counts and prefix cache, as the field's engines have it.

Core thread only, like theirs. A block is in exactly one of three conditions: referenced
(count > 0), free and cached (its content can still be hit), or free and blank. Misuse raises: a
release without a reference, a reference to a blank free block.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Sequence


class BlockError(RuntimeError):
    """The caller broke the pool's rules; the pool is unchanged."""


def block_hashes(token_ids: Sequence[int], block_size_tokens: int, salt: str = "") -> list[bytes]:
    """One chained hash for each *full* block of the tokens."""
    out: list[bytes] = []
    parent = salt.encode()
    for i in range(len(token_ids) // block_size_tokens):
        part = token_ids[i * block_size_tokens : (i + 1) * block_size_tokens]
        parent = hashlib.blake2b(
            parent + b"".join(t.to_bytes(4, "little") for t in part), digest_size=16
        ).digest()
        out.append(parent)
    return out


class BlockPool:
    """`num_blocks` blocks. Freed blocks are reused oldest first, so hits live long."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._free: collections.OrderedDict[int, None] = collections.OrderedDict(
            (i, None) for i in range(num_blocks)
        )
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks without any reference (cached ones included)."""
        return len(self._free)

    def refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def referenced(self) -> dict[int, int]:
        """Every referenced block and its count."""
        return {i: n for i, n in enumerate(self._refs) if n}

    def allocate(self, count: int) -> list[int] | None:
        """`count` blank blocks with one reference each; None, and no change, if too few are free."""
        if count > len(self._free):
            return None
        out: list[int] = []
        for _ in range(count):
            block_id, _unused = self._free.popitem(last=False)
            self._forget(block_id)
            self._refs[block_id] = 1
            out.append(block_id)
        return out

    def touch(self, block_ids: Iterable[int]) -> None:
        """One more reference each. The blocks must be referenced or cached."""
        ids = list(block_ids)
        for i in ids:
            if not 0 <= i < self.num_blocks:
                raise BlockError(f"block {i}: expected 0 to {self.num_blocks - 1}")
            if self._refs[i] == 0 and i not in self._hash_of:
                raise BlockError(f"block {i}: a reference to a blank free block")
        for i in ids:
            if self._refs[i] == 0:
                del self._free[i]
            self._refs[i] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One reference less each; at 0 a block is free (its content can be hit until reused)."""
        ids = list(block_ids)
        for i, n in collections.Counter(ids).items():
            if not 0 <= i < self.num_blocks or self._refs[i] < n:
                raise BlockError(f"block {i}: released more often than referenced")
        # Tail first: the end of a prompt is the part that is least likely to be shared.
        for i in reversed(ids):
            self._refs[i] -= 1
            if self._refs[i] == 0:
                self._free[i] = None

    def register(self, block_id: int, content: bytes) -> None:
        """The referenced block holds this content. A second block of equal content stays plain."""
        if self._refs[block_id] == 0:
            raise BlockError(f"block {block_id}: registered without a reference")
        if content not in self._by_hash and block_id not in self._hash_of:
            self._by_hash[content] = block_id
            self._hash_of[block_id] = content

    def hit(self, contents: Sequence[bytes]) -> list[int]:
        """The longest run of cached blocks for these contents, each with one more reference."""
        out: list[int] = []
        for content in contents:
            block_id = self._by_hash.get(content)
            if block_id is None:
                break
            out.append(block_id)
        self.touch(out)
        return out

    def evict(self, block_ids: Iterable[int]) -> None:
        """These contents must not be hit any more. References are not touched."""
        for i in block_ids:
            self._forget(i)

    def _forget(self, block_id: int) -> None:
        content = self._hash_of.pop(block_id, None)
        if content is not None:
            del self._by_hash[content]
