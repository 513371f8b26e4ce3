"""Faults on real sockets: killed processes, half-open peers, resets at every byte, restarts, churn."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from simple_rpc import (
    Client,
    Code,
    ConnectionLostError,
    Deadline,
    DeadlineError,
    Identity,
    IncarnationError,
    Limits,
    PeerProtocolError,
    Phase,
    RpcError,
    UnreachableError,
)
from simple_rpc.testing import FaultProxy, Faults
from tests.rpc_kit import (
    ECHO,
    LOOPS,
    ONCE,
    WAIT,
    WAIT_IDEMPOTENT,
    Text,
    no_leaks,
    num_sockets,
    pool_of,
    rig,
    soon,
    until,
)
from tests.rpc_server_process import server_process


@pytest.fixture(params=sorted(LOOPS), scope="module")
def event_loop_policy(request):
    return LOOPS[request.param]()


async def test_a_server_killed_in_the_middle_of_a_call():
    async with server_process() as server:
        client = Client(Identity("scheduler", "d0"))
        calls = [
            asyncio.ensure_future(client.call(server.address, method, Text(), deadline=soon()))
            for method in (WAIT, WAIT_IDEMPOTENT)
        ]
        await until(lambda: pool_of(client, server.address)["busy"] == 2)
        await server.kill()
        for (
            call
        ) in calls:  # a call that may have been executed is not repeated: its connection was new
            with pytest.raises(ConnectionLostError) as failure:
                await call
            assert failure.value.code is Code.PEER_LOST
            assert failure.value.phase is Phase.ANSWER
        with pytest.raises(UnreachableError):
            await client.call(server.address, ECHO, Text(), deadline=soon())
        assert pool_of(client, server.address) == {
            "idle": 0, "busy": 0, "opening": 0, "waiting": 0,
        }  # fmt: skip
        await client.close()


async def test_a_restart_at_the_same_port_is_another_incarnation():
    async with server_process() as server:
        old = server.incarnation
        client = Client(Identity("scheduler", "d0"))

        async def call(**options) -> Text:
            return await client.call(server.address, ECHO, Text("x"), deadline=soon(), **options)

        assert (await call(expect_incarnation=old)).text == "x"
        await server.restart()
        assert server.incarnation != old
        with pytest.raises(IncarnationError) as failure:
            await call(expect_incarnation=old)
        assert failure.value.code is Code.PEER_LOST
        assert failure.value.details == {"expected": old, "got": server.incarnation}
        assert (await call(expect_incarnation=server.incarnation)).text == "x"
        assert (await call()).text == "x"
        await client.close()


async def test_a_half_open_peer_costs_its_callers_their_deadline_and_nobody_else():
    async with rig() as r, rig() as healthy, FaultProxy(r.address) as proxy:
        assert (await r.client.call(proxy.address, ECHO, Text("x"), deadline=soon())).text == "x"
        proxy.hang()
        with pytest.raises(DeadlineError) as failure:
            await r.client.call(proxy.address, ECHO, Text(), deadline=Deadline.after(0.1))
        assert failure.value.phase is Phase.ANSWER
        answer = await r.client.call(healthy.address, ECHO, Text("y"), deadline=soon())
        assert answer.text == "y"


def faulty(up: Faults, down: Faults):
    return lambda number: (up, down) if number == 0 else (Faults(), Faults())


async def test_a_reset_at_any_byte_of_the_conversation_ends_in_an_answer_or_an_error():
    """Both directions, every offset: nothing hangs, and what is answered is right."""
    outcomes: dict[str, int] = {}
    async with rig() as r:
        for direction in ("up", "down"):
            for at in range(150):
                cut = Faults(cut_at=at)
                pair = (cut, Faults()) if direction == "up" else (Faults(), cut)
                client = Client(Identity("scheduler", "d1"))
                async with FaultProxy(r.address, faulty(*pair)) as proxy:
                    try:
                        answer = await client.call(proxy.address, ONCE, Text("x"), deadline=soon())
                        assert answer.text == "x"
                        outcome = "answer"
                    except (UnreachableError, ConnectionLostError) as error:
                        outcome = type(error).__name__
                    outcomes[outcome] = outcomes.get(outcome, 0) + 1
                    await client.close()
        await until(lambda: r.server.stats().num_connections == 0)
    assert set(outcomes) == {"answer", "UnreachableError", "ConnectionLostError"}


async def test_a_corrupt_byte_anywhere_is_an_error_or_harmless_and_never_a_hang():
    async with rig(server={"limits": Limits(frame_s=0.2)}) as r:
        for direction in ("up", "down"):
            for at in range(0, 140, 3):
                flip = Faults(corrupt={at: 0xFF})
                pair = (flip, Faults()) if direction == "up" else (Faults(), flip)
                client = Client(Identity("scheduler", "d1"))
                async with FaultProxy(r.address, faulty(*pair)) as proxy:
                    with contextlib.suppress(RpcError):
                        await client.call(
                            proxy.address, ONCE, Text("x"), deadline=Deadline.after(0.3)
                        )
                    await client.close()
        assert (await r.call("still alive")).text == "still alive"


@pytest.mark.parametrize("size", [1, 3, 50])
async def test_any_split_of_the_stream_is_the_same_conversation(size):
    async with rig() as r:
        split = Faults(split=size)
        async with FaultProxy(r.address, lambda number: (split, split)) as proxy:
            for number in range(5):
                answer = await r.client.call(
                    proxy.address, ECHO, Text(str(number)), deadline=soon()
                )
                assert answer.text == str(number)


async def test_a_truncated_answer_is_a_lost_connection():
    async with rig() as r:
        # OKAY of HELO is longer than 60 bytes: cut the stream in the middle of the second answer.
        big = Text("x", 0, bytes(100_000))
        async with FaultProxy(r.address, faulty(Faults(), Faults(cut_at=50_000))) as proxy:
            client = Client(Identity("scheduler", "d1"))
            with pytest.raises(ConnectionLostError, match=r"in the middle of a frame|Reset|reset"):
                await client.call(proxy.address, ECHO, big, deadline=soon())
            await client.close()


async def test_clients_that_come_and_go_leak_nothing():
    """A thousand connections with a call each, dropped in every way there is."""
    async with rig() as r:
        for _ in range(5):
            clients = [Client(Identity("scheduler", f"d{n}")) for n in range(50)]
            await asyncio.gather(
                *[
                    c.call(r.address, ECHO, Text(), deadline=soon())
                    for c in clients
                    for _ in range(4)
                ]
            )
            for number, client in enumerate(clients):
                if number % 2:
                    for connection in client._watchdog.watched():
                        connection.transport.abort()
                await client.close()
        await until(lambda: r.server.stats().num_connections == 0)
        assert r.server.stats().num_accepted == 1000
        assert len(r.server._peer_calls) == 0


@pytest.mark.slow
async def test_10_000_connects_and_disconnects_leak_neither_descriptors_nor_tasks(
    event_loop_policy,
):
    num_per_loop = 5_000  # on each of the two loops
    async with no_leaks(), rig() as r:
        await r.call()
        gc.collect()
        num_objects, sockets, tasks = len(gc.get_objects()), num_sockets(), len(asyncio.all_tasks())

        async def come_and_go() -> None:
            for _ in range(num_per_loop // 20):
                connection = await r.client.connect(r.address, soon())
                connection.close()

        await asyncio.gather(*[come_and_go() for _ in range(20)])
        await until(lambda: r.server.stats().num_connections == 1)
        assert r.server.stats().num_accepted == num_per_loop + 1
        await until(lambda: num_sockets() <= sockets)
        assert len(asyncio.all_tasks()) == tasks
        gc.collect()
        assert len(gc.get_objects()) - num_objects < num_per_loop / 10  # none per connection
        assert r.client._dedicated == set()


async def test_an_owner_that_raises_does_not_leave_its_callers_waiting():
    """A defect in this package's own callbacks: the connection ends, so the call does too."""
    async with rig() as r:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        await r.call()
        (connection,) = r.client._pools.find(r.address).idle  # type: ignore[union-attr]
        call = asyncio.ensure_future(r.call("x", WAIT))
        await r.started.get()

        def broken(head, body):
            raise ZeroDivisionError

        inner = connection.connection
        inner._owner = type("Broken", (), {"on_frame": broken, "on_lost": connection.on_lost})()
        inner._owner.on_frame = broken
        r.gate.set()
        with pytest.raises((RpcError, PeerProtocolError)) as failure:
            await call
        assert failure.value.code is Code.INTERNAL
