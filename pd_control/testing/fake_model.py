"""A made-up model whose KV and tokens are exact functions of the token ids.

The KV cell of position i holds numbers derived from *all* token ids up to i, and the next token is
derived from *all* KV cells before it, read from the cache. So KV of another prompt, of another
position or layer, stale bytes, or one flipped bit change the output, and what the output should be
can be computed without any cache (`oracle`). Nothing is learnt and nothing is random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# numpy arrays (the type checker does not follow numpy): of 32-bit and 64-bit unsigned numbers.
U32 = Any
U64 = Any

_MASK = (1 << 64) - 1
_MUL = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the usual odd multiplier of integer hashes


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of the model and its cache. `num_heads` KV heads are split evenly over the ranks."""

    num_layers: int = 4
    num_heads: int = 4
    head_dim: int = 8
    block_size_tokens: int = 16
    vocab_size: int = 50_000
    name: str = "fake-model"

    def heads_per_rank(self, tp_size: int) -> int:
        if self.num_heads % tp_size:
            raise ValueError(
                f"tp_size: expected a divisor of {self.num_heads} heads, got {tp_size}"
            )
        return self.num_heads // tp_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size_tokens)


def _mix(x: int) -> int:
    x = (x ^ (x >> 31)) * _MUL & _MASK
    x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
    return x ^ (x >> 32)


def _mix_array(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(31))) * np.uint64(_MUL)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(32))


def chain(token_ids: Sequence[int], start: int = 0) -> list[int]:
    """One 64-bit number a token; each depends on all tokens so far. `start` continues a chain."""
    out: list[int] = []
    state = start
    for token in token_ids:
        state = _mix(state * 3 + token + 1 & _MASK)
        out.append(state)
    return out


def cells(states: Sequence[int], layer: int, heads: range, geometry: Geometry) -> U32:
    """KV of consecutive tokens for one layer: [token, kv (2), head, dim] of 32-bit numbers."""
    kv: Any = np.arange(2, dtype=np.uint64)[:, None, None]
    head: Any = np.array(heads, dtype=np.uint64)[None, :, None]
    dim: Any = np.arange(geometry.head_dim, dtype=np.uint64)[None, None, :]
    salt = ((np.uint64(layer) * np.uint64(1000003) + kv) * np.uint64(4099) + head) * np.uint64(
        257
    ) + dim
    base = np.array(states, dtype=np.uint64)[:, None, None, None]
    return _mix_array(base + salt * np.uint64(_MUL)).astype(np.uint32)


def fold(kv: U32, first_position: int, layer: int, heads: range) -> int:
    """What one layer's cells [token, kv, head, dim] contribute to the next token.

    Position, layer, head and lane are all weighed in, so that exchanging any two of them changes
    the sum; the parts add up over layers, head ranges and token ranges.
    """
    n, num_kv, _, dim = kv.shape
    position = np.arange(first_position + 1, first_position + n + 1, dtype=np.uint64)
    head: Any = np.array(heads, dtype=np.uint64)[None, :, None]
    lane = _mix_array(
        (np.arange(num_kv, dtype=np.uint64)[:, None, None] * np.uint64(4099) + head)
        * np.uint64(257)
        + np.arange(1, dim + 1, dtype=np.uint64)[None, None, :]
        + np.uint64((layer + 1) * 1_000_003)
    )
    mixed = _mix_array(kv.astype(np.uint64) * lane + _mix_array(position)[:, None, None, None])
    return int(mixed.sum(dtype=np.uint64))


def token_of(total: int, geometry: Geometry) -> int:
    """The next token, from the sum of all folds (all layers, all ranks, all positions)."""
    return _mix(total & _MASK) % geometry.vocab_size


def oracle(prompt: Sequence[int], num_tokens: int, geometry: Geometry) -> list[int]:
    """The tokens that an undivided engine generates after `prompt`, computed without a cache."""
    tokens = list(prompt)
    states = chain(tokens)
    heads = range(geometry.num_heads)
    total = sum(
        fold(cells(states, layer, heads, geometry), 0, layer, heads)
        for layer in range(geometry.num_layers)
    )
    out: list[int] = []
    for _ in range(num_tokens):
        token = token_of(total, geometry)
        out.append(token)
        state = chain([token], states[-1])
        position = len(states)
        states.extend(state)
        total += sum(
            fold(cells(state, layer, heads, geometry), position, layer, heads)
            for layer in range(geometry.num_layers)
        )
    return out


class CacheShard:
    """One rank's cache: an array a layer of shape [kv (2), block, token, head, dim], 32-bit.

    Owner: the worker. Read and written on the worker's step thread, and written by the data plane
    under a grant.
    """

    def __init__(self, geometry: Geometry, num_blocks: int, rank: int, tp_size: int) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        per_rank = geometry.heads_per_rank(tp_size)
        self.heads = range(rank * per_rank, (rank + 1) * per_rank)
        shape = (2, num_blocks, geometry.block_size_tokens, per_rank, geometry.head_dim)
        # A pattern that no cell holds by chance: reading an unwritten block changes the token.
        self.layers: list[U32] = [
            np.full(shape, 0xDEADBEEF, dtype=np.uint32) for _ in range(geometry.num_layers)
        ]

    def write(
        self, layer: int, block_ids: Sequence[int], first_position: int, states: Sequence[int]
    ) -> None:
        """Computes and stores the KV of `len(states)` tokens from `first_position` on."""
        kv = cells(states, layer, self.heads, self.geometry)
        blocks, slots = self._slots(block_ids, first_position, len(states))
        self.layers[layer][:, blocks, slots] = kv.transpose(1, 0, 2, 3)

    def fold(self, block_ids: Sequence[int], num_tokens: int) -> int:
        """This rank's part of what decides the token after `num_tokens`."""
        blocks, slots = self._slots(block_ids, 0, num_tokens)
        return sum(
            fold(cache[:, blocks, slots].transpose(1, 0, 2, 3), 0, layer, self.heads)
            for layer, cache in enumerate(self.layers)
        )

    def _slots(self, block_ids: Sequence[int], first: int, count: int) -> tuple[Any, Any]:
        positions = np.arange(first, first + count)
        size = self.geometry.block_size_tokens
        return np.asarray(block_ids, dtype=np.int64)[positions // size], positions % size
