"""F05: D has part of the prefix. Block lists start at token 0 on both sides, so whatever D has, and
however the two block sizes relate, token t goes to token t and nothing else changes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kvt_kit import Shape, Target, _Sender, raw

OK = 0
MAX_TOKENS = 96


class Pair:
    """A sender and a receiver of two block sizes, connected once."""

    def __init__(self, source_tokens: int, target_tokens: int) -> None:
        blocks = MAX_TOKENS // min(source_tokens, target_tokens) + 8
        self.source = _Sender(Shape(blocks=blocks, block_tokens=source_tokens, layers=2), 0, 1)
        self.target = Target(Shape(blocks=blocks, block_tokens=target_tokens, layers=2), seed=2)
        self.source.connect(self.target.port, ["tcp"])
        self.num = 0

    def close(self) -> None:
        self.source.disconnect()
        self.target.close()


@pytest.fixture(scope="module")
def pairs() -> Iterator[object]:
    made = lru_cache(maxsize=None)(Pair)
    opened: list[Pair] = []

    def get(a: int, b: int) -> Pair:
        pair = made(a, b)
        if pair not in opened:
            opened.append(pair)
        return pair

    yield get
    for pair in opened:
        pair.close()


@settings(max_examples=int(os.environ.get("KVT_EXAMPLES", "200")), deadline=None)
@given(data=st.data())
def test_every_prefix_hit_lands_on_its_own_tokens(pairs: object, data: st.DataObject) -> None:
    assert callable(pairs)
    sizes = st.sampled_from([1, 3, 4, 8, 16])
    pair: Pair = pairs(data.draw(sizes, "P's block size"), data.draw(sizes, "D's block size"))
    wanted = data.draw(st.integers(1, MAX_TOKENS), "wanted")
    cached = data.draw(st.integers(0, wanted - 1), "cached")
    cuts = sorted({cached, wanted, *data.draw(st.lists(st.integers(cached, wanted), max_size=2))})
    lists = []
    for shape in (pair.source.shape, pair.target.shape):
        count = -(-wanted // shape.block_tokens)
        lists.append(data.draw(st.permutations(range(shape.blocks)))[:count])
    source_blocks, target_blocks = lists
    # All is drawn: from here on the example runs to its end.
    before = pair.target.bytes()
    pair.num += 1
    pair.target.grant(pair.num, target_blocks, cached, wanted)
    transfer = pair.source.open(pair.num, cached, wanted)
    for first, end in itertools.pairwise(cuts):
        pair.source.send(
            transfer, source_blocks, target_blocks, first, end, end == wanted,
            target_shape=pair.target.shape,
        )  # fmt: skip
    pair.source.end(transfer)
    assert pair.target.completion(pair.num)[2:4] == (wanted, OK)

    p_size, d_size = pair.source.shape.block_tokens, pair.target.shape.block_tokens
    for mine, theirs, was in zip(
        pair.target.cache.tensors, pair.source.cache.tensors, before, strict=True
    ):
        for token in range(cached, wanted):
            was[:, target_blocks[token // d_size], token % d_size] = raw(theirs)[
                :, source_blocks[token // p_size], token % p_size
            ]
        assert np.array_equal(raw(mine), was)


def test_a_sender_that_begins_elsewhere_is_refused() -> None:
    """D has 32 of 64 tokens; a P that would trim from the wrong end cannot even open."""
    pair = Pair(16, 16)
    try:
        pair.target.grant(1, [1, 2, 3, 4], 32, 64)
        for first, end in ((0, 32), (0, 64), (16, 48), (48, 64), (32, 80)):
            result = pair.source.result(pair.source.open(1, first, end))
            assert result is not None
            assert result[0] == 12, (first, end)
        transfer = pair.source.open(1, 32, 64)
        # An honest OPEN and then the bytes of the first half, at the places of the first half:
        pair.source.send(transfer, [5, 6, 7, 8], [1, 2, 3, 4], 0, 32)
        result = pair.source.result(transfer)
        assert result is not None
        assert result[0] == 12
        assert pair.target.completion(1)[3] == 12
    finally:
        pair.close()
