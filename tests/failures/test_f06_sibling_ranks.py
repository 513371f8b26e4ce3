"""F06: one of several rank transfers fails; the blocks are free only when every rank's grant is
closed, and then no sibling can write any more."""

from __future__ import annotations

import signal

import pytest

from tests.kvt_kit import BIG, TRANSPORTS, Shape, Target, key_of, raw, sender_process

OK, ABORTED, PEER_LOST = 0, 5, 9
HALF = Shape(layers=BIG.layers, blocks=BIG.blocks, heads=BIG.heads, dim=BIG.dim, tp=2)
BLOCKS = list(range(BIG.blocks))
TOKENS = BIG.blocks * BIG.block_tokens


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sibling_still_writes_until_the_grant_is_closed(transport: str) -> None:
    with (
        Target(BIG) as target,
        sender_process(HALF, rank=0, seed=1) as dies,
        sender_process(HALF, rank=1, seed=1) as writes,
    ):
        for sender in (dies, writes):
            sender.call("connect", target.port, [transport])
        target.grant(1, BLOCKS, 0, TOKENS, sources=(0, 1))
        dies.call("open", 1, 0, TOKENS)
        transfer = writes.call("open", 1, 0, TOKENS)
        target.until(lambda s: [x["state"] for x in s["grants"][0]["sources"]] == ["receiving"] * 2)
        dies.kill()
        assert target.completion(1)[1:4] == (0, 0, PEER_LOST)

        # One rank has failed: the transfer as a whole will, but the grant is there, and says why.
        (grant,) = target.receiver.snapshot()["grants"]
        assert [s["state"] for s in grant["sources"]] == ["ended", "receiving"]
        writes.call("send", transfer, BLOCKS, BLOCKS, 0, TOKENS, target_shape=BIG)
        target.until(lambda s: s["bytes_placed"] > 0)
        writes.signal(signal.SIGSTOP)  # alive, in the middle, and about to go on
        assert target.queue.stats()["reserved"] >= 1
        target.receiver.close_grant(key_of(1))
        assert target.completion(2)[1] == 1
        assert target.receiver.snapshot()["grants"] == []
        for tensor in target.cache.tensors:
            raw(tensor)[...] = 0x0F06
        writes.signal(signal.SIGCONT)
        assert writes.call("result", transfer)[0] in (ABORTED, OK)
        for tensor in target.cache.tensors:
            assert bool((raw(tensor) == 0x0F06).all())


def test_two_receiving_ranks_close_one_by_one() -> None:
    """Each D rank has a grant of its own; closing one says nothing about the other."""
    half = Shape(tp=2)
    with (
        Target(half, rank=0) as zero,
        Target(half, rank=1) as one,
        sender_process(Shape()) as sender,
    ):
        blocks = [4, 2, 31, 0]
        zero.grant(1, blocks, 0, 64)
        one.grant(1, blocks, 0, 64)
        zero.receiver.close_grant(key_of(1))
        assert zero.completion(1)[3] == ABORTED
        sender.call("connect", one.port, ["tcp"], target_rank=1)
        transfer = sender.call("open", 1, 0, 64)
        sender.call("send", transfer, blocks, blocks, 0, 64, target_shape=half, target_rank=1)
        assert one.completion(1)[3] == OK  # still open there: its blocks are not free yet
