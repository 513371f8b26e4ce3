"""Random frames against the real server and client: nothing raises, hangs, grows, or gets in.

    python -m tests.fuzz.rpc_frames [--frames 1000000] [--seed 0]

Three attackers take turns. A *stranger* sends anything at all to a server with a secret: no byte of it may
reach a handler. A *peer* has proven itself and then sends frames that are valid, mutated or garbage:
handlers may only see requests of their declared types. A *server* answers a client in the same three
ways: calls end with an answer of the declared type or with an ``RpcError``. The sockets are stand-ins that
deliver at once, so a million frames take minutes; everything above them is the real code. What is kept is
bounded: per connection by the limits, for the process by resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgpack

from simple_rpc import (
    Address,
    Client,
    Deadline,
    Identity,
    Limits,
    MaxLen,
    Method,
    Range,
    RpcError,
    Secret,
    Server,
)
from simple_rpc._client_connection import ClientConnection
from simple_rpc._frames import RESERVED_HEADS, encode_frame, head_name
from simple_rpc._session import Session
from simple_rpc.hello import ClientHandshake
from simple_rpc.testing import ManualClock
from tests.rpc_kit import rss_bytes

LIMITS = Limits(max_body_bytes=64 * 1024)
MAX_GROWTH_BYTES = 48 * 1024 * 1024  # of the whole run, interpreter and allocator included
SECRET = Secret(b"the one shared secret")
HEADS = [head_name(head).encode() for head in RESERVED_HEADS] + [b"FUZZ", b"LATE", b"NONE", b"RAWX"]
NASTY = [
    b"", b"\xc1", b"\x90", b"\x92\x01\x90", b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff", b"\xdb\x80\x00\x00\x00", b"\x91" * 1100, b"\xdc\xff\xff" * 900,
    b"\x81\xa0" * 1500, b"\xc7\x05\x01abcde", b"\xd7\xff" + bytes(8), b"\x92\x00\x9f" + bytes(15),
    b"\x80\x04\x95cos\nsystem\n", b"\xca\x7f\xc0\x00\x00",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inner:
    ids: list[int]
    flag: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    name: Annotated[str, MaxLen(64)]
    level: Annotated[int, Range(0, 1000)]
    inner: Inner
    data: Annotated[bytes, MaxLen(4096)] = b""
    table: dict[str, int] = field(default_factory=dict)


FUZZ = Method("FUZZ", Message, Message, idempotent=True)
LATE = Method("LATE", Message, Message)


class Wire:
    """A stand-in for a transport: remembers what was written, tells of its end when asked to."""

    def __init__(self) -> None:
        self.protocol: Any = None
        self.written: list[bytes] = []
        self.is_ended = False
        self.is_told = False

    def write(self, data: bytes) -> None:
        if not self.is_ended:
            self.written.append(data)

    def take(self) -> bytes:
        data, self.written = b"".join(self.written), []
        return data

    def tell_end(self) -> bool:
        if self.is_ended and not self.is_told:
            self.is_told = True
            self.protocol.connection_lost(None)
        return self.is_ended

    def close(self) -> None:
        self.is_ended = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_ended

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Frames:
    """Random frames: well formed, mutated and garbage, from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        valid = [1000, ["name", 5, [[1, 2, 3], True], b"data", {"a": 1}]]
        self.bodies = [
            msgpack.packb(value)
            for value in (
                valid,
                [0, [1, 1, "scheduler", "x", bytes(16), bytes(32), {}]],
                [0, [bytes(32)]],
                [3000, ["fuzz", bytes(16), 1, 0, {}]],
                [1, [["LDON", [[1, 2], [3]]]]],
                [1],
                [12, "refused", {}],
                valid[1],
                [],
            )
        ]

    def next(self, head: bytes | None = None) -> bytes:
        rnd = self.random
        kind = rnd.random()
        if head is None:
            head = rnd.choice(HEADS) if kind < 0.9 else rnd.randbytes(4)
        body = rnd.choice(self.bodies)
        if head in (b"FUZZ", b"LATE") and rnd.random() < 0.7:
            body = self.bodies[0]
        elif head == b"OKAY" and rnd.random() < 0.7:
            body = self.bodies[-2]
        if 0.45 <= kind < 0.65 and body:
            mutable = bytearray(body)
            for _ in range(rnd.randint(1, 4)):
                mutable[rnd.randrange(len(mutable))] = rnd.randrange(256)
            body = bytes(mutable)
        elif 0.65 <= kind < 0.75:
            body = rnd.choice(NASTY)
        elif 0.75 <= kind < 0.85:
            body = rnd.randbytes(rnd.randrange(300))
        elif 0.85 <= kind < 0.9:
            body = msgpack.packb([rnd.randrange(5000), self._value(3)])
        frame = encode_frame(int.from_bytes(head, "little"), body)
        if kind > 0.97:
            cut = rnd.randrange(len(frame) + 1)
            return frame[:cut] + rnd.randbytes(rnd.randrange(6))
        return frame

    def _value(self, depth: int) -> Any:
        rnd = self.random
        kind = rnd.randrange(9 if depth else 6)
        if kind < 6:
            return [None, True, rnd.getrandbits(63), -1.5, "text", rnd.randbytes(9)][kind]
        if kind < 8:
            return [self._value(depth - 1) for _ in range(rnd.randrange(6))]
        return {str(number): self._value(depth - 1) for number in range(rnd.randrange(4))}

    def pieces(self, data: bytes) -> list[bytes]:
        """The same bytes as a socket might deliver them."""
        if self.random.random() < 0.7 or len(data) < 2:
            return [data]
        cut = self.random.randrange(1, len(data))
        return [data[:cut], data[cut:]]


