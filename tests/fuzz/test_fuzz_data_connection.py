"""Damaged, cut, repeated and shuffled data connections against the real receiver.

Whatever comes: the process lives, memory outside the granted blocks never changes, every owed
completion is delivered, and the next honest sender is served.
"""

from __future__ import annotations

import os
import random
import struct

import numpy as np
import pytest

from kvt_bindings import PairPlanner, crc32c
from tests import kvt_wire as wire
from tests.kvt_kit import P_SCHEDULER, Shape, Target, key_of, make_cache, raw

SHAPE = Shape(layers=2, blocks=8, block_tokens=4, heads=2, dim=8)
GRANTED = [5, 2]
FOREIGN = [b for b in range(SHAPE.blocks) if b not in GRANTED]
ROUNDS = int(os.environ.get("KVT_FUZZ_ROUNDS", "600"))
OK, ABORTED, PEER_LOST, CORRUPT, BAD_REQUEST = 0, 5, 9, 11, 12


class Honest:
    """The frames of one good transfer (payload included), apart, to be spoilt."""

    def __init__(self) -> None:
        cache = make_cache(SHAPE, seed=4)
        self.hello = wire.hello(cache.layout.serialize())
        (part,) = PairPlanner(cache.layout, cache.layout).plan(
            0, 0, [GRANTED], [GRANTED], 0, 8, True
        )
        self.runs = part.runs
        self.memory = [raw(t).tobytes() for t in cache.tensors]

    def frames(self, key: int, transfer: int = 1) -> list[bytes]:
        out = [wire.open_(transfer, key_of(key), P_SCHEDULER, 0, 8, crc=True)]
        for layer, memory in enumerate(self.memory):
            payload = b"".join(memory[s : s + n] for s, _, n in self.runs)
            out.append(wire.blocks(transfer, layer, 0, 8, self.runs) + payload)
            out.append(wire.chunk_end(transfer, layer, 0, 8, crc32c(payload)))
        return [*out, wire.end(transfer)]


def spoil(frames: list[bytes], rng: random.Random) -> bytes:
    """One to three kinds of damage."""
    frames = list(frames)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(frames))
        kind = rng.randrange(7)
        if kind == 0:
            frames.insert(at, frames[at])
        elif kind == 1:
            del frames[at]
        elif kind == 2:
            rng.shuffle(frames)
        elif kind == 3:
            frames[at] = frames[at][: rng.randrange(len(frames[at]) + 1)]
        elif kind == 4 and frames[at]:
            damaged = bytearray(frames[at])
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            frames[at] = bytes(damaged)
        elif kind == 5 and len(frames[at]) > 8:
            length = rng.choice((0, 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF))
            frames[at] = frames[at][:4] + struct.pack("<I", length) + frames[at][8:]
        else:
            frames.insert(at, rng.randbytes(rng.randint(1, 64)))
        if not frames:
            frames.append(b"")
    return b"".join(frames)


@pytest.mark.parametrize("seed", range(2))
def test_spoilt_connections(seed: int) -> None:
    rng = random.Random(seed)
    honest = Honest()
    with Target(SHAPE) as target:
        foreign = [raw(t)[:, FOREIGN].copy() for t in target.cache.tensors]
        codes: set[int] = set()
        for round_ in range(ROUNDS):
            key = round_ + 1
            target.grant(key, GRANTED, 0, 8)
            frames = honest.frames(key)
            stream = (
                spoil([honest.hello, *frames], rng)
                if rng.random() < 0.2
                else honest.hello + spoil(frames, rng)
            )
            peer = target.raw_peer()
            try:
                peer.send(stream)
                peer.sock.shutdown(1)
                peer.is_over()
            except OSError:
                pass  # the receiver had enough
            peer.sock.close()
            target.receiver.close_grant(key_of(key))
            codes.add(target.completion(round_ + 1)[3])
            for tensor, was in zip(target.cache.tensors, foreign, strict=True):
                assert np.array_equal(raw(tensor)[:, FOREIGN], was), f"round {round_}"
        assert codes >= {OK, ABORTED, PEER_LOST, CORRUPT, BAD_REQUEST}  # it went in deep
        # As good as new.
        target.grant(1 << 40, GRANTED, 0, 8)
        peer = target.raw_peer()
        assert peer.greet(honest.hello)[0] == OK
        peer.send(*honest.frames(1 << 40))
        assert peer.read_result()[:4] == (b"DONE", 1, OK, 8)
        for tensor, memory in zip(target.cache.tensors, honest.memory, strict=True):
            theirs = np.frombuffer(memory, np.uint16).reshape(raw(tensor).shape)
            assert np.array_equal(raw(tensor)[:, GRANTED], theirs[:, GRANTED])
        assert target.completion(ROUNDS + 1)[3] == OK
        peer.sock.close()


def test_a_stream_cut_into_single_bytes() -> None:
    """Framing does not depend on how the bytes arrive."""
    honest = Honest()
    with Target(SHAPE) as target:
        target.grant(1, GRANTED, 0, 8)
        peer = target.raw_peer()
        for byte in honest.hello + b"".join(honest.frames(1)):
            peer.send(bytes([byte]))
        assert target.completion(1)[2:4] == (8, OK)
        peer.sock.close()
