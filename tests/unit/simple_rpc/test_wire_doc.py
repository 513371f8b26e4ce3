"""docs/wire.md: its hex is what this package puts on the wire, and its text is enough for a stranger.

``python -m tests.unit.simple_rpc.test_wire_doc`` prints the frames in the page's form.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import pathlib
import re
import socket
import struct
import threading
from dataclasses import dataclass

import msgpack
import pytest

from simple_rpc import Client, Code, Deadline, Identity, Method, RpcError, Secret, Server
from simple_rpc import hello as hello_module
from simple_rpc._codec import new_pack
from simple_rpc._frames import FAIL, OKAY, RESERVED_HEADS, encode_frame, head_name
from simple_rpc._limits import Limits
from simple_rpc.hello import ClientHandshake, ServerHandshake
from simple_rpc.methods import pack_fail
from simple_rpc.news import NewsSender

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "wire.md"
SECRET = b"0123456789abcdef0123456789abcdef"
D = Identity("scheduler", "d0", bytes(range(0x10, 0x20)), {"rank": 0})
P = Identity("scheduler", "p0", bytes(range(0x20, 0x30)))
CLIENT_NONCE = bytes(range(0x40, 0x60))
SERVER_NONCE = bytes(range(0x60, 0x80))
OPENERS_STREAM = bytes(range(0x80, 0x90))
ACCEPTORS_STREAM = bytes(range(0x90, 0xA0))
KEY = bytes(range(0xA0, 0xB0))


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    request_id: str
    block_ids: list[int]
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    code: int
    detail: str = ""


PREFILL = Method("PREF", PrefillRequest, Accepted)


def frames() -> dict[str, bytes]:
    """Every frame of the page, made by the code that makes the real ones."""
    made: dict[str, bytes] = {}
    nonces = itertools.cycle([CLIENT_NONCE, SERVER_NONCE])
    original = hello_module.new_nonce
    hello_module.new_nonce = lambda: next(nonces)
    try:
        for suffix, secret in (("", None), (" with a secret", Secret(SECRET))):
            client, server = ClientHandshake(D, secret), ServerHandshake(P, secret)
            hello = client.first()
            answer = server.receive(int.from_bytes(hello[:4], "little"), hello[8:])
            made["HELO"] = hello
            made["OKAY to HELO" + suffix] = answer
            auth = client.receive(OKAY, answer[8:])
            if auth is not None:
                made["AUTH"] = auth
                made["OKAY to AUTH"] = server.receive(int.from_bytes(auth[:4], "little"), auth[8:])
    finally:
        hello_module.new_nonce = original
    pack = new_pack()
    request = PrefillRequest("req-1", [7, 8, 300], 48)
    made["PREF"] = encode_frame(PREFILL.head, PREFILL.pack_request(pack, 2500, request))
    made["OKAY to PREF"] = encode_frame(OKAY, PREFILL.pack_response(pack, Accepted(1)))
    error = RpcError(Code.NOT_FOUND, "no such request", {"attempt": 2})
    made["FAIL"] = encode_frame(FAIL, pack_fail(pack, error))
    heads = {head_name(head): head for head in RESERVED_HEADS}
    link = ["worker", OPENERS_STREAM, 1, 1000, {}]
    made["LINK"] = encode_frame(heads["LINK"], pack([3000, link]))
    made["OKAY to LINK"] = encode_frame(OKAY, pack([ACCEPTORS_STREAM, 1, {"fresh": True}]))
    sender = NewsSender()
    sender.publish("LDON", [0, KEY, 1, 4096, 0, ""])
    sender.publish("LDON", [0, KEY, 2, 4096, 0, ""])
    sender.publish("SDON", [0, KEY, 1, 0, 5, "aborted"])
    sender.attach(P.incarnation, 1, is_fresh=True)
    made["NEWS"] = encode_frame(heads["NEWS"], sender.next_frame() or b"")
    made["ACKN"] = encode_frame(heads["ACKN"], pack([4]))
    made["BEAT"] = encode_frame(heads["BEAT"], b"\x90")
    return made


def as_page(data: bytes) -> str:
    return "\n".join(data[at : at + 16].hex(" ") for at in range(0, len(data), 16))


def on_page() -> dict[str, bytes]:
    blocks = re.findall(r"```hex title=\"([^\"]+)\"\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return {title: bytes.fromhex(text) for title, text in blocks}


def test_the_page_shows_exactly_the_frames_that_are_sent():
    made, shown = frames(), on_page()
    assert set(shown) == set(made)
    for title, data in made.items():
        assert shown[title] == data, f"{title} should be\n{as_page(data)}"


def test_the_page_names_every_head_code_and_limit_of_the_wire():
    text = PAGE.read_text()
    for head in RESERVED_HEADS:
        assert f"`{head_name(head)}`" in text
    for code in Code:
        assert re.search(rf"\| {int(code)} \| `{code.name}`", text), code
    limits = Limits()
    for number in (limits.max_body_bytes, limits.max_handshake_body_bytes):
        assert f"{number:,}" in text


# A client written from the page alone: plain sockets, struct, hmac, and a msgpack library.


class PageClient:
    def __init__(self, port: int, secret: bytes | None) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=20)
        fields = [1, 1, "scheduler", "stranger", os.urandom(16), os.urandom(32), {}]
        hello = self.frame(b"HELO", [0, fields])
        self.sock.sendall(hello)
        head, body = self.read()
        assert head == b"OKAY", msgpack.unpackb(body)
        answer = msgpack.unpackb(body)
        self.incarnation = answer[3]
        if answer[5]:
            assert secret is not None
            proof = answer[6]
            zeroed = body.replace(proof, bytes(32))
            transcript = hashlib.sha256(hello).digest() + hashlib.sha256(zeroed).digest()

            def prove(label: bytes) -> bytes:
                return hmac.new(secret, label + transcript, "sha256").digest()

            assert hmac.compare_digest(proof, prove(b"pd-control server v1"))
            self.sock.sendall(self.frame(b"AUTH", [0, [prove(b"pd-control client v1")]]))
            head, body = self.read()
            assert head == b"OKAY", msgpack.unpackb(body)

    @staticmethod
    def frame(head: bytes, value: object) -> bytes:
        body = msgpack.packb(value)
        return head + struct.pack("<I", len(body)) + body

    def read(self) -> tuple[bytes, bytes]:
        head, length = struct.unpack("<4sI", self.sock.recv(8, socket.MSG_WAITALL))
        return head, self.sock.recv(length, socket.MSG_WAITALL) if length else b""

    def call(self, head: bytes, timeout_ms: int, fields: list[object]) -> tuple[bytes, object]:
        self.sock.sendall(self.frame(head, [timeout_ms, fields]))
        head, body = self.read()
        return head, msgpack.unpackb(body)


class PageServer(threading.Thread):
    """The other end, from the page alone: one connection, one call."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.secret = secret
        self.seen: list[object] = []

    def run(self) -> None:
        sock, _ = self.listener.accept()
        sock.settimeout(20)

        def read() -> tuple[bytes, bytes]:
            prefix = sock.recv(8, socket.MSG_WAITALL)
            return prefix, sock.recv(struct.unpack("<4sI", prefix)[1], socket.MSG_WAITALL)

        prefix, body = read()
        fields = [1, "scheduler", "foreign", bytes(16), os.urandom(32), True, bytes(32), {}]
        zeroed = msgpack.packb(fields)
        transcript = hashlib.sha256(prefix + body).digest() + hashlib.sha256(zeroed).digest()

        def prove(label: bytes) -> bytes:
            return hmac.new(self.secret, label + transcript, "sha256").digest()

        fields[6] = prove(b"pd-control server v1")
        sock.sendall(PageClient.frame(b"OKAY", fields))
        prefix, body = read()
        assert prefix[:4] == b"AUTH"
        assert msgpack.unpackb(body)[1] == [prove(b"pd-control client v1")]
        sock.sendall(PageClient.frame(b"OKAY", []))
        prefix, body = read()
        self.seen += [prefix[:4], msgpack.unpackb(body)[1]]
        sock.sendall(PageClient.frame(b"OKAY", [1, "from another implementation", "and more"]))
        sock.recv(1)
        sock.close()
        self.listener.close()


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_a_client_written_from_the_page_alone_can_call(secret):
    import asyncio

    server = Server(P, secret=None if secret is None else Secret(secret))

    def prefill(request: PrefillRequest, context: object) -> Accepted:
        if not request.block_ids:
            raise RpcError(Code.BAD_REQUEST, "no blocks")
        return Accepted(1, request.request_id)

    server.register(PREFILL, prefill)
    address = await server.listen("tcp://127.0.0.1:0")

    def converse() -> None:
        client = PageClient(address.port, secret)
        assert client.incarnation == P.incarnation
        assert client.call(b"PREF", 2500, ["r", [1, 2], 16]) == (b"OKAY", [1, "r"])
        assert client.call(b"PREF", 2500, ["r", [1], 1, "newer"]) == (b"OKAY", [1, "r"])
        assert client.call(b"PREF", 2500, ["r", []]) == (b"FAIL", [12, "no blocks", {}])
        head, answer = client.call(b"PREF", 2500, [5, []])
        assert (head, answer[0]) == (b"FAIL", 12)  # type: ignore[index]
        client.sock.close()

    await asyncio.get_running_loop().run_in_executor(None, converse)
    await server.close()


async def test_a_server_written_from_the_page_alone_can_be_called():
    server = PageServer(SECRET)
    server.start()
    client = Client(D, secret=Secret(SECRET))
    answer = await client.call(
        f"tcp://127.0.0.1:{server.port}",
        PREFILL,
        PrefillRequest("r", [1]),
        deadline=Deadline.after(20),
    )
    assert answer == Accepted(1, "from another implementation")
    assert server.seen == [b"PREF", ["r", [1], 0]]
    await client.close()
    server.join(20)


if __name__ == "__main__":
    for title, data in frames().items():
        print(f'```hex title="{title}"\n{as_page(data)}\n```\n')