class Fuzzer:
    """See the module. ``run`` raises AssertionError for whatever must not happen."""

    def __init__(self, seed: int) -> None:
        self.frames = Frames(seed)
        self.random = self.frames.random
        self.clock = ManualClock()
        self.num_frames = 0
        self.num_handled = 0
        self.num_answered = 0
        self.num_connections = 0
        self.is_stranger = False
        self.violations: list[str] = []
        self.max_buffered_bytes = 0

    def new_server(self, secret: Secret | None) -> Server:
        server = Server(Identity("scheduler", "p0"), secret=secret, limits=LIMITS, clock=self.clock)
        server.loop = asyncio.get_running_loop()

        def check(request: Message) -> Message:
            # Recorded, not raised: what a handler raises is answered, and the server goes on.
            is_proper = (
                type(request) is Message
                and type(request.inner) is Inner
                and all(type(number) is int for number in request.inner.ids)
                and 0 <= request.level <= 1000
                and len(request.name) <= 64
            )
            if self.is_stranger or not is_proper:
                self.violations.append(f"stranger: {self.is_stranger}, request: {request!r:.200}")
            self.num_handled += 1
            return request

        async def late(request: Message, context: Any) -> Message:
            await asyncio.sleep(0)
            return check(request)

        async def raw(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self.is_stranger:
                self.violations.append("a stranger's bytes reached a raw callback")
            writer.write(await reader.readexactly(16))

        server.register(FUZZ, lambda request, context: check(request))
        server.register(LATE, late)
        server.register_method("RAWX", raw)
        server.on_channel("fuzz", lambda peer, channel: channel.on("LDON", lambda items: None))
        return server

    def accept(self, server: Server) -> Wire:
        wire = Wire()
        session = Session(server)
        wire.protocol = session.make_protocol()
        wire.protocol.connection_made(wire)
        self.num_connections += 1
        return wire

    def feed(self, wire: Wire, data: bytes) -> None:
        for piece in self.frames.pieces(data):
            if wire.tell_end():
                return
            wire.protocol.data_received(piece)
            decoder = getattr(wire.protocol, "decoder", None)
            if decoder is not None:
                self.max_buffered_bytes = max(self.max_buffered_bytes, decoder.buffered_bytes)
        wire.tell_end()

    async def end(self, wire: Wire) -> None:
        wire.close()
        wire.tell_end()
        await asyncio.sleep(0)

    async def stranger(self, server: Server) -> None:
        """Anything at all, perhaps after a good HELLO; but the secret is not known."""
        self.is_stranger = True
        wire = self.accept(server)
        if self.random.random() < 0.5:
            self.feed(wire, ClientHandshake(Identity("worker", "w"), None).first())
        for _ in range(self.random.randint(1, 8)):
            if wire.is_ended:
                break
            self.feed(wire, self.frames.next())
            self.num_frames += 1
        await self.end(wire)
        self.is_stranger = False

    async def peer(self, server: Server) -> None:
        """A proper handshake, and then improper frames."""
        wire = self.accept(server)
        client = ClientHandshake(Identity("worker", "w", bytes(16)), SECRET)
        self.feed(wire, client.first())
        proof = client.receive(*split(wire.take()))
        assert proof is not None
        self.feed(wire, proof)
        for _ in range(self.random.randint(1, 60)):
            if wire.is_ended:
                break
            head = self.random.choice([None, b"FUZZ", b"FUZZ", b"LATE"])
            self.feed(wire, self.frames.next(head))
            self.num_frames += 1
            wire.written.clear()
            if self.random.random() < 0.2:
                await asyncio.sleep(0)
        for _ in range(4):
            await asyncio.sleep(0)
        await self.end(wire)

    async def server_of(self, client: Client) -> None:
        """A client calls; what answers is random."""
        fuzzer = self
        wire = Wire()

        async def open_fake(connection: ClientConnection) -> None:
            future = connection._future = connection._loop.create_future()
            wire.protocol = connection._protocol()
            wire.protocol.connection_made(wire)
            good = [1, "scheduler", "p0", bytes(16), bytes(32), False, b"", {}]
            if fuzzer.random.random() < 0.9:
                fuzzer.feed(
                    wire, encode_frame(int.from_bytes(b"OKAY", "little"), msgpack.packb(good))
                )
            else:
                fuzzer.feed(wire, fuzzer.frames.next(b"OKAY"))
                fuzzer.num_frames += 1
            if not future.done():
                wire.close()
                wire.tell_end()
            await future
            connection._future = None

        original = ClientConnection._open
        ClientConnection._open = open_fake  # type: ignore[method-assign]
        address = Address(host="127.0.0.1", port=1 + self.num_connections % 60_000)
        self.num_connections += 1
        try:
            for _ in range(self.random.randint(1, 30)):
                call = asyncio.ensure_future(
                    client.call(
                        address,
                        FUZZ,
                        Message("n", 1, Inner([1])),
                        deadline=Deadline.after(5.0, self.clock),
                    )
                )
                for _ in range(4):
                    await asyncio.sleep(0)
                if not call.done():
                    self.feed(wire, self.frames.next(self.random.choice([b"OKAY", b"FAIL", None])))
                    self.num_frames += 1
                if not wire.is_ended and not call.done():
                    await asyncio.sleep(0)
                    if not call.done():  # half a frame: it never completes
                        self.clock.advance(6.0)
                        wire.tell_end()
                try:
                    answer = await asyncio.wait_for(call, 20)
                    assert type(answer) is Message
                    self.num_answered += 1
                except RpcError:
                    pass
                if wire.is_ended:
                    break
        finally:
            ClientConnection._open = original  # type: ignore[method-assign]
        await self.end(wire)

    async def run(self, num_frames: int, report: Any = None) -> None:
        open_server, client = (
            self.new_server(SECRET),
            Client(Identity("scheduler", "d0"), clock=self.clock, limits=LIMITS),
        )
        await self._some(open_server, client, min(2000, num_frames))  # caches and pools fill up
        before = rss_bytes()
        while self.num_frames < num_frames:
            await self._some(open_server, client, min(num_frames, self.num_frames + 50_000))
            assert not self.violations, self.violations[:3]
            growth = rss_bytes() - before
            assert growth < MAX_GROWTH_BYTES, f"{growth} bytes more after {self.num_frames} frames"
            if report is not None:
                report(self, growth)
        await client.close()
        await open_server.close()
        stats = open_server.stats()
        assert (stats.num_connections, stats.num_calls, stats.num_handshaking) == (0, 0, 0)
        bound = LIMITS.max_body_bytes + LIMITS.read_ahead_bytes
        assert self.max_buffered_bytes <= bound, self.max_buffered_bytes
        assert self.num_handled > num_frames / 50, "the valid frames must get through"
        assert self.num_answered > num_frames / 50, "the valid answers must get through"

    async def _some(self, server: Server, client: Client, until: int) -> None:
        while self.num_frames < until:
            await self.stranger(server)
            await self.peer(server)
            await self.server_of(client)


def split(frame: bytes) -> tuple[int, bytes]:
    return int.from_bytes(frame[:4], "little"), frame[8:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Random frames against the real server and client."
    )
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    start_s = time.monotonic()

    def report(fuzzer: Fuzzer, growth: int) -> None:
        print(
            f"{fuzzer.num_frames:>9,} frames  {fuzzer.num_connections:>8,} connections  "
            f"{fuzzer.num_handled:>8,} handled  {fuzzer.num_answered:>7,} answered  "
            f"{growth / 1e6:+6.1f} MB  {time.monotonic() - start_s:5.0f} s",
            flush=True,
        )

    fuzzer = Fuzzer(options.seed)
    asyncio.run(fuzzer.run(options.frames, report))
    print(f"done, seed {options.seed}: at most {fuzzer.max_buffered_bytes:,} bytes buffered")


if __name__ == "__main__":
    sys.exit(main())
