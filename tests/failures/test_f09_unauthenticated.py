"""F09: control messages are unauthenticated pickles: remote code execution, several times over.

Here: no pickle anywhere (nor anything like it); bounded msgpack without extension types; off loopback a
secret or TLS is required; forged frames are answered, counted, and reach no handler.
"""

from __future__ import annotations

import ast
import asyncio
import os
import pathlib
import pickle

import msgpack
import pytest

from simple_rpc import AuthenticationError, Client, Identity, Secret, Server
from simple_rpc._frames import encode_frame, head_from_name
from tests.rpc_kit import ECHO, Text, rig, soon, until

PACKAGE = pathlib.Path(__file__).parents[2] / "simple_rpc"
DANGEROUS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
DANGEROUS_CALLS = {"eval", "exec", "compile", "__import__"}
SECRET = Secret(b"the one shared secret")


class Exploit:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_nothing_in_the_package_can_turn_bytes_into_code(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & DANGEROUS
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in DANGEROUS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in DANGEROUS_CALLS


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_an_exploit_in_any_disguise_runs_nothing_and_is_counted(secret, tmp_path):
    exploit = pickle.dumps(Exploit(str(tmp_path / "pwned")))
    hello = msgpack.packb([0, [1, 1, "scheduler", "x", bytes(16), bytes(32), {"p": exploit}]])
    disguises = [
        exploit,
        encode_frame(head_from_name("HELO"), exploit),
        encode_frame(head_from_name("HELO"), msgpack.packb(msgpack.ExtType(1, exploit))),
        encode_frame(ECHO.head, exploit),
        encode_frame(head_from_name("HELO"), hello) + encode_frame(ECHO.head, exploit),
    ]
    async with rig(server={"secret": secret}) as r:
        for disguise in disguises:
            reader, writer = await asyncio.open_connection(r.address.host, r.address.port)
            writer.write(disguise)
            answer = await asyncio.wait_for(reader.read(), 20)
            assert b"FAIL" in answer
            writer.close()
        await until(lambda: r.server.stats().num_connections == 0)
        assert sum(r.server.stats().closed.values()) == len(disguises)
        assert r.requests == []
    assert list(tmp_path.iterdir()) == []


async def test_an_authenticated_peer_cannot_send_code_either(tmp_path):
    exploit = pickle.dumps(Exploit(str(tmp_path / "pwned")))
    async with rig(server={"secret": SECRET}, client={"secret": SECRET}) as r:
        answer = await r.client.call(r.address, ECHO, Text(data=exploit), deadline=soon())
        assert answer.data == exploit  # bytes in, bytes out
    assert list(tmp_path.iterdir()) == []


async def test_off_loopback_trust_is_required():
    with pytest.raises(ValueError, match="secret or an ssl_context"):
        await Server(Identity("scheduler", "p0")).listen("tcp://0.0.0.0:0")
    server = Server(Identity("scheduler", "p0"), secret=SECRET)
    server.register(ECHO, lambda request, context: request)
    address = await server.listen("tcp://0.0.0.0:0")
    there = f"tcp://127.0.0.1:{address.port}"
    stranger = Client(Identity("scheduler", "d0"))
    with pytest.raises(AuthenticationError):
        await stranger.call(there, ECHO, Text(), deadline=soon())
    friend = Client(Identity("scheduler", "d0"), secret=SECRET)
    assert (await friend.call(there, ECHO, Text("x"), deadline=soon())).text == "x"
    await stranger.close()
    await friend.close()
    await server.close()
