"""F01: D aborts while P is still writing, and gives the blocks to the next request at once."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from tests.kvt_kit import (
    BIG,
    TRANSPORTS,
    Target,
    equal_after,
    key_of,
    memory_of,
    raw,
    sender_process,
)

OK, ABORTED = 0, 5
BLOCKS = list(range(BIG.blocks))
TOKENS = BIG.blocks * BIG.block_tokens


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_next_request_gets_its_own_bytes(transport: str) -> None:
    """The first sender goes on at full speed into blocks that already belong to the second."""
    with (
        Target(BIG) as target,
        sender_process(BIG, seed=1) as first,
        sender_process(BIG, seed=2) as second,
    ):
        for sender in (first, second):
            sender.call("connect", target.port, [transport])
        theirs = memory_of(BIG, 2)
        few = BLOCKS[:64]
        for round_ in range(4):
            late, next_ = 10 + round_, 20 + round_
            target.grant(late, BLOCKS, 0, TOKENS)
            placed = target.receiver.snapshot()["bytes_placed"]
            transfer = first.call("open", late, 0, TOKENS)
            first.call("send", transfer, BLOCKS, BLOCKS, 0, TOKENS)
            target.until(lambda s, placed=placed: s["bytes_placed"] > placed)
            target.receiver.close_grant(key_of(late))
            before = target.bytes()

            target.grant(next_, few, 0, 1024)
            ours = second.call("open", next_, 0, 1024)
            second.call("send", ours, few, few, 0, 1024)
            second.call("end", ours)
            assert second.call("result", ours)[0] == OK
            assert first.call("result", transfer)[0] in (ABORTED, OK)
            assert equal_after(target, before, theirs, few, few, 0, 1024)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_abort_does_not_wait_for_a_hanging_sender(transport: str) -> None:
    with Target(BIG) as target, sender_process(BIG, seed=1) as sender:
        sender.call("connect", target.port, [transport])
        target.grant(1, BLOCKS, 0, TOKENS)
        transfer = sender.call("open", 1, 0, TOKENS)
        sender.call("send", transfer, BLOCKS, BLOCKS, 0, TOKENS, layers=[0, 1, 2])
        target.until(lambda s: s["bytes_placed"] > 0)
        sender.signal(signal.SIGSTOP)
        target.receiver.close_grant(key_of(1))
        for tensor in target.cache.tensors:
            raw(tensor)[...] = 0x1234
        sender.signal(signal.SIGCONT)
        assert sender.call("result", transfer)[0] == ABORTED
        for tensor in target.cache.tensors:
            assert bool((raw(tensor) == 0x1234).all())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_source_that_was_let_go_never_completes(transport: str) -> None:
    """The mirror image on P: its blocks get a new owner before D has read them. What D then holds
    is not the request's KV, and so it is not reported as such."""
    with Target(BIG) as target, sender_process(BIG, seed=1) as sender:
        sender.call("connect", target.port, [transport])
        target.grant(1, BLOCKS, 0, TOKENS)
        transfer = sender.call("open", 1, 0, TOKENS)
        sender.call("send", transfer, BLOCKS, BLOCKS, 0, TOKENS, layers=[0, 1, 2])
        sender.call("cancel", transfer, ABORTED, "the lease is over")
        sender.call("scribble", 5)
        assert sender.call("is_released", transfer)
        assert target.completion(1)[3] == ABORTED
        assert np.array_equal(raw(target.cache.tensors[3]), raw(memory_of(BIG, 1000)[3]))
