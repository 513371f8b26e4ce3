"""What a stranger or a hostile peer may try against a real server: answered, counted, and cheap."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgpack
import pytest

from simple_rpc import (
    Address,
    Client,
    Code,
    Deadline,
    Identity,
    IncarnationError,
    Limits,
    Method,
    PeerProtocolError,
    RpcError,
    Secret,
    Server,
)
from simple_rpc.testing import ScriptedConnection, ScriptedPeer

GUARD_S = 30.0


@dataclass(frozen=True)
class Text:
    number: int
    text: str = ""


ECHO = Method("ECHO", Text, Text)


def frame(head: str, body: bytes) -> bytes:
    return head.encode() + struct.pack("<I", len(body)) + body


class Target:
    """A server, and what the loop's exception handler was told: nothing, ever."""

    def __init__(self) -> None:
        self.errors: list[dict] = []
        self.address: Address
        self.server = Server(Identity("scheduler", "s0"), limits=Limits(max_handshaking=50))
        self.server.register(ECHO, lambda request, context: request)
        self.server.on_channel("link", lambda peer, channel: None)

    async def connect(self):
        return await asyncio.open_connection(self.address.host, self.address.port)

    async def authenticated(self):
        reader, writer = await self.connect()
        fields = [1, 1, "r", "i", os.urandom(16), os.urandom(32), {}]
        writer.write(frame("HELO", msgpack.packb([0, fields])))
        assert (await read_frame(reader))[0] == "OKAY"
        return reader, writer

    async def answer(self, stream, data: bytes):
        reader, writer = stream
        writer.write(data)
        answer = await asyncio.wait_for(read_frame(reader), GUARD_S)
        writer.close()
        return answer


async def read_frame(reader):
    head, length = struct.unpack("<4sI", await reader.readexactly(8))
    return head.decode(), msgpack.unpackb(await reader.readexactly(length))


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    target = Target()
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: target.errors.append(context)
    )
    target.address = await target.server.listen("tcp://127.0.0.1:0")
    yield target
    await target.server.close()
    assert not target.errors, "an exception got as far as the event loop"


# As deep as msgpack lets a value be, which is deeper than Python's repr can follow.
DEEP = b"\x91" * 1010 + b"\xc0"


async def test_a_strangers_deep_value_is_answered_and_counted(target):
    hello = b"\x92\x00\x97\x01\x01" + DEEP + b"\xa1i" + msgpack.packb(b"x" * 16)
    hello += msgpack.packb(b"n" * 32) + b"\x80"
    head, (code, message, _) = await target.answer(await target.connect(), frame("HELO", hello))
    assert (head, code) == ("FAIL", Code.BAD_REQUEST)
    assert "role: expected str" in message
    assert sum(target.server.stats().closed.values()) == 1


@pytest.mark.parametrize(
    ("head", "body", "where"),
    [
        ("ECHO", b"\x92" + DEEP + b"\x90", "timeout_ms"),
        ("ECHO", b"\x92\xcd\x10\x00\x91" + DEEP, "number"),
        ("LINK", b"\x92\x00\x94\xa4link" + DEEP + b"\x01\x00", "stream_id"),
        ("LINK", b"\x92\x00\x91" + DEEP, "kind"),
        ("LINK", b"\x92\x00" + DEEP, "LINK"),
    ],
)
async def test_a_deep_value_in_a_call_is_answered(target, head, body, where):
    answer, (code, message, _) = await target.answer(
        await target.authenticated(), frame(head, body)
    )
    assert (answer, code) == ("FAIL", Code.BAD_REQUEST)
    assert where in message


async def test_a_wide_value_of_the_wrong_type_is_answered_without_being_printed(target):
    row = b"\xdd" + struct.pack(">I", 40_000) + b"\x90" * 40_000
    wide = b"\x92\xcd\x10\x00\x91\xdd" + struct.pack(">I", 100) + row * 100
    answer, (code, message, _) = await target.answer(
        await target.authenticated(), frame("ECHO", wide)
    )
    assert (answer, code) == ("FAIL", Code.BAD_REQUEST)
    assert len(message) < 200


# -- hostile servers ---------------------------------------------------------------------------------


