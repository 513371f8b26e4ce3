"""Every limit on an authenticated peer: its connection ends with a reason, counted; the server does not."""

from __future__ import annotations

import asyncio
import contextlib

import msgpack
import pytest

from simple_rpc import Code, Deadline, Limits, Method, PeerProtocolError, RemoteError
from simple_rpc._frames import encode_frame
from simple_rpc.testing import ManualClock, ScriptedPeer
from tests.rpc_kit import ECHO, WAIT, Client, Identity, Text, pool_of, rig, rss_bytes, soon, until

CALL = encode_frame(ECHO.head, msgpack.packb([10_000, ["x", 0, b""]]))


async def raw(r) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection after HELLO, as plain streams."""
    return (await r.client.connect(r.address, soon())).streams()


async def read_frame(reader: asyncio.StreamReader) -> tuple[str, list]:
    prefix = await asyncio.wait_for(reader.readexactly(8), 20)
    body = await reader.readexactly(int.from_bytes(prefix[4:], "little"))
    return prefix[:4].decode(), msgpack.unpackb(body)


async def ended(r, reason: str) -> None:
    await until(lambda: r.server.stats().num_connections == 0)
    assert r.server.stats().closed == {reason: 1}
    assert (await r.call("still alive")).text == "still alive"


async def test_a_body_above_the_limit():
    async with rig(server={"limits": Limits(max_body_bytes=1000)}) as r:
        reader, writer = await raw(r)
        writer.write(b"ECHO" + (1001).to_bytes(4, "little") + b"only a few of them")
        head, fields = await read_frame(reader)
        assert (head, fields[0]) == ("FAIL", Code.CORRUPT)
        assert fields[1] == "ECHO: body of 1001 bytes, at most 1000 allowed"
        assert await reader.read() == b""
        writer.close()
        await ended(r, "body_too_large")
        assert r.requests == ["still alive"]


async def test_a_whole_frame_above_the_limit():
    """It comes in one piece: no part of the decoder's buffer is ever used."""
    async with rig(server={"limits": Limits(max_body_bytes=len(CALL) - 9)}) as r:
        reader, writer = await raw(r)
        writer.write(CALL)
        head, fields = await read_frame(reader)
        assert (head, fields[0]) == ("FAIL", Code.CORRUPT)
        writer.close()
        await until(lambda: r.server.stats().num_connections == 0)
        assert r.server.stats().closed == {"body_too_large": 1}
        assert r.requests == []


async def test_a_body_at_the_limit_is_served():
    async with rig(server={"limits": Limits(max_body_bytes=len(CALL) - 8)}) as r:
        assert (await r.call()).text == "x"


async def test_a_frame_that_never_completes():
    clock = ManualClock()
    async with rig(server={"clock": clock}) as r:
        reader, writer = await raw(r)
        for index in range(len(CALL) - 1):  # a slow-loris: each byte in time, all of them too slow
            writer.write(CALL[index : index + 1])
            await asyncio.sleep(0.001)
            clock.advance(9.0 / len(CALL))
        assert r.server.stats().num_connections == 1
        clock.advance(1.5)
        head, fields = await read_frame(reader)
        assert (head, fields[1]) == ("FAIL", "frame not complete within 10.0 s")
        writer.close()
        await ended(r, "frame_too_slow")
        assert r.requests == ["still alive"]


async def test_slow_but_complete_frames_are_served():
    clock = ManualClock()
    async with rig(server={"clock": clock}) as r:
        reader, writer = await raw(r)
        for _ in range(3):
            for index in range(len(CALL)):
                writer.write(CALL[index : index + 1])
                await asyncio.sleep(0.001)
                clock.advance(9.0 / len(CALL))
            assert await read_frame(reader) == ("OKAY", ["x", 0, b""])
        writer.close()


