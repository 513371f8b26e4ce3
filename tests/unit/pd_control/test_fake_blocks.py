"""The fake engine's block pool against a plain model of what a pool must do."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pd_control.testing.fake_blocks import BlockError, BlockPool, block_hashes


def test_hashes_chain_and_cover_full_blocks_only() -> None:
    a = block_hashes([1, 2, 3, 4, 5], 2)
    assert len(a) == 2
    assert block_hashes([9, 2, 3, 4], 2)[1] != a[1]
    assert block_hashes([1, 2, 3, 4], 2, salt="s") != a


def test_hits_survive_release_until_reuse() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    assert blocks is not None
    for block, content in zip(blocks, (b"x", b"y"), strict=True):
        pool.register(block, content)
    pool.release(blocks)
    assert pool.num_free == 3
    assert pool.hit([b"x", b"y", b"z"]) == blocks
    assert pool.allocate(2) is None
    pool.release(blocks)
    # Reuse takes the blank block first, then the tail of the prompt, which was freed first.
    assert pool.allocate(2) == [2, blocks[1]]
    assert pool.hit([b"x", b"y"]) == [blocks[0]]


def test_evicted_content_is_not_hit() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.register(blocks[0], b"x")
    pool.evict(blocks)
    assert pool.hit([b"x"]) == []
    assert pool.refs(blocks[0]) == 1


def test_misuse_raises_and_changes_nothing() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    with pytest.raises(BlockError, match="released more often"):
        pool.release([block, block])
    assert pool.refs(block) == 1
    with pytest.raises(BlockError, match="blank free block"):
        pool.touch([block, 1 - block])
    assert pool.refs(block) == 1
    with pytest.raises(BlockError, match="expected 0 to 1"):
        pool.touch([2])


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of calls: counts add up and no referenced block is handed out again."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.held: list[int] = []
        self.contents = 0

    @rule(n=st.integers(0, 4))
    def allocate(self, n: int) -> None:
        got = self.pool.allocate(n)
        if got is None:
            assert n > 6 - len(set(self.held))
        else:
            assert not set(got) & set(self.held)
            self.held += got

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            block = data.draw(st.sampled_from(self.held))
            self.held.remove(block)
            self.pool.release([block])

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        if self.held:
            block = data.draw(st.sampled_from(self.held))
            self.pool.touch([block])
            self.held.append(block)

    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        if self.held:
            self.pool.register(
                data.draw(st.sampled_from(self.held)), bytes([data.draw(st.integers(0, 3))])
            )

    @rule(content=st.integers(0, 3))
    def hit(self, content: int) -> None:
        self.held += self.pool.hit([bytes([content])])

    @invariant()
    def counts_add_up(self) -> None:
        assert self.pool.referenced() == {b: self.held.count(b) for b in set(self.held)}
        assert self.pool.num_free == 6 - len(set(self.held))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