def hello_answer(**changes: object) -> list[object]:
    """A lawful answer to HELLO, with fields replaced by index: `_5=True`."""
    fields: list[object] = [1, "scheduler", "s0", b"i" * 16, b"n" * 32, False, b"", {}]
    for name, value in changes.items():
        fields[int(name[1:])] = value
    return fields


async def call(script, num: int = 1, secret: Secret | None = None) -> list[object]:
    """What `num` calls to a scripted server give: responses, or the errors raised."""
    client = Client(Identity("client", "c0"), secret=secret)
    results: list[object] = []
    async with ScriptedPeer(script) as peer:
        for i in range(num):
            try:
                result = await client.call(
                    peer.address, ECHO, Text(i), deadline=Deadline.after(GUARD_S)
                )
            except RpcError as error:
                results.append(error)
            else:
                results.append(result)
    await client.close()
    return results


@pytest.mark.parametrize(
    "data",
    [
        b"FAIL\x03\x00\x00\x00\xc1\xc1\xc1",
        frame("FAIL", b"\x93" + DEEP + b"\xa1x\x80"),
        frame("OKAY", b"\x98\x01" + DEEP + b"\x00" * 6),
        frame("OKAY", msgpack.packb(hello_answer(_3=b"short"))),
        frame("OKAY", msgpack.packb(hello_answer(_4=b""))),
        frame("OKAY", msgpack.packb(hello_answer())) + frame("OKAY", msgpack.packb([66])),
        b"OKAY\xff\xff\xff\x7f",
        b"ECHO\x00\x00\x00\x00",
    ],
)
async def test_a_broken_answer_to_hello_is_the_servers_fault(data):
    async def script(peer: ScriptedConnection) -> None:
        await peer.expect("HELO")
        peer.send_bytes(data)
        await peer.expect_end()

    (error,) = await call(script)
    assert isinstance(error, PeerProtocolError), error
    assert error.phase is not None


@pytest.mark.parametrize(
    "data",
    [
        b"OKAY" + struct.pack("<I", 2**31),
        frame("OKAY", b"\x91" + DEEP),
        frame("FAIL", b"\x91" + DEEP),
        frame("FAIL", msgpack.packb([7])),
        frame("OKAY", msgpack.packb([])),
        frame("OKAY", msgpack.packb(["x", "y"])),
        frame("PREF", b"\x90"),
    ],
)
async def test_a_broken_answer_to_a_call_is_the_servers_fault(data):
    async def script(peer: ScriptedConnection) -> None:
        await peer.expect("HELO")
        peer.send("OKAY", hello_answer())
        await peer.expect("ECHO")
        peer.send_bytes(data)
        await peer.read_frame()

    (error,) = await call(script)
    assert isinstance(error, PeerProtocolError), error


@pytest.mark.parametrize(
    "changes",
    [{}, {"_5": True}, {"_5": True, "_6": b"short"}, {"_5": True, "_6": bytes(32)}],
)
async def test_a_server_without_the_secret_gets_no_proof(changes):
    received: list[str] = []

    async def script(peer: ScriptedConnection) -> None:
        await peer.expect("HELO")
        peer.send("OKAY", hello_answer(**changes))
        head, _ = await peer.read_frame()
        received.append(head)

    (error,) = await call(script, secret=Secret(b"s" * 32))
    assert isinstance(error, RpcError)
    assert error.code is Code.UNAUTHORIZED
    assert not received, "the client answered the challenge of a stranger"


async def test_no_retry_to_another_incarnation():
    """A pooled connection turns out stale; whoever answers at the address now is somebody else."""
    executed: list[int] = []
    method = Method("ECHO", Text, Text, idempotent=True)

    async def script(peer: ScriptedConnection) -> None:
        is_first = not executed
        await peer.expect("HELO")
        peer.send("OKAY", hello_answer(_3=(b"a" if is_first else b"b") * 16))
        _, fields = await peer.expect("ECHO")
        executed.append(fields[0])
        peer.send("OKAY", fields)
        if is_first:
            await peer.expect("ECHO")  # and dies before any byte of an answer

    client = Client(Identity("client", "c0"))
    async with ScriptedPeer(script) as peer:
        await client.call(peer.address, method, Text(1), deadline=Deadline.after(GUARD_S))
        with pytest.raises(IncarnationError):
            await client.call(peer.address, method, Text(2), deadline=Deadline.after(GUARD_S))
    assert executed == [1]
    await client.close()