async def test_idle_connections_are_closed_and_busy_ones_are_not():
    clock = ManualClock()
    async with rig(server={"clock": clock, "limits": Limits(idle_s=60.0)}) as r:
        reader, writer = await raw(r)
        for _ in range(5):
            clock.advance(50.0)
            writer.write(CALL)
            assert (await read_frame(reader))[0] == "OKAY"
        writer.write(encode_frame(WAIT.head, msgpack.packb([500_000, ["long", 0, b""]])))
        await r.started.get()
        clock.advance(200.0)  # far beyond idle, but in a call
        r.gate.set()
        assert (await read_frame(reader))[0] == "OKAY"
        clock.advance(59.0)
        assert r.server.stats().num_connections == 1
        clock.advance(1.0)
        assert await reader.read() == b""
        writer.close()
        assert r.server.metrics.snapshot().counters["server.closed.idle"] == 1  # type: ignore[attr-defined]


async def test_a_client_gives_up_its_idle_connections_before_the_server_does():
    clock = ManualClock()
    async with rig(client={"clock": clock}) as r:
        await r.call(deadline=Deadline.after(5.0, clock))
        clock.advance(299.0)
        assert r.server.stats().num_connections == 1
        clock.advance(1.0)
        await until(lambda: r.server.stats().num_connections == 0)
        assert pool_of(r.client, r.address)["idle"] == 0
        assert (await r.call(deadline=Deadline.after(5.0, clock))).text == "x"


async def test_a_peer_that_reads_no_answers_gets_no_more_calls_served():
    """And is cut after the time limit; what it can make us keep is bounded meanwhile."""
    clock = ManualClock()
    async with rig(server={"clock": clock}) as r:
        _reader, writer = await raw(r)
        writer.transport.pause_reading()
        big = encode_frame(ECHO.head, msgpack.packb([10_000, ["x", 0, bytes(1_000_000)]]))
        for _ in range(40):
            writer.write(big)
        await until(lambda: any(session.connection._write_paused for session in r.server._sessions))
        before = rss_bytes()
        for _ in range(100):
            await asyncio.sleep(0.001)
        num_served = len(r.requests)
        assert num_served < 12
        assert rss_bytes() - before < 20_000_000
        clock.advance(11.0)
        await until(lambda: r.server.stats().num_connections == 0)
        assert r.server.stats().closed == {"peer_not_reading": 1}
        assert len(r.requests) == num_served
        writer.transport.abort()
        assert (await r.call("still alive")).text == "still alive"


async def test_small_requests_with_large_answers_are_not_served_ahead_of_their_reader():
    """All requests come in one packet; an answer is only made when the last one has been taken."""
    large: Method[Text, Text] = Method("LARG", Text, Text)
    served = []

    def answer(request, context):
        served.append(request.number)
        return Text(data=bytes(1_000_000))

    async with rig(setup=lambda r: r.server.register(large, answer)) as r:
        reader, writer = await raw(r)
        writer.transport.pause_reading()
        one = encode_frame(large.head, msgpack.packb([10_000, ["x", 0, b""]]))
        writer.write(one * 50)
        await until(lambda: any(session.connection._write_paused for session in r.server._sessions))
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert len(served) < 12
        writer.transport.resume_reading()
        for _ in range(50):
            assert len((await read_frame(reader))[1][2]) == 1_000_000
        assert len(served) == 50
        writer.close()


async def test_pipelined_calls_are_answered_in_order_and_reading_stops_at_the_bound():
    limits = Limits(read_ahead_bytes=10_000)
    async with rig(server={"limits": limits}) as r:
        reader, writer = await raw(r)
        writer.write(encode_frame(WAIT.head, msgpack.packb([10_000, ["first", 0, b""]])))
        await r.started.get()
        for number in range(200):
            writer.write(
                encode_frame(ECHO.head, msgpack.packb([10_000, [str(number), 0, bytes(5000)]]))
            )
        (session,) = r.server._sessions
        await until(lambda: session.connection._reading_paused)
        assert (
            session.connection.decoder.buffered_bytes < 10_000 + 300_000
        )  # and one read of the socket
        assert r.requests == ["first"]
        r.gate.set()
        assert (await read_frame(reader))[1][0] == "first"
        for number in range(200):
            assert (await read_frame(reader))[1][0] == str(number)
        writer.close()


