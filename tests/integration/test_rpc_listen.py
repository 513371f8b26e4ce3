"""Listening: real ports, and Unix socket files that are cleaned up, replaced when dead, never stolen."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys

import pytest

from simple_rpc import Address, Client, Identity, Server, UnreachableError
from tests.rpc_kit import ECHO, LOOPS, Text, no_leaks, rig, soon


@pytest.fixture(params=sorted(LOOPS), scope="module")
def event_loop_policy(request):
    return LOOPS[request.param]()


def new_server(name: str) -> Server:
    server = Server(Identity("scheduler", name))
    server.register(ECHO, lambda request, context: Text(name))
    return server


async def who_answers(address: Address) -> str:
    client = Client(Identity("scheduler", "d0"))
    try:
        return (await client.call(address, ECHO, Text(), deadline=soon())).text
    finally:
        await client.close()


async def test_port_0_reports_the_real_port_and_several_addresses_may_be_served(tmp_path):
    async with rig() as r:
        second = await r.server.listen("tcp://127.0.0.1:0")
        third = await r.server.listen(f"unix://{tmp_path}/s")
        assert r.address.port not in (0, second.port)
        for address in (r.address, second, third):
            assert (await r.client.call(address, ECHO, Text("x"), deadline=soon())).text == "x"


async def test_a_port_that_is_taken():
    async with rig() as r:
        with pytest.raises(OSError, match=r"[Aa]ddress already in use"):
            await new_server("other").listen(r.address)


async def test_a_port_is_free_again_at_once():
    async with no_leaks():
        server = new_server("one")
        address = await server.listen("tcp://127.0.0.1:0")
        assert await who_answers(address) == "one"
        await server.close()
        server = new_server("two")
        assert await server.listen(address) == address
        assert await who_answers(address) == "two"
        await server.close()


async def test_a_socket_file_is_private_and_is_cleaned_up(tmp_path):
    server = new_server("one")
    address = await server.listen(f"unix://{tmp_path}/s")
    assert stat.S_IMODE(os.stat(address.path).st_mode) == 0o600
    assert await who_answers(address) == "one"
    await server.close()
    assert os.listdir(tmp_path) == []


async def test_a_live_servers_file_is_never_stolen(tmp_path):
    one = new_server("one")
    address = await one.listen(f"unix://{tmp_path}/s")
    for _ in range(3):
        with pytest.raises(OSError, match="served by a live process"):
            await new_server("two").listen(address)
    assert await who_answers(address) == "one"
    await one.close()


async def test_a_live_server_that_does_not_accept_is_alive_too(tmp_path):
    path = f"{tmp_path}/s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as busy:
        busy.bind(path)
        busy.listen(0)
        waiting = []
        for _ in range(3):  # fill its backlog
            waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(path)
        with pytest.raises(OSError, match="served by a live process"):
            await new_server("two").listen(f"unix://{path}")
        for each in waiting:
            each.close()
    assert os.listdir(tmp_path) == ["s"]


async def test_the_file_of_a_killed_server_is_replaced(tmp_path):
    path = f"{tmp_path}/s"
    program = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(1);"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, path, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    with pytest.raises(OSError, match="served by a live process"):
        await new_server("two").listen(f"unix://{path}")
    process.send_signal(signal.SIGKILL)
    await process.wait()
    server = new_server("two")
    address = await server.listen(f"unix://{path}")
    assert await who_answers(address) == "two"
    await server.close()


async def test_of_many_that_find_a_dead_file_exactly_one_gets_it(tmp_path):
    path = f"{tmp_path}/s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(path)
    servers = [new_server(str(number)) for number in range(8)]
    results = await asyncio.gather(
        *[server.listen(f"unix://{path}") for server in servers], return_exceptions=True
    )
    (winner,) = [number for number, result in enumerate(results) if isinstance(result, Address)]
    assert sum(isinstance(result, OSError) for result in results) == 7
    assert await who_answers(Address.unix(path)) == str(winner)
    for server in servers:
        await server.close()
    assert os.listdir(tmp_path) == []


async def test_whoever_looks_at_a_dead_file_has_locked_its_directory(tmp_path):
    """Between "nobody answers" and "the file is gone" no other server may have bound it."""
    path = f"{tmp_path}/s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(path)
    directory = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)  # another server is just looking
    server = new_server("one")
    listening = asyncio.ensure_future(server.listen(f"unix://{path}"))
    _, pending = await asyncio.wait({listening}, timeout=0.3)
    assert pending
    assert os.listdir(tmp_path) == ["s"]
    os.close(directory)
    await listening
    assert await who_answers(Address.unix(path)) == "one"
    await server.close()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
async def test_what_is_no_socket_is_never_removed(tmp_path, kind):
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        (tmp_path / "target").write_text("precious")
        path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="not a socket"):
        await new_server("one").listen(f"unix://{path}")
    assert path.exists()


async def test_a_file_that_is_no_longer_ours_is_left_alone(tmp_path):
    one = new_server("one")
    address = await one.listen(f"unix://{tmp_path}/s")
    os.unlink(address.path)  # an operator tidies up
    two = new_server("two")
    await two.listen(address)
    await one.close()
    assert await who_answers(address) == "two"
    await two.close()
    with pytest.raises(UnreachableError):
        await who_answers(address)


async def test_a_directory_that_does_not_exist_leaves_nothing_behind(tmp_path):
    async with no_leaks():
        with pytest.raises(FileNotFoundError):
            await new_server("one").listen(f"unix://{tmp_path}/no/such/s")
