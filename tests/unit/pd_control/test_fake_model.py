"""The made-up model: what the oracle says is what the cache gives, and wrong KV is seen."""

from __future__ import annotations

import pytest

from pd_control.testing.fake_model import CacheShard, Geometry, chain, oracle, token_of

GEOMETRY = Geometry(num_layers=3, num_heads=4, head_dim=4, block_size_tokens=8)
PROMPT = [(i * 37) % 1000 for i in range(45)]
BLOCKS = [5, 2, 9, 0, 7, 3]


def filled(tp_size: int, prompt: list[int] = PROMPT) -> list[CacheShard]:
    shards = [CacheShard(GEOMETRY, 12, rank, tp_size) for rank in range(tp_size)]
    states = chain(prompt)
    for shard in shards:
        for layer in range(GEOMETRY.num_layers):
            shard.write(layer, BLOCKS, 0, states[:20])
            shard.write(layer, BLOCKS, 20, states[20:])
    return shards


def token(shards: list[CacheShard], blocks: list[int] = BLOCKS) -> int:
    return token_of(sum(s.fold(blocks, len(PROMPT)) for s in shards), GEOMETRY)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_cache_agrees_with_the_oracle_for_any_split_of_heads(tp_size: int) -> None:
    assert token(filled(tp_size)) == oracle(PROMPT, 1, GEOMETRY)[0]


def test_the_oracle_continues_from_its_own_tokens() -> None:
    three = oracle(PROMPT, 3, GEOMETRY)
    assert oracle([*PROMPT, *three[:2]], 1, GEOMETRY) == three[2:]


def test_wrong_kv_changes_the_token() -> None:
    right = token(filled(2))
    other = filled(2, [PROMPT[0] + 1, *PROMPT[1:]])
    assert token(other) != right, "another prompt"
    swapped = [BLOCKS[1], BLOCKS[0], *BLOCKS[2:]]
    assert token(filled(2), swapped) != right, "two blocks exchanged"
    shards = filled(2)
    shards[1].layers[2][1, BLOCKS[3], 4, 1, 2] ^= 1
    assert token(shards) != right, "one bit"
    shards = filled(2)
    shards[0].layers[0], shards[0].layers[1] = shards[0].layers[1], shards[0].layers[0]
    assert token(shards) != right, "two layers exchanged"


def test_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="divisor of 4 heads"):
        CacheShard(GEOMETRY, 4, 0, 3)