async def test_calls_in_flight_are_bounded_per_peer_and_answered_busy():
    async with rig(server={"limits": Limits(max_in_flight_per_peer=2)}) as r:
        calls = [asyncio.ensure_future(r.call(str(number), WAIT)) for number in range(2)]
        for _ in calls:
            await r.started.get()
        with pytest.raises(RemoteError, match="2 calls of this peer") as failure:
            await r.call("one too many")
        assert failure.value.code is Code.BUSY
        other = Client(Identity("scheduler", "d1"))
        answer = await other.call(r.address, ECHO, Text("of another peer"), deadline=soon())
        assert answer.text == "of another peer"
        await other.close()
        r.gate.set()
        await asyncio.gather(*calls)
        assert (await r.call()).text == "x"
        assert "one too many" not in r.requests


async def test_a_call_is_bounded_whatever_its_caller_says():
    clock = ManualClock()
    async with rig(server={"clock": clock, "limits": Limits(max_call_s=30.0)}) as r:
        task = asyncio.ensure_future(r.call("long", WAIT, deadline=Deadline.after(1e6)))
        await r.started.get()
        clock.advance(30.0)
        with pytest.raises(Exception, match="deadline passed in the handler"):
            await task
        assert r.cancelled == ["long"]


# The client has the same limits against its servers


HELLO_ANSWER = [1, "scheduler", "p0", bytes(16), bytes(32), False, b"", {}]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"OKAY\xff\xff\xff\xff", "body_too_large"),
        (b"JUNK\x00\x00\x00\x00", "unknown_head"),
        (encode_frame(WAIT.head, b"\x90"), "unknown_head"),
        (b"OKAY\x01\x00\x00\x00\xc1", "bad_answer"),
        (b"OKAY\x02\x00\x00\x00\x91\x05", "bad_answer"),
        (b"FAIL\x01\x00\x00\x00\x90", "bad_answer"),
        (b"FAIL\x02\x00\x00\x00\x91\x05", "bad_answer"),
    ],
)
async def test_an_answer_that_the_protocol_does_not_allow(answer, reason):
    async def broken(peer):
        await peer.expect("HELO")
        peer.send("OKAY", HELLO_ANSWER)
        await peer.expect("ECHO")
        peer.send_bytes(answer)
        await peer.reader.read()

    async with ScriptedPeer(broken) as peer:
        client = Client(Identity("scheduler", "d0"))
        with pytest.raises(PeerProtocolError) as failure:
            await client.call(peer.address, ECHO, Text(), deadline=soon())
        assert failure.value.code is Code.CORRUPT
        assert failure.value.details["reason"] == reason
        await client.close()


async def test_an_answer_that_nobody_asked_for_ends_the_pooled_connection():
    async def eager(peer):
        await peer.expect("HELO")
        peer.send("OKAY", HELLO_ANSWER)
        await peer.expect("ECHO")
        peer.send("OKAY", ["mine", 0, b""])
        peer.send("OKAY", ["of somebody else", 0, b""])
        await peer.reader.read()

    async with ScriptedPeer(eager) as peer:
        client = Client(Identity("scheduler", "d0"))
        for _ in range(5):
            answer = await client.call(peer.address, ECHO, Text(), deadline=soon())
            assert answer.text == "mine"
            await until(lambda: pool_of(client, peer.address)["idle"] == 0)
        assert peer.num_connections == 5
        await client.close()


@pytest.mark.parametrize("name", ["max_body_bytes", "idle_s", "max_connections", "handshake_s"])
def test_a_limit_of_nothing_is_a_mistake(name):
    with pytest.raises(ValueError, match=f"Limits.{name}: expected more than 0"):
        Limits(**{name: 0})


def test_a_limit_that_no_length_can_exceed_is_a_mistake():
    with pytest.raises(ValueError, match="u32"):
        Limits(max_body_bytes=2**33)


async def test_a_raw_method_has_a_bounded_time_too():
    clock = ManualClock()
    entered = asyncio.Event()

    async def hang(reader, writer):
        entered.set()
        await reader.readexactly(1000)

    async with rig(
        server={"clock": clock, "limits": Limits(max_call_s=30.0)},
        setup=lambda r: r.server.register_method("HANG", hang),
    ) as r:
        reader, writer = await raw(r)
        writer.write(b"HANG")
        await entered.wait()
        clock.advance(30.0)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: r.server.stats().num_connections == 0)
