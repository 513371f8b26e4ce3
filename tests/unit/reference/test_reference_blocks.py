"""The block pool: references, free order, prefix cache; against a model under random use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_control.reference.blocks import BlockPool, chain_hashes


def test_hashes_cover_the_whole_prefix() -> None:
    a = chain_hashes([1, 2, 3, 4, 5], 2)
    b = chain_hashes([9, 2, 3, 4, 5], 2)
    assert len(a) == 2
    assert a[0] != b[0]
    assert a[1] != b[1], "equal second blocks after different first ones are different KV"
    assert chain_hashes([1, 2, 3, 4, 5, 6], 2, known=a)[:2] == a
    assert chain_hashes([1, 2], 2, salt=b"x") != chain_hashes([1, 2], 2)


def test_a_cached_prefix_survives_until_its_block_is_needed() -> None:
    pool = BlockPool(3, 2)
    hashes = chain_hashes([1, 2, 3, 4], 2)
    held = pool.allocate(2)
    assert held is not None
    for block, h in zip(held, hashes, strict=True):
        pool.register(block, h)
    pool.release(reversed(held))
    assert pool.num_free == 3
    assert pool.lookup(hashes) == held
    other = pool.allocate(1)
    assert other is not None
    assert other[0] not in held, "the block without contents goes first"
    pool.acquire(held)
    assert pool.allocate(1) is None
    pool.release(held)
    taken = pool.allocate(2)
    assert taken is not None
    assert pool.lookup(hashes) == [], "reused blocks are forgotten"


def test_releasing_too_often_is_an_error() -> None:
    pool = BlockPool(1, 1)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release([0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aArRlf"), st.integers(0, 5)), max_size=60))
def test_against_a_model(ops: list[tuple[str, int]]) -> None:
    pool = BlockPool(5, 1)
    refs = [0] * 5
    cached: dict[bytes, int] = {}
    for op, n in ops:
        if op == "a":
            got = pool.allocate(n)
            if got is None:
                assert n > refs.count(0)
                continue
            for b in got:
                assert refs[b] == 0
                refs[b] = 1
                cached = {h: c for h, c in cached.items() if c != b}
        elif op == "A":
            pool.acquire([n % 5])
            refs[n % 5] += 1
        elif op == "r" and refs[n % 5]:
            pool.release([n % 5])
            refs[n % 5] -= 1
        elif op == "R" and refs[n % 5]:
            h = bytes([n])
            pool.register(n % 5, h)
            if h not in cached:
                cached = {k: c for k, c in cached.items() if c != n % 5}
                cached[h] = n % 5
        elif op == "f":
            pool.forget([n % 5])
            cached = {k: c for k, c in cached.items() if c != n % 5}
        elif op == "l":
            h = bytes([n])
            assert pool.lookup([h]) == ([cached[h]] if h in cached else [])
        assert [pool.refs(b) for b in range(5)] == refs
        assert pool.num_free == refs.count(0)
