"""What a stranger or a hostile peer may try against a real server: answered, counted, and cheap."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgpack
import pytest

from simple_rpc import Address, Code, Identity, Limits, Method, Server

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
