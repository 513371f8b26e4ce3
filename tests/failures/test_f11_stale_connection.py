"""F11: after hours without traffic the first request fails on a dead pooled connection.

Here: a pooled connection that turns out dead before any byte of an answer is replaced and the call is
repeated, once, at the same incarnation, if its method is idempotent. The caller notices nothing.
"""

from __future__ import annotations

import asyncio

import msgpack
import pytest

from simple_rpc import Client, ConnectionLostError, Deadline, Identity
from simple_rpc.testing import FaultProxy, Faults, ManualClock
from tests.rpc_kit import ECHO, ONCE, WAIT_IDEMPOTENT, Text, pool_of, rig, soon, until


async def stale_call(client: Client, proxy: FaultProxy, method, text: str = "x"):
    """A call on a pooled connection which is reset when its bytes arrive."""
    proxy.hang()
    call = asyncio.ensure_future(client.call(proxy.address, method, Text(text), deadline=soon()))
    await asyncio.sleep(0)
    proxy.is_hanging = False
    proxy.cut_all()
    return await call


async def test_an_idempotent_call_on_a_stale_connection_is_repeated_once_and_answered():
    async with rig() as r, FaultProxy(r.address) as proxy:
        await r.client.call(proxy.address, ECHO, Text("warm up"), deadline=soon())
        assert (await stale_call(r.client, proxy, ECHO)).text == "x"
        assert r.requests == ["warm up", "x"]
        assert r.client.metrics.snapshot().counters["client.retries"] == 1  # type: ignore[attr-defined]
        assert proxy.num_connections == 2


async def test_a_call_that_is_not_idempotent_is_never_repeated():
    async with rig() as r, FaultProxy(r.address) as proxy:
        await r.client.call(proxy.address, ECHO, Text("warm up"), deadline=soon())
        with pytest.raises(ConnectionLostError):
            await stale_call(r.client, proxy, ONCE)
        assert r.requests == ["warm up"]
        assert proxy.num_connections == 1


async def test_a_whole_pool_that_went_stale_costs_one_retry_each():
    async with rig() as r, FaultProxy(r.address) as proxy:
        warm = [r.client.call(proxy.address, ECHO, Text("w"), deadline=soon()) for _ in range(8)]
        await asyncio.gather(*warm)
        proxy.hang()
        calls = [
            asyncio.ensure_future(r.client.call(proxy.address, ECHO, Text(str(n)), deadline=soon()))
            for n in range(8)
        ]
        await asyncio.sleep(0)
        proxy.is_hanging = False
        proxy.cut_all()
        assert [(await call).text for call in calls] == [str(n) for n in range(8)]


async def test_a_connection_that_is_closed_while_idle_is_noticed_before_the_next_call():
    async with rig() as r, FaultProxy(r.address) as proxy:
        await r.client.call(proxy.address, ONCE, Text("a"), deadline=soon())
        proxy.cut_all()
        await until(lambda: pool_of(r.client, proxy.address)["idle"] == 0)
        # Not idempotent, and yet answered: it never met the dead connection.
        answer = await r.client.call(proxy.address, ONCE, Text("b"), deadline=soon())
        assert answer.text == "b"


async def test_hours_later_the_first_call_is_answered():
    """The server closes idle connections, the client does too, and neither disturbs the other."""
    clock = ManualClock()
    async with rig(server={"clock": clock}, client={"clock": clock}) as r:
        for _ in range(5):
            answer = await r.call("hello", ONCE, deadline=Deadline.after(5.0, clock))
            assert answer.text == "hello"
            clock.advance(3 * 3600.0)
            await until(lambda: r.server.stats().num_connections == 0)


async def test_once_a_byte_of_the_answer_has_come_nothing_is_repeated():
    """The pooled connection is cut within the second answer, after each of its bytes in turn."""
    hello_answer = 8 + len(
        msgpack.packb([1, "scheduler", "p0", bytes(16), bytes(32), False, b"", {}])
    )
    answer = 8 + len(msgpack.packb(["w", 0, b""]))
    async with rig() as r:
        for num_bytes in range(answer):
            r.requests.clear()
            down = Faults(cut_at=hello_answer + answer + num_bytes)
            client = Client(Identity("scheduler", "d1"))
            async with FaultProxy(
                r.address, lambda n, down=down: (Faults(), down if n == 0 else Faults())
            ) as proxy:
                await client.call(proxy.address, ECHO, Text("w"), deadline=soon())
                if num_bytes:
                    with pytest.raises(ConnectionLostError):
                        await client.call(proxy.address, ECHO, Text("x"), deadline=soon())
                    assert r.requests == ["w", "x"]
                else:
                    # It was executed, but as far as anybody can know it was not: idempotent, so once more.
                    assert (
                        await client.call(proxy.address, ECHO, Text("x"), deadline=soon())
                    ).text == "x"
                    assert r.requests == ["w", "x", "x"]
                await client.close()


async def test_a_new_connection_that_fails_is_not_retried_for_ever():
    async with rig() as r, FaultProxy(r.address) as proxy:
        await r.client.call(proxy.address, ECHO, Text("warm up"), deadline=soon())
        proxy.hang()
        call = asyncio.ensure_future(
            r.client.call(proxy.address, WAIT_IDEMPOTENT, Text("x"), deadline=soon())
        )
        await asyncio.sleep(0)
        proxy.is_hanging = False
        proxy.cut_all()
        assert await r.started.get() == "x"  # the repetition, on a new connection
        proxy.cut_all()
        with pytest.raises(ConnectionLostError):
            await call
        assert r.requests == ["warm up", "x"]
        r.gate.set()
