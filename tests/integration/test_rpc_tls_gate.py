"""Strangers in the TLS handshake are counted and bounded; those who pass lose no byte."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess

import pytest

from simple_rpc import Client, Deadline, Identity, Limits, Server
from simple_rpc._tls_gate import TlsGate
from tests.rpc_kit import ECHO, LOOPS, Text, soon, until

GUARD_S = 30.0


@pytest.fixture(params=sorted(LOOPS), scope="module")
def event_loop_policy(request):
    return LOOPS[request.param]()


@pytest.fixture(scope="module")
def contexts(tmp_path_factory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    where = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1 "
        f"-keyout {where}/key.pem -out {where}/cert.pem"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(where / "cert.pem", where / "key.pem")
    return server, ssl.create_default_context(cafile=str(where / "cert.pem"))


async def serve(context: ssl.SSLContext, **limits: float):
    server = Server(
        Identity("server", "s0"),
        ssl_context=context,
        limits=Limits(**limits),  # type: ignore[arg-type]
    )
    server.register(ECHO, lambda request, ctx: request)
    return server, await server.listen("tcp://127.0.0.1:0")


async def test_silent_strangers_are_bounded_and_go_away(contexts):
    server, address = await serve(contexts[0], max_handshaking=20, handshake_s=0.5)
    opened = [await asyncio.open_connection(address.host, address.port) for _ in range(60)]
    await until(lambda: server.stats().closed.get("too_many_handshakes") == 40)
    await until(lambda: server.stats().closed.get("tls_handshake") == 20)
    # All of them have been closed by the server, and somebody honest is served.
    for reader, _ in opened:
        try:
            await asyncio.wait_for(reader.read(), GUARD_S)
        except ConnectionError:
            continue
    client = Client(Identity("client", "c0"), ssl_context=contexts[1])
    assert await client.call(address, ECHO, Text("hello"), deadline=soon()) == Text("hello")
    for _, writer in opened:
        writer.close()
    await client.close()
    await server.close()


async def test_garbage_in_the_handshake_is_counted(contexts):
    server, address = await serve(contexts[0])
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"HELO\x00\x00\x00\x00" * 20)
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), GUARD_S)
    await until(lambda: server.stats().closed.get("tls_handshake") == 1)
    assert server.stats().num_accepted == 0
    writer.close()
    await server.close()


async def test_many_at_once_pass_and_lose_nothing(contexts):
    """Each sends HELO in the very flight that completes its TLS handshake."""
    server, address = await serve(contexts[0])
    clients = [Client(Identity("client", f"c{i}"), ssl_context=contexts[1]) for i in range(40)]
    data = bytes(range(256)) * 400
    answers = await asyncio.gather(
        *(
            client.call(address, ECHO, Text(data=data), deadline=Deadline.after(60.0))
            for client in clients
        )
    )
    assert all(answer.data == data for answer in answers)
    for client in clients:
        await client.close()
    await until(lambda: server.stats().num_connections == 0)
    assert server.stats().closed == {}
    await server.close()


async def test_closing_the_server_ends_handshakes_in_progress(contexts):
    server, address = await serve(contexts[0], handshake_s=60.0)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    gate = server._listeners[0]._server
    assert isinstance(gate, TlsGate)
    await until(lambda: gate.num_handshaking == 1)
    await server.close()
    await until(lambda: gate.num_handshaking == 0)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), GUARD_S) == b""
    writer.close()
