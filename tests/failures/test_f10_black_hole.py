"""F10: one slow or dead peer's handshake blocks everybody else's.

Here: connections, handshakes and pools are per peer. A peer that accepts and says nothing, or does not
even accept, costs exactly its own callers, and them only until their deadlines.
"""

from __future__ import annotations

import asyncio
import socket

import pytest

from simple_rpc import Client, Deadline, DeadlineError, Identity, Limits, RpcError, UnreachableError
from simple_rpc.testing import ManualClock, ScriptedPeer
from tests.rpc_kit import ECHO, Text, pool_of, rig, soon, until


async def silent(peer) -> None:
    await asyncio.sleep(3600)


async def test_callers_of_healthy_peers_do_not_notice():
    """300 calls hang on a silent peer while 300 calls to others are all answered: on a clock that stands
    still, so no deadline can have freed anything in between."""
    clock = ManualClock()
    async with rig() as one, rig() as two, ScriptedPeer(silent) as hole:
        client = Client(Identity("scheduler", "d0"), clock=clock)
        never = Deadline.after(60.0, clock)
        stuck = [
            asyncio.ensure_future(client.call(hole.address, ECHO, Text(), deadline=never))
            for _ in range(300)
        ]
        await until(lambda: pool_of(client, hole.address)["opening"] == 128)
        for r in (one, two) * 75:
            answers = await asyncio.gather(
                client.call(r.address, ECHO, Text("a"), deadline=never),
                client.call(r.address, ECHO, Text("b"), deadline=never),
            )
            assert [answer.text for answer in answers] == ["a", "b"]
        assert not any(call.done() for call in stuck)
        clock.advance(3.0)  # the time that a connection may take
        await until(lambda: sum(call.done() for call in stuck) >= 128)
        while not all(call.done() for call in stuck):
            clock.advance(3.0)
            await asyncio.sleep(0.001)
        for call in stuck:
            with pytest.raises((UnreachableError, DeadlineError)):
                call.result()
        await client.close()


async def test_a_peer_that_does_not_even_accept():
    """Its backlog is full: connecting to it waits in the kernel."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = []
        for _ in range(8):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
            fillers.append(filler)
        async with rig(client={"limits": Limits(connect_s=0.5)}) as r:
            address = f"tcp://127.0.0.1:{full.getsockname()[1]}"
            stuck = asyncio.ensure_future(r.client.call(address, ECHO, Text(), deadline=soon()))
            for number in range(100):
                assert (await r.call(str(number))).text == str(number)
            with pytest.raises(
                UnreachableError, match=r"\[(connect|hello)\]: no connection within"
            ):
                await stuck
        for filler in fillers:
            filler.close()


async def test_a_server_serves_others_while_strangers_sit_in_its_handshake():
    clock = ManualClock()
    async with rig(server={"clock": clock}) as r:
        strangers = [
            await asyncio.open_connection(r.address.host, r.address.port) for _ in range(100)
        ]
        for number, (_, writer) in enumerate(strangers):
            writer.write(b"HELO"[: number % 5])
        await until(lambda: r.server.stats().num_handshaking == 100)
        for number in range(50):
            assert (await r.call(str(number))).text == str(number)
        assert r.server.stats().num_handshaking == 100
        clock.advance(3.0)
        await until(lambda: r.server.stats().num_handshaking == 0)
        for _, writer in strangers:
            writer.close()


async def test_a_peer_that_dies_in_the_handshake_fails_its_callers_at_once():
    async def rude(peer) -> None:
        await peer.expect("HELO")
        peer.reset()

    async with ScriptedPeer(rude) as hole, rig() as r:
        calls = [
            asyncio.ensure_future(r.client.call(hole.address, ECHO, Text(), deadline=soon()))
            for _ in range(20)
        ]
        for call in calls:
            with pytest.raises(RpcError) as failure:
                await call
            assert isinstance(failure.value, UnreachableError)
        assert (await r.call()).text == "x"
