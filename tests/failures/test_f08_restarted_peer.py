"""F08: a peer restarts at the same address, and the other side talks to it as if it were the old one.

Here: the incarnation is part of the first exchange on every connection. A call meant for the old
incarnation reaches no handler of the new one; calls in flight to the old one fail as PEER_LOST.
"""

from __future__ import annotations

import asyncio

import pytest

from simple_rpc import (
    Client,
    Code,
    ConnectionLostError,
    Identity,
    IncarnationError,
    RpcError,
    Server,
)
from simple_rpc.testing import FaultProxy
from tests.rpc_kit import ECHO, WAIT, WAIT_IDEMPOTENT, Text, pool_of, rig, soon, until
from tests.rpc_server_process import server_process


async def test_calls_in_flight_to_a_restarted_process_fail_as_peer_lost_and_new_ones_say_who_is_there():
    async with server_process() as server:
        old = server.incarnation
        client = Client(Identity("scheduler", "d0"))
        calls = [
            asyncio.ensure_future(
                client.call(server.address, method, Text(), deadline=soon(), expect_incarnation=old)
            )
            for method in (WAIT, WAIT_IDEMPOTENT) * 3
        ]
        await until(lambda: pool_of(client, server.address)["busy"] == 6)
        await server.restart()
        for call in calls:
            with pytest.raises(ConnectionLostError) as failure:
                await call
            assert failure.value.code is Code.PEER_LOST
        with pytest.raises(IncarnationError) as mismatch:
            await client.call(server.address, ECHO, Text(), deadline=soon(), expect_incarnation=old)
        assert mismatch.value.code is Code.PEER_LOST
        assert mismatch.value.details == {"expected": old, "got": server.incarnation}
        await client.close()


@pytest.mark.parametrize("method", [ECHO, WAIT_IDEMPOTENT], ids=["answered", "waiting"])
async def test_not_even_an_idempotent_call_is_repeated_at_another_incarnation(method):
    """The pooled connection dies under the call, and behind the same address somebody else answers."""
    async with rig() as old, rig() as new, FaultProxy(old.address) as proxy:
        client = Client(Identity("scheduler", "d0"))
        await client.call(proxy.address, ECHO, Text("warm up"), deadline=soon())
        (pooled,) = client._pools.find(proxy.address).idle  # type: ignore[union-attr]
        proxy.hang()
        call = asyncio.ensure_future(client.call(proxy.address, method, Text("x"), deadline=soon()))
        await asyncio.sleep(0)
        proxy.is_hanging = False
        proxy.target = new.address
        proxy.cut_all()
        with pytest.raises(IncarnationError) as failure:
            await call
        assert failure.value.code is Code.PEER_LOST
        assert failure.value.details["expected"] == pooled.peer.incarnation
        assert new.requests == []
        answer = await client.call(proxy.address, ECHO, Text("knowingly"), deadline=soon())
        assert answer.text == "knowingly"
        await client.close()


async def test_a_pool_of_connections_to_the_old_incarnation_is_given_up_at_once():
    identity = Identity("scheduler", "p0")
    one = Server(identity)
    one.register(ECHO, lambda request, context: Text("old"))
    address = await one.listen("tcp://127.0.0.1:0")
    async with FaultProxy(address) as proxy:
        client = Client(Identity("scheduler", "d0"))
        calls = [client.call(proxy.address, ECHO, Text(), deadline=soon()) for _ in range(4)]
        await asyncio.gather(*calls)
        two = Server(Identity("scheduler", "p0"))
        two.register(ECHO, lambda request, context: Text("new"))
        proxy.target = await two.listen("tcp://127.0.0.1:0")
        # The old one still lives behind the four pooled connections, which nothing has closed.
        incarnation = two.identity.incarnation
        answer = await client.call(
            proxy.address, ECHO, Text(), deadline=soon(), expect_incarnation=incarnation
        )
        assert answer.text == "new"
        await until(lambda: one.stats().num_connections == 0)
        with pytest.raises(RpcError):
            await client.call(
                proxy.address,
                ECHO,
                Text(),
                deadline=soon(),
                expect_incarnation=identity.incarnation,
            )
        await client.close()
        await two.close()
    await one.close()


async def test_a_dedicated_connection_to_another_incarnation_is_not_given_out():
    async with rig() as r:
        with pytest.raises(IncarnationError) as failure:
            await r.client.connect(r.address, soon(), expect_incarnation=bytes(16))
        assert failure.value.details["got"] == r.server.identity.incarnation
        await until(lambda: r.server.stats().num_connections == 0)
        connection = await r.client.connect(
            r.address, soon(), expect_incarnation=r.server.identity.incarnation
        )
        assert connection.peer == r.server.identity
        connection.close()
