"""The raw layer: a head, then whatever the callback reads; and sockets that are handed over."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import msgpack
import pytest

from simple_rpc import Code, ConnectionLostError, Method, RemoteError, RpcError
from simple_rpc._frames import encode_frame
from simple_rpc.handoff import GO_EMPTY, DetachedSocket
from tests.rpc_kit import ECHO, LOOPS, Text, rig, soon, until

CALL = encode_frame(ECHO.head, msgpack.packb([10_000, ["typed", 0, b""]]))


@pytest.fixture(params=sorted(LOOPS), scope="module")
def event_loop_policy(request):
    return LOOPS[request.param]()


async def reverse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    writer.write((await reader.readexactly(length))[::-1])


def with_reverse(r) -> None:
    r.server.register_method("REVS", reverse)


async def raw(r):
    return (await r.client.connect(r.address, soon())).streams()


async def test_a_raw_method():
    async with rig(setup=with_reverse) as r:
        reader, writer = await raw(r)
        for text in (b"abc", b"", b"x" * 300_000):
            writer.write(b"REVS" + struct.pack("<I", len(text)) + text)
            assert await reader.readexactly(len(text)) == text[::-1]
        writer.close()


async def test_raw_and_typed_calls_alternate_on_one_connection_whatever_the_packets():
    """Everything in one write, byte by byte, and in odd pieces: the bytes find their way."""
    stream = b""
    expected = b""
    answer = encode_frame(int.from_bytes(b"OKAY", "little"), msgpack.packb(["typed", 0, b""]))
    for number in range(20):
        text = bytes([number]) * (number * 7)
        stream += b"REVS" + struct.pack("<I", len(text)) + text + CALL
        expected += text[::-1] + answer
    async with rig(setup=with_reverse) as r:
        for size in (len(stream), 1, 7, 100):
            reader, writer = await raw(r)

            async def send(size: int = size, writer: asyncio.StreamWriter = writer) -> None:
                for at in range(0, len(stream), size):
                    writer.write(stream[at : at + size])
                    if size < 100:
                        await asyncio.sleep(0)

            sending = asyncio.ensure_future(send())
            assert await asyncio.wait_for(reader.readexactly(len(expected)), 20) == expected
            await sending
            writer.close()
        assert r.server.stats().closed == {}


@pytest.mark.parametrize(
    "error", [KeyError("x"), RpcError(Code.GONE, "no"), asyncio.CancelledError()]
)
async def test_an_exception_in_a_raw_callback_ends_only_its_connection(error):
    async def fail(reader, writer):
        raise error

    async with rig(setup=lambda r: r.server.register_method("FAIX", fail)) as r:
        reader, writer = await raw(r)
        writer.write(b"FAIX" + CALL)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        assert r.requests == []
        assert (await r.call()).text == "x"


async def test_a_peer_that_leaves_in_the_middle_of_a_raw_call():
    ended = asyncio.Event()

    async def read_all(reader, writer):
        try:
            await reader.readexactly(1000)
        finally:
            ended.set()

    async with rig(setup=lambda r: r.server.register_method("READ", read_all)) as r:
        _, writer = await raw(r)
        writer.write(b"READonly this")
        writer.close()
        await asyncio.wait_for(ended.wait(), 20)
        await until(lambda: r.server.stats().num_connections == 0)


# Hand-over

DATA: Method[Text, None] = Method("DATA", Text, None)
Handed = list[DetachedSocket]


def hand_over(r, handed: Handed) -> None:
    def take(request, context):
        handed.append(context.detach())

    r.server.register(DATA, take)


def blocking(detached: socket.socket | DetachedSocket) -> socket.socket:
    """What native code would do with the descriptor; here in a thread."""
    fd = detached.detach() if isinstance(detached, socket.socket) else detached.take_fd()
    sock = socket.socket(fileno=fd)
    sock.settimeout(20)
    return sock


@pytest.mark.parametrize("listen", ["tcp", "unix"])
@pytest.mark.parametrize("is_coroutine", [False, True])
async def test_a_socket_changes_hands_on_both_sides_and_nothing_is_lost(
    listen, is_coroutine, tmp_path
):
    address = "tcp://127.0.0.1:0" if listen == "tcp" else f"unix://{tmp_path}/s"
    handed: Handed = []

    def take(request, context):
        assert context.peer.instance == "d0"
        handed.append(context.detach())

    async def take_later(request, context):
        await asyncio.sleep(0)
        take(request, context)

    def setup(r):
        r.server.register(DATA, take_later if is_coroutine else take)

    async with rig(listen=address, setup=setup) as r:
        connection = await r.client.connect(r.address, soon())
        request = asyncio.ensure_future(
            connection.request(DATA.head, ("hello", 0, b""), deadline=soon(), hold=True)
        )
        await until(lambda: bool(handed))
        await until(lambda: r.server.stats().num_connections == 0)  # the loop has let go of it
        assert not request.done()
        assert handed[0].peer.instance == "d0"
        acceptor = blocking(handed[0])
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, acceptor.sendall, GO_EMPTY)
        assert await request == []
        opener = blocking(connection.detach())
        assert not connection.is_open

        def converse() -> bytes:
            opener.sendall(b"ping" * 1000)
            got = acceptor.recv(4000, socket.MSG_WAITALL)
            acceptor.sendall(got[:8])
            return opener.recv(8, socket.MSG_WAITALL)

        assert await loop.run_in_executor(None, converse) == b"pingping"
        acceptor.close()
        opener.close()
        assert r.server.stats().num_calls == 0
        assert (await r.call()).text == "x"


async def test_a_hand_over_is_refused_while_bytes_are_buffered():
    handed: Handed = []
    async with rig(setup=lambda r: hand_over(r, handed)) as r:
        reader, writer = await raw(r)
        writer.write(encode_frame(DATA.head, msgpack.packb([5000, ["x"]])) + b"too early")
        prefix = await reader.readexactly(8)
        body = msgpack.unpackb(await reader.readexactly(int.from_bytes(prefix[4:], "little")))
        assert prefix[:4] == b"FAIL"
        assert body[0] == Code.INTERNAL
        assert handed == []
        writer.close()


async def test_an_opener_whose_acceptor_spoke_too_soon_keeps_its_connection():
    handed: Handed = []
    async with rig(setup=lambda r: hand_over(r, handed)) as r:
        connection = await r.client.connect(r.address, soon())
        request = asyncio.ensure_future(
            connection.request(DATA.head, ("x",), deadline=soon(), hold=True)
        )
        await until(lambda: bool(handed))
        acceptor = blocking(handed[0])
        acceptor.sendall(GO_EMPTY + b"too early")
        await request
        await until(lambda: connection.connection.decoder.buffered_bytes > 0)
        with pytest.raises(ValueError, match="9 bytes were read ahead"):
            connection.detach()
        assert connection.is_open
        connection.close()
        acceptor.close()


async def test_a_handler_may_refuse_instead_and_detaches_at_most_once():
    handed: Handed = []

    def take_twice(request, context):
        if request.text == "no":
            raise RpcError(Code.NOT_FOUND, "nothing for you")
        handed.append(context.detach())
        context.detach()

    async with rig(setup=lambda r: r.server.register(DATA, take_twice)) as r:
        connection = await r.client.connect(r.address, soon())
        with pytest.raises(RemoteError, match="nothing for you"):
            await connection.request(DATA.head, ("no",), deadline=soon())
        assert await connection.request(ECHO.head, ("still",), deadline=soon()) == ["still", 0, b""]
        request = asyncio.ensure_future(connection.request(DATA.head, ("x",), deadline=soon()))
        await until(lambda: bool(handed))
        await until(lambda: r.server.stats().num_calls == 0)
        handed[0].close()  # the other end dies before GO
        with pytest.raises(ConnectionLostError):
            await request


async def test_detaching_outside_of_a_call_is_refused():
    contexts = []

    def keep(request, context):
        contexts.append(context)

    async with rig(setup=lambda r: r.server.register(DATA, keep)) as r:
        await r.client.call(r.address, DATA, Text(), deadline=soon())
        with pytest.raises(ValueError, match="during its call"):
            contexts[0].detach()


async def test_a_dropped_hand_over_closes_its_socket():
    handed: Handed = []
    async with rig(setup=lambda r: hand_over(r, handed)) as r:
        connection = await r.client.connect(r.address, soon())
        request = asyncio.ensure_future(connection.request(DATA.head, ("x",), deadline=soon()))
        await until(lambda: bool(handed))
        handed.clear()
        with pytest.raises(ConnectionLostError):
            await request
