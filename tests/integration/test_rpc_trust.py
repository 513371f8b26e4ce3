"""Who gets in: secrets, TLS, exposure. And that a stranger reaches nothing and costs next to nothing."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess

import msgpack
import pytest

from simple_rpc import (
    Address,
    AuthenticationError,
    Client,
    Code,
    Identity,
    IncompatibleError,
    Limits,
    Secret,
    Server,
    UnreachableError,
)
from simple_rpc._frames import encode_frame, head_from_name
from simple_rpc.testing import ManualClock, ScriptedPeer
from tests.rpc_kit import ECHO, LOOPS, Text, rig, rss_bytes, soon, until

ONE = Secret(b"the one shared secret")
TWO = Secret(b"quite another secret!")


@pytest.fixture(params=sorted(LOOPS), scope="module")
def event_loop_policy(request):
    return LOOPS[request.param]()


async def stranger(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(address.host, address.port)


async def read_fail(reader: asyncio.StreamReader) -> tuple[Code, str]:
    prefix = await asyncio.wait_for(reader.readexactly(8), 20)
    assert prefix[:4] == b"FAIL"
    code, message, _ = msgpack.unpackb(
        await reader.readexactly(int.from_bytes(prefix[4:], "little"))
    )
    return Code(code), message


async def read_end(reader: asyncio.StreamReader) -> bytes:
    """Everything until the end; a reset is an end too."""
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""


def hello(**changes) -> bytes:
    fields = {
        "min": 1, "max": 1, "role": "scheduler", "instance": "x", "incarnation": bytes(16),
        "nonce": bytes(32), "attributes": {},
    }  # fmt: skip
    fields.update(changes)
    return encode_frame(head_from_name("HELO"), msgpack.packb([0, list(fields.values())]))


async def test_the_same_secret_on_both_sides():
    async with rig(server={"secret": ONE}, client={"secret": ONE}) as r:
        assert (await r.call()).text == "x"


@pytest.mark.parametrize(("server", "client"), [(ONE, TWO), (ONE, None), (None, ONE)])
async def test_any_other_combination_is_unauthorized(server, client):
    async with rig(server={"secret": server}, client={"secret": client}) as r:
        with pytest.raises(AuthenticationError) as failure:
            await r.call()
        assert failure.value.code is Code.UNAUTHORIZED
        assert r.requests == []
        await until(lambda: r.server.stats().num_connections == 0)


async def test_a_client_without_the_secret_that_goes_on_regardless():
    """It skips AUTH, and then it guesses: no call of it reaches a handler."""
    async with rig(server={"secret": ONE}) as r:
        call = encode_frame(ECHO.head, msgpack.packb([1000, ["x", 0, b""]]))
        reader, writer = await stranger(r.address)
        writer.write(hello())
        answer = await reader.readexactly(8)
        await reader.readexactly(int.from_bytes(answer[4:], "little"))
        writer.write(call)
        assert (await read_fail(reader))[0] is Code.CORRUPT
        assert await read_end(reader) == b""
        writer.close()

        reader, writer = await stranger(r.address)
        writer.write(hello())
        answer = await reader.readexactly(8)
        await reader.readexactly(int.from_bytes(answer[4:], "little"))
        writer.write(encode_frame(head_from_name("AUTH"), msgpack.packb([0, [bytes(32)]])))
        assert (await read_fail(reader))[0] is Code.UNAUTHORIZED
        assert await read_end(reader) == b""
        writer.close()
        assert r.requests == []
        assert r.server.stats().closed == {"unknown_head": 1, "unauthorized": 1}


@pytest.mark.parametrize("secret", [None, ONE])
@pytest.mark.parametrize(
    ("first", "code", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", Code.CORRUPT, "unknown_head"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", Code.CORRUPT, "unknown_head"),
        (b"\x80\x04\x95\x10\x00\x00\x00cposix\nsystem", Code.CORRUPT, "unknown_head"),
        (encode_frame(ECHO.head, msgpack.packb([1, ["x"]])), Code.CORRUPT, "unknown_head"),
        (encode_frame(head_from_name("LINK"), b"\x90"), Code.CORRUPT, "unknown_head"),
        (encode_frame(head_from_name("AUTH"), b"\x90"), Code.CORRUPT, "unknown_head"),
        (b"HELO\xff\xff\xff\xff", Code.CORRUPT, "body_too_large"),
        (b"HELO\x01\x10\x00\x00", Code.CORRUPT, "body_too_large"),
        (encode_frame(head_from_name("HELO"), b"\xc1"), Code.BAD_REQUEST, "bad_request"),
        (encode_frame(head_from_name("HELO"), b"\xdd\xff\xff\xff\xff"), Code.BAD_REQUEST, "bad_request"),
        (encode_frame(head_from_name("HELO"), b"\x91" * 4000), Code.BAD_REQUEST, "bad_request"),
        (hello(min=7, max=9), Code.INCOMPATIBLE, "incompatible"),
        (hello(incarnation=b"short"), Code.BAD_REQUEST, "bad_request"),
        (hello() + b"x", Code.BAD_REQUEST, "pipelined"),
        (hello() + encode_frame(ECHO.head, msgpack.packb([9, ["x", 0, b""]])), Code.BAD_REQUEST, "pipelined"),
        (hello() + hello(), Code.BAD_REQUEST, "pipelined"),
    ],
)  # fmt: skip
async def test_forged_first_bytes_are_answered_counted_and_reach_nothing(
    first, code, reason, secret
):
    async with rig(server={"secret": secret}) as r:
        reader, writer = await stranger(r.address)
        writer.write(first)
        assert (await read_fail(reader))[0] is code
        assert await read_end(reader) == b""
        writer.close()
        await until(lambda: r.server.stats().num_connections == 0)
        assert r.server.stats().closed == {reason: 1}
        assert r.requests == []


async def test_a_stranger_lasts_at_most_the_handshake_deadline():
    clock = ManualClock()
    async with rig(server={"clock": clock, "secret": ONE}) as r:
        silent, silent_writer = await stranger(r.address)
        slow, slow_writer = await stranger(r.address)
        half, half_writer = await stranger(r.address)
        await until(lambda: r.server.stats().num_handshaking == 3)
        half_writer.write(hello())
        await half.readexactly(8)
        for byte in hello()[:40]:  # always a byte more, just in time
            slow_writer.write(bytes([byte]))
            await asyncio.sleep(0)
            clock.advance(3.0 / 41)
        assert r.server.stats().num_handshaking == 3
        clock.advance(3.0 / 40)
        for reader, writer in ((silent, silent_writer), (slow, slow_writer), (half, half_writer)):
            data = await read_end(reader)
            assert b"no handshake within 3.0 s" in data
            writer.close()
        await until(lambda: r.server.stats().num_connections == 0)
        assert r.server.stats().closed == {"handshake_too_slow": 3}


async def test_what_strangers_cost_is_bounded():
    """200 strangers, each pushing a megabyte where at most 4 KiB are allowed."""
    async with rig(server={"secret": ONE}) as r:
        before = rss_bytes()

        async def push(first: bytes) -> None:
            reader, writer = await stranger(r.address)
            writer.write(first + bytes(1_000_000))
            await read_end(reader)
            writer.close()

        for _ in range(4):
            await asyncio.gather(
                *[push(b"HELO\x00\x10\x00\x00") for _ in range(25)],
                *[push(hello()) for _ in range(25)],
            )
        await until(lambda: r.server.stats().num_connections == 0)
        assert r.requests == []
        assert sum(r.server.stats().closed.values()) == 200
        assert rss_bytes() - before < 64_000_000


async def test_a_flood_of_bad_connections_is_not_a_flood_of_log_lines(caplog):
    clock = ManualClock()
    async with rig(server={"clock": clock}) as r:
        with caplog.at_level(logging.WARNING):
            for _ in range(20):
                reader, writer = await stranger(r.address)
                writer.write(b"nonsense")
                await read_end(reader)
                writer.close()
        assert r.server.stats().closed == {"unknown_head": 20}
        assert caplog.text.count("unknown_head") == 1


async def test_too_many_handshakes_and_too_many_connections_are_refused():
    limits = Limits(max_handshaking=2, max_connections=4)
    async with rig(server={"limits": limits}) as r:
        strangers = [await stranger(r.address) for _ in range(2)]
        await until(lambda: r.server.stats().num_handshaking == 2)
        reader, writer = await stranger(r.address)
        code, message = await read_fail(reader)
        assert (code, "2 connections in the handshake" in message) == (Code.BUSY, True)
        writer.close()
        for _, writer in strangers:
            writer.close()
        await until(lambda: r.server.stats().num_connections == 0)

        kept = [await r.client.connect(r.address, soon()) for _ in range(4)]
        reader, writer = await stranger(r.address)
        code, message = await read_fail(reader)
        assert (code, "at most 4 connections" in message) == (Code.BUSY, True)
        writer.close()
        kept[0].close()
        await until(lambda: r.server.stats().num_connections == 3)
        assert (await r.call()).text == "x"
        assert r.server.stats().closed == {"too_many_handshakes": 1, "too_many_connections": 1}


async def test_versions_that_do_not_meet():
    async with rig(server={"versions": (2, 3)}, client={"versions": (1, 1)}) as r:
        with pytest.raises(IncompatibleError, match=r"1\.\.1 offered, 2\.\.3 spoken") as failure:
            await r.call()
        assert failure.value.code is Code.INCOMPATIBLE


async def test_a_server_that_pretends_is_not_believed():
    """It knows no secret, says so (or lies about its proof), and never sees a call."""
    seen = []

    async def pretend(peer):
        await peer.expect("HELO")
        peer.send("OKAY", [1, "scheduler", "p0", bytes(16), bytes(32), answers[0], answers[1], {}])
        seen.append(await peer.reader.read(100))

    answers: tuple[bool, bytes] = (False, b"")
    async with ScriptedPeer(pretend) as peer:
        client = Client(Identity("scheduler", "d0"), secret=ONE)
        for answers in ((False, b""), (True, bytes(32)), (True, b""), (True, b"x" * 31)):  # noqa: B007
            with pytest.raises(AuthenticationError):
                await client.call(peer.address, ECHO, Text("the request"), deadline=soon())
        await until(lambda: len(seen) == 4)
        assert set(seen) == {b""}
        await client.close()


# Exposure


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://[::]:0"])
async def test_binding_wider_than_loopback_takes_trust_or_a_word(address):
    identity = Identity("scheduler", "p0")
    with pytest.raises(ValueError, match="reachable from other machines"):
        await Server(identity).listen(address)
    if address.startswith("tcp://0"):
        for options in ({"secret": ONE}, {"insecure": True}):
            server = Server(identity, **options)
            assert (await server.listen(address)).port
            await server.close()


async def test_a_name_that_resolves_off_loopback_is_refused_too(monkeypatch):
    loop = asyncio.get_running_loop()

    async def lie(*args, **options):
        return [(2, 1, 6, "", ("0.0.0.0", 0))]

    if not hasattr(loop, "__dict__"):
        pytest.skip("uvloop's loop cannot be patched; the same code runs on both")
    monkeypatch.setattr(loop, "getaddrinfo", lie)
    with pytest.raises(ValueError, match=r"resolved to 0\.0\.0\.0, which is not loopback"):
        await Server(Identity("scheduler", "p0")).listen("tcp://localhost:0")


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    where = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1 "
        f"-keyout {where}/key.pem -out {where}/cert.pem"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return where


def tls(certificate) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    client = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    return server, client


@pytest.mark.parametrize("secret", [None, ONE])
async def test_calls_over_tls(certificate, secret):
    server, client = tls(certificate)
    async with rig(
        server={"ssl_context": server, "secret": secret},
        client={"ssl_context": client, "secret": secret},
    ) as r:
        assert (await r.call()).text == "x"
        data = bytes(1_000_000)
        answer = await r.client.call(r.address, ECHO, Text(data=data), deadline=soon())
        assert answer.data == data
        connection = await r.client.connect(r.address, soon())
        with pytest.raises(ValueError, match="TLS connection cannot be handed over"):
            connection.detach()
        connection.close()


async def test_a_certificate_that_is_not_trusted(certificate):
    server, _ = tls(certificate)
    async with rig(
        server={"ssl_context": server}, client={"ssl_context": ssl.create_default_context()}
    ) as r:
        with pytest.raises(
            (AuthenticationError, UnreachableError), match=r"certificate|CERTIFICATE"
        ):
            await r.call()
        assert r.requests == []


async def test_plain_bytes_to_a_tls_server(certificate):
    server, _ = tls(certificate)
    async with rig(server={"ssl_context": server}) as r:
        with pytest.raises(UnreachableError):
            await r.call()
        reader, writer = await stranger(r.address)
        writer.write(hello())
        assert b"OKAY" not in await read_end(reader)
        writer.close()
        assert r.requests == []
