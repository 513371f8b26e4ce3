"""cma: who is read, and whose word completes a transfer. The sender here is written by hand."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvt_bindings import PairPlanner
from tests import kvt_wire as wire
from tests.kvt_kit import P_SCHEDULER, Shape, Target, key_of, make_cache, raw

SHAPE = Shape(layers=2)
BLOCKS = [4, 2, 31, 0]
OK, ABORTED, PEER_LOST, TIMEOUT, INTERNAL, BAD_REQUEST = 0, 5, 9, 10, 14, 12
NONCE = ctypes.create_string_buffer(os.urandom(32), 32)


@pytest.fixture
def target() -> Iterator[Target]:
    with Target(SHAPE) as t:
        yield t


def hello(cache: Any, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "transports": wire.CMA | wire.TCP,
        **wire.own_process(),
        "nonce_address": ctypes.addressof(NONCE),
        "nonce": NONCE.raw,
        "regions": [(n, 0, t.nbytes, t.ctypes.data) for n, t in enumerate(cache.tensors)],
    }
    return wire.hello(cache.layout.serialize(), **{**fields, **changes})


def send_all(peer: wire.RawPeer, cache: Any, key: int, transfer: int = 1) -> None:
    peer.send(wire.open_(transfer, key_of(key), P_SCHEDULER, 0, 64))
    (part,) = PairPlanner(cache.layout, cache.layout).plan(0, 0, [BLOCKS], [BLOCKS], 0, 64, True)
    for layer in part.layers:
        peer.send(
            wire.blocks(transfer, layer, 0, 64, part.runs), wire.chunk_end(transfer, layer, 0, 64)
        )


def connected(target: Target, cache: Any, **changes: Any) -> wire.RawPeer:
    peer = target.raw_peer()
    assert peer.greet(hello(cache, **changes))[1] == 1
    return peer


def test_completes_only_after_the_word_of_the_sender(target: Target) -> None:
    cache = make_cache(SHAPE, seed=3)
    peer = connected(target, cache)
    target.grant(1, BLOCKS, 0, 64)
    send_all(peer, cache, 1)
    assert peer.read_frame() == (b"ASKH", b"\x01\x00\x00\x00")
    # Every byte is there, and it is not reported as KV yet.
    for mine, theirs in zip(target.cache.tensors, cache.tensors, strict=True):
        assert np.array_equal(raw(mine)[:, BLOCKS], raw(theirs)[:, BLOCKS])
    (grant,) = target.receiver.snapshot()["grants"]
    assert grant["sources"][0]["state"] == "confirming"
    assert target.queue.stats()["pushed"] == 0
    peer.send(wire.held(1, True))
    assert target.completion(1)[2:4] == (64, OK)
    assert peer.read_result()[:4] == (b"DONE", 1, OK, 64)


def test_a_source_that_was_not_held_is_a_failure(target: Target) -> None:
    cache = make_cache(SHAPE)
    peer = connected(target, cache)
    target.grant(1, BLOCKS, 0, 64)
    send_all(peer, cache, 1)
    peer.read_frame()
    peer.send(wire.held(1, False))
    assert target.completion(1)[3] == ABORTED
    assert "not held" in peer.read_result()[4]


def test_no_confirmation_is_a_failure(target: Target) -> None:
    cache = make_cache(SHAPE)
    peer = connected(target, cache)
    target.grant(1, BLOCKS, 0, 64, progress_ms=100)
    send_all(peer, cache, 1)
    peer.read_frame()
    assert target.completion(1)[3] == TIMEOUT
    peer.read_result()
    peer.send(wire.held(1, True))  # too late
    target.grant(2, BLOCKS, 0, 64)
    send_all(peer, cache, 2, transfer=2)
    peer.read_frame()
    peer.sock.close()  # and a death while it is asked
    assert target.completion(2)[3] == PEER_LOST


def test_a_word_without_a_question_is_a_violation(target: Target) -> None:
    cache = make_cache(SHAPE)
    peer = connected(target, cache)
    target.grant(1, BLOCKS, 0, 64)
    peer.send(wire.open_(1, key_of(1), P_SCHEDULER, 0, 64), wire.held(1, True))
    assert target.completion(1)[3] == BAD_REQUEST


def test_sources_outside_the_memory_table(target: Target) -> None:
    cache = make_cache(SHAPE)
    peer = connected(target, cache)
    before = target.bytes()
    target.grant(1, BLOCKS, 0, 64)
    (part,) = PairPlanner(cache.layout, cache.layout).plan(0, 0, [BLOCKS], [BLOCKS], 0, 64, True)
    runs = [(src + (1 << 40), dst, length) for src, dst, length in part.runs]
    peer.send(wire.open_(1, key_of(1), P_SCHEDULER, 0, 64), wire.blocks(1, 0, 0, 64, runs))
    assert target.completion(1)[3] == BAD_REQUEST
    assert all(np.array_equal(a, b) for a, b in zip(target.bytes(), before, strict=True))


def test_memory_that_is_not_mapped_is_an_error_of_the_transfer(target: Target) -> None:
    cache = make_cache(SHAPE)
    regions = [(n, 0, t.nbytes, 0x1000) for n, t in enumerate(cache.tensors)]
    peer = connected(target, cache, regions=regions)
    target.grant(1, BLOCKS, 0, 64)
    send_all(peer, cache, 1)
    _, _, _, code, detail = target.completion(1)
    assert code == INTERNAL
    assert "process_vm_readv" in detail


def note_of(body: bytes) -> str:
    size = int.from_bytes(body[8:10], "little")
    return body[10 : 10 + size].decode()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nonce": bytes(32)}, "does not hold the agreed secret"),
        ({"nonce_address": 0x10}, "process_vm_readv: Bad address"),
        ({"start_time": 1}, "another process has this number"),
        ({"pid": 0}, "no such number"),
        ({"pid": 1 << 30}, "pidfd_open"),
        ({"regions": [(0, 0, 64, 4096), (0, 32, 64, 4096)]}, "overlaps"),
    ],
)
def test_falls_back_to_tcp_and_says_why(
    target: Target, changes: dict[str, Any], reason: str
) -> None:
    peer = target.raw_peer()
    body = peer.greet(hello(make_cache(SHAPE), **changes))
    assert body[:2] == bytes([OK, 0])
    assert reason in note_of(body)
    assert reason in target.receiver.snapshot()["connections"][0]["note"]


def test_another_process_is_not_read(target: Target) -> None:
    """The greeting names a process that is not the one speaking: its memory holds no such secret."""
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        peer = target.raw_peer()
        body = peer.greet(
            hello(
                make_cache(SHAPE),
                pid=other.pid,
                start_time=wire.start_time_ticks(other.pid),
            )
        )
        assert body[:2] == bytes([OK, 0])
        assert "cma: process" in note_of(body)
    finally:
        other.kill()
        other.wait()
        assert other.stdin is not None
        other.stdin.close()


def test_forced_cma_refuses_instead() -> None:
    with Target(SHAPE, transports=["cma"]) as target:
        peer = target.raw_peer()
        body = peer.greet(hello(make_cache(SHAPE), nonce=bytes(32)))
        assert body[0] == 7
        assert "secret" in note_of(body)
        assert peer.is_over()
