"""What every transport must do, between real processes. A new one is a name in TRANSPORTS.

The C++ suite (cpp/tests/test_transports.cpp) covers the same ground in one process and goes into
the states that only memory can reach; here the sender has an address space and a life of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import pytest

from tests.kvt_kit import (
    BIG,
    TRANSPORTS,
    Process,
    Shape,
    Target,
    equal_after,
    memory_of,
    receiver_process,
    sender_process,
)

OK, GONE, ABORTED, PEER_LOST, TIMEOUT, BAD_REQUEST = 0, 3, 5, 9, 10, 12
SMALL = Shape()
SRC = [3, 9, 1, 30]
DST = [4, 2, 31, 0]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def target() -> Iterator[Target]:
    with Target(SMALL) as t:
        yield t


@pytest.fixture
def sender(target: Target, transport: str) -> Iterator[Process]:
    with sender_process(SMALL, seed=7) as p:
        assert p.call("connect", target.port, [transport]) == transport
        yield p


def test_bytes_arrive_and_no_other_changes(target: Target, sender: Process) -> None:
    before = target.bytes()
    target.grant(1, DST, 5, 60)
    transfer = sender.call("open", 1, 5, 60)
    sender.call("send", transfer, SRC, DST, 5, 60)
    sender.call("end", transfer)
    assert target.completion(1) == (1, 0, 60, OK, "")
    assert equal_after(target, before, memory_of(SMALL, 7), SRC, DST, 5, 60)
    assert sender.call("result", transfer) == (OK, 60, "")
    snapshot = target.receiver.snapshot()
    assert snapshot["grants"] == []
    assert snapshot["num_violations"] == snapshot["bytes_drained"] == 0


def test_chunks_in_any_order(target: Target, sender: Process) -> None:
    before = target.bytes()
    target.grant(1, DST, 0, 64)
    transfer = sender.call("open", 1, crc=True)
    for first, end, last in ((48, 64, True), (0, 17, False), (17, 48, False)):
        for layer in (3, 0, 2, 1):
            sender.call("send", transfer, SRC, DST, first, end, last, layers=[layer])
    sender.call("end", transfer)
    assert target.completion(1)[3] == OK
    assert equal_after(target, before, memory_of(SMALL, 7), SRC, DST, 0, 64)


def test_different_layouts(transport: str) -> None:
    """Whole heads in blocks of 16 on P, half of them in blocks of 4 on D's second rank."""
    narrow = Shape(tp=2, block_tokens=4, blocks=128)
    with Target(narrow, rank=1) as target, sender_process(SMALL, seed=7) as sender:
        sender.call("connect", target.port, [transport], target_rank=1)
        blocks = list(range(100, 84, -1))
        target.grant(1, blocks, 3, 62)
        transfer = sender.call("open", 1, 3, 62)
        sender.call(
            "send", transfer, SRC, blocks, 3, 62, target_shape=narrow, target_rank=1
        )  # fmt: skip
        sender.call("end", transfer)
        assert target.completion(1)[3] == OK
        for mine, theirs in zip(target.cache.tensors, memory_of(SMALL, 7), strict=True):
            for token in range(3, 62):
                got = mine[:, blocks[token // 4], token % 4]
                want = theirs[:, SRC[token // 16], token % 16, 2:4]
                assert got.tobytes() == want.tobytes()


def test_cancel_reaches_the_receiver(target: Target, sender: Process) -> None:
    target.grant(1, DST, 0, 64)
    transfer = sender.call("open", 1, 0, 64)
    sender.call("send", transfer, SRC, DST, 0, 32, False)
    target.until(lambda s: s["bytes_placed"] > 0)
    sender.call("cancel", transfer, 6, "lease is over")
    assert target.completion(1)[3] == 6
    assert sender.call("result", transfer)[0] == 6
    # The connection is as good as new.
    target.grant(2, DST, 0, 64)
    again = sender.call("open", 2, 0, 64)
    sender.call("send", again, SRC, DST, 0, 64)
    assert target.completion(2)[3] == OK


def test_death_of_the_sender(target: Target, sender: Process) -> None:
    target.grant(1, DST, 0, 64)
    transfer = sender.call("open", 1, 0, 64)
    sender.call("send", transfer, SRC, DST, 0, 64, layers=[0, 1, 2])
    layer_bytes = 2 * 4 * SMALL.block_bytes
    target.until(lambda s: s["bytes_placed"] == 3 * layer_bytes)
    sender.kill()
    key, source, tokens, code, detail = target.completion(1)
    assert (key, source, tokens, code) == (1, 0, 0, PEER_LOST)
    assert "rank 0 of p0" in detail
    assert f"{3 * layer_bytes} bytes" in detail
    assert target.receiver.snapshot()["grants"] == []


def test_death_of_the_receiver(transport: str) -> None:
    with receiver_process(SMALL) as receiver, sender_process(SMALL) as sender:
        sender.call("connect", receiver.call("port"), [transport])
        receiver.call("grant", 1, DST, 0, 64)
        transfer = sender.call("open", 1, 0, 64)
        sender.call("send", transfer, SRC, DST, 0, 32, False)
        receiver.kill()
        assert sender.call("lost")[0] == PEER_LOST
        code, _, detail = sender.call("result", transfer)
        assert code == PEER_LOST
        assert "rank 0 of d0" in detail
        assert sender.call("result", sender.call("open", 2, 0, 64))[0] == PEER_LOST


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda r: [(s, d + 2, n) for s, d, n in r], id="shifted"),
        pytest.param(lambda r: [*r, r[0]], id="twice the same"),
        pytest.param(lambda r: [(s, d, n + 2) for s, d, n in r], id="longer"),
        pytest.param(lambda r: [(0, 20 * SMALL.block_bytes, 64)], id="another block"),
        pytest.param(lambda r: [(0, 1 << 40, 64)], id="outside the cache"),
    ],
)
def test_hostile_descriptors_change_no_memory(
    target: Target,
    sender: Process,
    change: object,
) -> None:
    from kvt_bindings import PairPlanner

    before = target.bytes()
    target.grant(1, DST, 0, 64)
    layout = target.cache.layout
    (part,) = PairPlanner(layout, layout).plan(0, 0, [SRC], [DST], 0, 64, True)
    transfer = sender.call("open", 1, 0, 64)
    assert callable(change)
    sender.call("send_runs", transfer, 0, 0, 64, change(list(part.runs)))
    _, _, _, code, detail = target.completion(1)
    assert code == BAD_REQUEST
    assert "layer 0" in detail
    assert sender.call("result", transfer)[0] == BAD_REQUEST
    assert target.receiver.snapshot()["num_violations"] == 1
    for mine, was in zip(target.bytes(), before, strict=True):
        assert np.array_equal(mine, was)
    target.grant(2, DST, 0, 64)  # in step behind it
    again = sender.call("open", 2, 0, 64)
    sender.call("send", again, SRC, DST, 0, 64)
    assert target.completion(2)[3] == OK


def test_close_while_bytes_flow(transport: str) -> None:
    """F01's core: after close_grant returns nothing lands, though the sender goes on."""
    blocks = list(range(1024))
    with Target(BIG) as target, sender_process(BIG) as sender:
        sender.call("connect", target.port, [transport])
        for round_ in range(1, 6):
            target.grant(round_, blocks, 0, 16384)
            transfer = sender.call("open", round_, 0, 16384)
            placed = target.receiver.snapshot()["bytes_placed"]
            sender.call("send", transfer, blocks, blocks, 0, 16384)
            target.until(lambda s, placed=placed: s["bytes_placed"] > placed)
            target.receiver.close_grant(target_key(round_))
            for tensor in target.cache.tensors:
                tensor[...] = round_  # the blocks' next owner
            assert target.completion(round_)[3] in (ABORTED, OK)
            assert sender.call("result", transfer)[0] in (ABORTED, GONE, OK)
            for tensor in target.cache.tensors:
                assert bool((tensor == round_).all())


def test_close_while_the_sender_is_stopped(transport: str) -> None:
    blocks = list(range(1024))
    with Target(BIG) as target, sender_process(BIG) as sender:
        sender.call("connect", target.port, [transport])
        target.grant(1, blocks, 0, 16384)
        transfer = sender.call("open", 1, 0, 16384)
        sender.call("send", transfer, blocks, blocks, 0, 16384, layers=[0, 1, 2])
        target.until(lambda s: s["bytes_placed"] > 0)
        sender.signal(signal.SIGSTOP)
        target.receiver.close_grant(target_key(1))  # returns although nobody is there
        for tensor in target.cache.tensors:
            tensor[...] = 1
        sender.signal(signal.SIGCONT)
        assert target.completion(1)[3] == ABORTED
        assert sender.call("result", transfer)[0] == ABORTED
        for tensor in target.cache.tensors:
            assert bool((tensor == 1).all())


def test_no_progress_while_the_sender_is_stopped(transport: str) -> None:
    with Target(SMALL) as target, sender_process(SMALL) as sender:
        sender.call("connect", target.port, [transport])
        target.grant(1, DST, 0, 64, progress_ms=150)
        sender.call("open", 1, 0, 64)
        target.until(lambda s: s["grants"][0]["sources"][0]["state"] == "receiving")
        sender.signal(signal.SIGSTOP)
        _, _, _, code, detail = target.completion(1)
        assert code == TIMEOUT
        assert "150 ms" in detail


def test_a_stopped_receiver_delays_no_other(transport: str) -> None:
    """One sender process, two receivers; the stopped one's connection is full of bytes."""
    blocks = list(range(1024))
    with receiver_process(BIG) as stuck, Target(BIG) as target, sender_process(BIG) as sender:
        sender.call("connect", stuck.call("port"), [transport])
        stuck.call("grant", 1, blocks, 0, 16384)
        stuck.signal(signal.SIGSTOP)
        first = sender.call("open", 1, 0, 16384)
        sender.call("send", first, blocks, blocks, 0, 16384)
        sender.call("keep")
        sender.call("connect", target.port, [transport])
        before = target.bytes()
        target.grant(1, blocks, 0, 1024)
        second = sender.call("open", 1, 0, 1024)
        sender.call("send", second, blocks, blocks, 0, 1024)
        assert target.completion(1)[3] == OK
        assert sender.call("result", second)[0] == OK
        assert equal_after(target, before, memory_of(BIG, 0), blocks, blocks, 0, 1024)
        stuck.signal(signal.SIGCONT)
        sender.call("swap")
        sender.call("end", first)
        assert stuck.call("completion", 1)[3] == OK
        assert sender.call("result", first)[0] == OK


def target_key(n: int) -> bytes:
    return n.to_bytes(16, "big")
