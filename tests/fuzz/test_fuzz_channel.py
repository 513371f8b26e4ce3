"""Random frames into a channel: whatever comes, items are delivered 1, 2, 3, … or the channel ends.

Run longer with `python -m tests.fuzz.test_fuzz_channel NUM_FRAMES SEED`.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import struct
import sys

import msgpack
import pytest

from simple_rpc import Identity, Limits
from simple_rpc._connection import Connection
from simple_rpc._deadline import Watchdog
from simple_rpc._errors import RpcError
from simple_rpc.channel import ChannelState
from simple_rpc.channel_table import ChannelTable
from simple_rpc.metrics import Counters
from simple_rpc.testing import ManualClock, MemoryTransport, memory_pair

PEER = Identity("worker", "fuzz")


class _Nobody:
    """The owner before LINK."""

    def on_frame(self, head, body) -> None: ...
    def on_violation(self, error) -> None: ...
    def on_lost(self, error) -> None: ...
    def on_wait_over(self) -> None: ...
    def on_shutdown(self, error) -> None: ...


class _Sink(asyncio.Protocol):
    """The fuzzer's end: only its transport matters."""

    transport: MemoryTransport

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None: ...


class Target:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.watchdog: Watchdog[Connection] = Watchdog(self.clock)
        self.metrics = Counters()
        self.num_delivered = 0
        self.num_ended = 0
        self.wrong: list[str] = []
        self.table = ChannelTable("fuzz", self._accept)

    def _accept(self, peer, channel) -> None:
        expected = 1

        def take(items) -> None:
            nonlocal expected
            for item in items:
                if item != expected:
                    self.wrong.append(f"delivered {item!r}, expected {expected}")
                expected += 1
            self.num_delivered += len(items)

        def lost(error: RpcError) -> None:
            self.num_ended += 1

        channel.on("ITEM", take)
        channel.on_lost = lost
        channel.sender.max_slots = 100

    def open(self):
        connection = Connection(
            _Nobody(),
            Limits(),
            self.watchdog,
            self.clock,
            heads={},
            max_body_bytes=4096,
        )
        sink = _Sink()
        memory_pair(sink, connection, clock=self.clock)
        connection.hold()
        channel = self.table.accept(
            connection,
            PEER,
            ["fuzz", os.urandom(16), 1, 0, {}],
            clock=self.clock,
            metrics=self.metrics,
        )
        return sink.transport, channel


def random_value(rng: random.Random, depth: int = 0) -> object:
    kind = rng.randrange(10 if depth < 4 else 7)
    if kind < 3:
        return rng.choice([0, 1, -1, 2**31, 2**63, 2**64 - 1, -(2**63), rng.randrange(300)])
    if kind < 7:
        return rng.choice([None, True, 1.5, "", "ITEM", b"", b"x" * 40, "é" * 5])
    if kind < 9:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {str(i): random_value(rng, depth + 1) for i in range(rng.randrange(4))}


def random_frame(rng: random.Random, expected: int, in_flight_end: int) -> bytes:
    """Mostly lawful, so that the conversation gets somewhere; else anything."""
    kind = rng.randrange(100)
    head = b"NEWS"
    if kind < 60:
        first = max(1, expected - rng.choice([0, 0, 0, 1, 5]))
        end = expected + rng.randrange(6)
        items = list(range(first, end)) or [first]
        cut = rng.randrange(len(items) + 1)
        body = [first, [["ITEM", part] for part in (items[:cut], items[cut:]) if part]]
    elif kind < 80:
        head, body = b"ACKN", [rng.choice([in_flight_end, in_flight_end, 1])]
    elif kind < 92:
        head, body = b"BEAT", []
    elif kind < 94:
        body = [expected + rng.randrange(1, 9), [["ITEM", [0]]]]
    elif kind < 98:
        head = rng.choice([b"NEWS", b"ACKN", b"BEAT", b"FAIL", b"OKAY", b"\x00\x01\x02\x03"])
        body = random_value(rng)
    else:
        raw = rng.randbytes(rng.randrange(40))
        return rng.choice([b"NEWS", b"ACKN", b""]) + struct.pack("<I", len(raw)) + raw
    packed = msgpack.packb(body)
    frame = bytearray(head + struct.pack("<I", len(packed)) + packed)
    if rng.randrange(60) == 0:  # of the head or the length: nothing could notice a changed item
        frame[rng.randrange(8)] ^= 1 << rng.randrange(8)
    return bytes(frame)


async def fuzz(num_frames: int, seed: int) -> Target:
    rng = random.Random(seed)
    target = Target()
    errors: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    transport, channel = target.open()
    for _ in range(num_frames):
        if channel.state is ChannelState.LOST or transport.is_closing():
            transport.abort()
            transport, channel = target.open()
        if rng.randrange(4) == 0 and channel.sender.num_free:
            channel.publish("DOWN", rng.randrange(100))
        sender = channel.sender
        in_flight_end = sender.next_seq - sender.num_unacked + sender.num_in_flight
        frame = random_frame(rng, channel.receiver.expected_seq, in_flight_end)
        cut = rng.randrange(len(frame) + 1) if rng.randrange(3) == 0 else len(frame)
        transport.write(frame[:cut])
        await asyncio.sleep(0)
        transport.write(frame[cut:])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        target.clock.advance(1.0)  # a frame that never ends costs its ten seconds
    assert not errors, errors[0]
    assert not target.wrong, target.wrong[0]
    assert len(target.table) <= 1
    return target


@pytest.mark.parametrize("seed", range(3))
async def test_random_frames(seed):
    target = await fuzz(6000, seed)
    assert target.num_delivered > 1000, "the fuzzer got nowhere"
    assert target.num_ended > 50, "the fuzzer broke no rule"


def main() -> None:
    num_frames, seed = int(sys.argv[1]), int(sys.argv[2])
    target = asyncio.run(fuzz(num_frames, seed))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{num_frames} frames, seed {seed}: {target.num_delivered} items delivered, "
        f"{target.num_ended} channels ended, peak {peak_mb:.0f} MB"
    )


if __name__ == "__main__":
    main()
