"""A channel that outlives its connections: resumed under the same numbers, told of restarts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable

import pytest

from simple_rpc import Address, Client, Code, Deadline, Identity, RpcError, Secret, Server
from simple_rpc.channel import Channel, ChannelState
from simple_rpc.link import ReconnectingChannel, open_channel
from simple_rpc.testing import FaultProxy, Faults, ManualClock
from simple_rpc.testing.clock import settle
from tests.rpc_kit import LOOPS

GUARD_S = 60.0


@pytest.fixture(params=sorted(LOOPS), scope="module")
def event_loop_policy(request):
    return LOOPS[request.param]()


async def until(
    condition: Callable[[], object], clock: ManualClock | None = None, step_s: float = 0.002
) -> None:
    async def turn() -> None:
        while not condition():
            if clock is not None:
                clock.advance(step_s)
            await asyncio.sleep(0)

    await asyncio.wait_for(turn(), GUARD_S)


class Scheduler:
    """A server process's worth of state: what one incarnation has received from its workers."""

    def __init__(self, clock: ManualClock | None, resume_s: float = 10.0, **options) -> None:
        self.clock = clock
        self.server = Server(Identity("scheduler", "d0"), clock=clock, **options)
        self.table = self.server.on_channel("worker", self.accept, resume_s=resume_s)
        self.items: list[object] = []
        self.lost: list[RpcError] = []
        self.num_resumed = 0
        self.channel: Channel | None = None

    def accept(self, peer: Identity, channel: Channel) -> None:
        self.channel = channel
        channel.on("ITEM", self.items.extend)
        channel.on("REGI", self.items.extend)
        channel.on_lost = self.lost.append
        channel.on_resumed = self.resumed

    def resumed(self) -> None:
        self.num_resumed += 1

    async def die(self) -> None:
        """As by kill -9: connections reset, no word said."""
        for channel in self.table.channels():
            if channel._attachment is not None:
                channel._attachment.connection.transport.abort()
        self.server.channels.clear()
        await self.server.close()


class Worker:
    def __init__(self, clock: ManualClock | None, address: Address, **options) -> None:
        self.clock = clock
        self.client = Client(Identity("worker", "d0/r0"), clock=clock)
        self.registrations: list[tuple[bytes, int]] = []
        self.lost: list[RpcError] = []
        self.received: list[object] = []
        self.news = ReconnectingChannel(
            self.client,
            address,
            kind="worker",
            on_new_peer=self.register,
            on_lost=self.lost.append,
            heartbeat_s=options.pop("heartbeat_s", 0.0),
            clock=clock,
            **options,
        )
        self.channel = self.news.channel
        self.channel.on("DOWN", self.received.extend)

    def register(self, peer: Identity, num_dropped: int) -> None:
        self.registrations.append((peer.incarnation, num_dropped))
        self.channel.publish("REGI", f"registration {len(self.registrations)}")

    async def close(self) -> None:
        self.news.close()
        await self.client.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def scheduler(clock) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(clock)
    scheduler.address = await scheduler.server.listen("tcp://127.0.0.1:0")
    yield scheduler
    await scheduler.server.close()
    await settle()


async def test_a_lost_connection_is_resumed_and_nothing_is_lost_or_doubled(clock, scheduler):
    async with FaultProxy(scheduler.address) as proxy:
        worker = Worker(clock, proxy.address)
        await worker.news.start(Deadline.after(3.0, clock))
        for round_number in range(20):
            for i in range(50):
                worker.channel.publish("ITEM", round_number * 50 + i)
                scheduler.channel.publish("DOWN", round_number * 50 + i)
            for _ in range(round_number):
                await asyncio.sleep(0)  # cut at another moment of the exchange each time
            proxy.cut_all()
            await until(lambda n=round_number: scheduler.num_resumed > n, clock)
        await until(lambda: not worker.channel.sender.num_unacked, clock)
        await until(lambda: not scheduler.channel.sender.num_unacked, clock)
        assert scheduler.items == ["registration 1", *range(1000)]
        assert worker.received == list(range(1000))
        assert len(worker.registrations) == 1
        assert not worker.lost
        assert not scheduler.lost
        await worker.close()


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_cut_at_every_byte(clock, scheduler, direction):
    """The n-th connection is cut after the n-th byte of one direction, HELLO and LINK included."""
    cuts = [*range(0, 260, 3), *range(260, 700)] if direction == "up" else [*range(420)]
    cuts = cuts[::2]

    def faults(n: int) -> tuple[Faults, Faults]:
        if n >= len(cuts):
            return Faults(), Faults()
        cut = Faults(cut_at=cuts[n], split=7)
        return (cut, Faults()) if direction == "up" else (Faults(), cut)

    async with FaultProxy(scheduler.address, faults) as proxy:
        worker = Worker(clock, proxy.address, give_up_s=1e6)
        start = asyncio.ensure_future(worker.news.start(Deadline.after(1e6, clock)))
        num_published = 0

        def go_on() -> bool:
            nonlocal num_published
            channel = worker.channel
            if channel.state is ChannelState.ATTACHED and channel.sender.num_unacked < 5:
                channel.publish("ITEM", num_published)
                num_published += 1
                if scheduler.channel is not None and scheduler.channel.sender.num_free:
                    scheduler.channel.publish("DOWN", num_published)
            return proxy.num_connections > len(cuts)

        await until(go_on, clock, step_s=0.02)
        await start
        await until(lambda: not worker.channel.sender.num_unacked, clock)
        got = [item for item in scheduler.items if not isinstance(item, str)]
        assert len(worker.registrations) == 1
        assert got == list(range(num_published))
        # Exactly once in this direction too; what the first published before its channel resumed counts.
        down = worker.received
        assert down == sorted(set(down))
        assert num_published > 20
        await worker.close()


@pytest.mark.parametrize("seed", range(4))
async def test_a_wire_that_splits_delays_and_cuts_at_random(clock, scheduler, seed):
    rng = random.Random(seed)

    def faults(n: int) -> tuple[Faults, Faults]:
        def some() -> Faults:
            return Faults(
                delay_s=rng.choice([0, 0.001, 0.01]),
                split=rng.choice([0, 1, 5, 64]),
                cut_at=rng.randrange(300, 2000) if n < 60 else None,
            )

        return some(), some()

    async with FaultProxy(scheduler.address, faults, clock=clock) as proxy:
        worker = Worker(clock, proxy.address, give_up_s=1e6)
        start = asyncio.ensure_future(worker.news.start(Deadline.after(1e6, clock)))
        await until(start.done, clock, step_s=0.001)
        start.result()
        num = 8000
        published = 0

        def go_on() -> bool:
            nonlocal published
            for _ in range(rng.randrange(12)):
                if published < num and worker.channel.sender.num_unacked < 200:
                    worker.channel.publish("ITEM", published)
                    published += 1
            return published == num and not worker.channel.sender.num_unacked

        await until(go_on, clock, step_s=0.001)
        assert [item for item in scheduler.items if not isinstance(item, str)] == list(range(num))
        assert len(worker.registrations) == 1
        assert scheduler.num_resumed >= 10, "the wire was hardly ever cut"
        await worker.close()


async def test_a_restart_at_the_same_port_drops_the_unacknowledged_and_registers_first(clock):
    first = Scheduler(clock)
    address = await first.server.listen("tcp://127.0.0.1:0")
    worker = Worker(clock, address)
    await worker.news.start(Deadline.after(3.0, clock))
    worker.channel.publish("ITEM", "delivered")
    await until(lambda: not worker.channel.sender.num_unacked, clock)
    slots = worker.channel.reserve(1)

    await first.die()
    await until(lambda: worker.channel.state is ChannelState.DETACHED)
    for i in range(5):
        worker.channel.publish("ITEM", f"for the dead {i}")
    second = Scheduler(clock)
    await second.server.listen(address)
    await until(lambda: len(worker.registrations) == 2, clock)
    slots.publish("ITEM", "for the living")
    await until(lambda: not worker.channel.sender.num_unacked, clock)

    assert worker.registrations == [
        (first.server.identity.incarnation, 0),
        (second.server.identity.incarnation, 5),
    ]
    assert first.items == ["registration 1", "delivered"]
    assert second.items == ["registration 2", "for the living"]
    assert worker.channel.peer == second.server.identity
    assert not worker.lost
    await worker.close()
    await second.server.close()


async def test_an_orderly_restart_is_a_restart_like_any_other(clock):
    first = Scheduler(clock)
    address = await first.server.listen("tcp://127.0.0.1:0")
    worker = Worker(clock, address)
    await worker.news.start(Deadline.after(3.0, clock))
    await until(lambda: not worker.channel.sender.num_unacked, clock)
    await first.server.close()
    assert first.lost[0].code is Code.ABORTED
    await until(lambda: worker.channel.state is ChannelState.DETACHED)
    second = Scheduler(clock)
    await second.server.listen(address)
    await until(lambda: len(worker.registrations) == 2, clock)
    assert not worker.lost
    # The worker leaves for good: the scheduler hears of it at once, not when resume_s is over.
    await until(lambda: not worker.channel.sender.num_unacked, clock)
    await worker.close()
    await until(lambda: second.lost)
    assert second.lost[0].code is Code.ABORTED
    await second.server.close()


async def test_a_peer_that_hangs_up_at_once_is_not_called_in_a_tight_loop(clock, scheduler):
    async with FaultProxy(scheduler.address) as proxy:
        worker = Worker(clock, proxy.address, give_up_s=1e6)
        worker.channel.on_resumed = proxy.cut_all
        await worker.news.start(Deadline.after(3.0, clock))
        await until(lambda: not worker.channel.sender.num_unacked, clock)
        proxy.cut_all()
        begin_s, first = clock.now(), proxy.num_connections
        await until(lambda: clock.now() > begin_s + 30.0, clock, step_s=0.01)
        assert proxy.num_connections - first <= 70
        assert scheduler.num_resumed >= 10
        worker.channel.on_resumed = None
        await worker.close()


async def test_one_that_was_forgotten_registers_anew_and_doubles_nothing(clock, scheduler):
    """The acceptor lives on, but gave the stream up: its items may have been delivered already."""
    async with FaultProxy(scheduler.address) as proxy:
        worker = Worker(clock, proxy.address, give_up_s=1e6)
        await worker.news.start(Deadline.after(3.0, clock))
        await until(lambda: not worker.channel.sender.num_unacked, clock)
        proxy.hang()
        worker.channel.publish("ITEM", "never arrives")
        await settle()
        proxy.is_refusing = True
        proxy.is_hanging = False
        proxy.cut_all()
        await until(lambda: scheduler.lost, clock, step_s=0.05)  # resume_s is over
        proxy.is_refusing = False
        await until(lambda: len(worker.registrations) == 2, clock)
        worker.channel.publish("ITEM", "arrives")
        await until(lambda: not worker.channel.sender.num_unacked, clock)
        assert [num_dropped for _, num_dropped in worker.registrations] == [0, 1]
        assert scheduler.items == ["registration 1", "registration 2", "arrives"]
        await worker.close()


async def test_a_half_open_connection_gives_way_to_the_new_one(clock, scheduler):
    async with FaultProxy(scheduler.address) as proxy:
        worker = Worker(clock, proxy.address, heartbeat_s=1.0)
        await worker.news.start(Deadline.after(3.0, clock))
        await until(lambda: not worker.channel.sender.num_unacked, clock)
        old = scheduler.channel._attachment
        # Only the worker loses it: the proxy's other half keeps standing.
        (connection,) = proxy.connections
        proxy.is_hanging = True
        connection._client.reset()
        await until(lambda: worker.channel.state is ChannelState.DETACHED)
        worker.channel.publish("ITEM", "after")
        proxy.is_hanging = False
        await until(lambda: scheduler.num_resumed == 1, clock)
        await until(lambda: not worker.channel.sender.num_unacked, clock)
        assert scheduler.channel._attachment is not old
        assert not old.connection.is_open
        assert scheduler.items == ["registration 1", "after"]
        assert not scheduler.lost
        await worker.close()


async def test_giving_up_is_a_loss_told_once_and_by_its_deadline(clock, scheduler):
    async with FaultProxy(scheduler.address) as proxy:
        worker = Worker(clock, proxy.address, give_up_s=30.0)
        await worker.news.start(Deadline.after(3.0, clock))
        proxy.is_refusing = True
        proxy.cut_all()
        await until(lambda: worker.channel.state is ChannelState.DETACHED)
        lost_at_s = clock.now()
        await until(lambda: worker.lost, clock, step_s=0.05)
        # The clock runs on for the turns that the last attempt's end takes to be noticed.
        assert 28.0 <= clock.now() - lost_at_s <= 33.0
        assert worker.lost[0].code is Code.PEER_LOST
        assert "the last attempt" in str(worker.lost[0])
        num_connections = proxy.num_connections
        assert 5 <= num_connections <= 90, "it went on trying, about once a second at most"
        clock.advance(100.0)
        await settle()
        assert len(worker.lost) == 1
        assert proxy.num_connections == num_connections
        worker.channel.publish("ITEM", "dropped")
        await worker.close()


async def test_closing_while_reconnecting_ends_the_attempts(clock, scheduler):
    async with FaultProxy(scheduler.address) as proxy:
        worker = Worker(clock, proxy.address)
        await worker.news.start(Deadline.after(3.0, clock))
        proxy.is_refusing = True
        proxy.cut_all()
        await until(lambda: proxy.num_connections >= 3, clock)
        worker.news.close()
        await settle()
        num_connections = proxy.num_connections
        clock.advance(100.0)
        await settle(50)
        assert proxy.num_connections == num_connections
        assert not worker.lost
        assert worker.channel.state is ChannelState.LOST
        await worker.close()


async def test_a_start_that_fails_says_so_and_leaves_nothing(clock):
    worker = Worker(clock, Address.parse("tcp://127.0.0.1:1"))
    start = asyncio.ensure_future(worker.news.start(Deadline.after(2.0, clock)))
    await until(start.done, clock, step_s=0.02)
    with pytest.raises(RpcError, match="the last attempt"):
        start.result()
    assert not worker.lost, "whoever started it has the exception"
    assert worker.channel.state is ChannelState.LOST
    await worker.close()


async def test_a_start_that_is_cancelled_leaves_nothing(clock, scheduler):
    async with FaultProxy(scheduler.address) as proxy:
        proxy.hang()
        worker = Worker(clock, proxy.address)
        start = asyncio.ensure_future(worker.news.start(Deadline.after(2.0, clock)))
        await until(lambda: proxy.connections)
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await start
        assert worker.channel.state is ChannelState.LOST
        await until(lambda: not worker.client._dedicated)
        await worker.close()


async def test_a_wrong_secret_is_not_tried_again(clock):
    scheduler = Scheduler(clock, secret=Secret(b"a" * 32))
    address = await scheduler.server.listen("tcp://127.0.0.1:0")
    worker = Worker(clock, address)
    start = asyncio.ensure_future(worker.news.start(Deadline.after(60.0, clock)))
    await until(start.done)  # no time passes: there was one attempt
    with pytest.raises(RpcError) as caught:
        start.result()
    assert caught.value.code is Code.UNAUTHORIZED
    await worker.close()
    await scheduler.server.close()


# -- processes ---------------------------------------------------------------------------------------

PROCESS = textwrap.dedent("""
    import asyncio, sys
    from simple_rpc import Client, Deadline, Identity, Server
    from simple_rpc.link import ReconnectingChannel, open_channel

    async def serve(address):
        server = Server(Identity("scheduler", "d0"))

        def accept(peer, channel):
            channel.on("ITEM", lambda items: [print("got", item, flush=True) for item in items])
            channel.on_lost = lambda error: print("lost", error.code.name, flush=True)
            channel.publish("DOWN", server.identity.incarnation.hex())

        server.on_channel("worker", accept, resume_s=10.0)
        server.on_channel("link", accept)
        print("address", await server.listen(address), flush=True)
        await asyncio.get_running_loop().create_future()

    async def link(address):
        client = Client(Identity("scheduler", "p0"))
        lost = asyncio.Event()

        def on_lost(error):
            print("lost", error.code.name, flush=True)
            lost.set()

        await open_channel(client, address, kind="link", deadline=Deadline.after(20.0),
                           heartbeat_s=1.0, handlers={"DOWN": lambda items: print("up", flush=True)},
                           on_lost=on_lost)
        await lost.wait()

    asyncio.run({"serve": serve, "link": link}[sys.argv[1]](sys.argv[2]))
""")


class Process:
    """A real process; reads its output line by line."""

    def __init__(self, role: str, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, role, address], stdout=subprocess.PIPE, text=True
        )

    async def line(self) -> str:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), GUARD_S)
        return line.strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def processes():
    started: list[Process] = []

    def start(role: str, address: object) -> Process:
        process = Process(role, str(address))
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.mark.parametrize("where", ["tcp", "unix"])
async def test_a_killed_acceptor_process_is_a_lost_link(processes, where, tmp_path):
    start = f"unix://{tmp_path}/s" if where == "unix" else "tcp://127.0.0.1:0"
    process = processes("serve", start)
    address = (await process.line()).split()[1]
    client = Client(Identity("scheduler", "p0"))
    lost = asyncio.get_running_loop().create_future()
    await open_channel(
        client,
        address,
        kind="link",
        deadline=Deadline.after(20.0),
        on_lost=lost.set_result,
        handlers={"DOWN": lambda items: None},
    )
    process.kill()
    error = await asyncio.wait_for(lost, GUARD_S)
    assert error.code is Code.PEER_LOST
    await client.close()


async def test_a_killed_opener_process_is_a_lost_link(processes):
    server = Server(Identity("scheduler", "d0"))
    lost = asyncio.get_running_loop().create_future()

    def accept(peer: Identity, channel: Channel) -> None:
        channel.on_lost = lost.set_result
        channel.publish("DOWN", 1)

    server.on_channel("link", accept)
    process = processes("link", await server.listen("tcp://127.0.0.1:0"))
    assert await process.line() == "up"
    process.kill()
    error = await asyncio.wait_for(lost, GUARD_S)
    assert error.code is Code.PEER_LOST
    await server.close()


async def test_a_stopped_process_is_lost_by_its_heartbeat_on_both_sides(processes):
    """SIGSTOP: the kernel still acknowledges, only the heartbeat can tell. Resumed, it knows too."""
    process = processes("serve", "tcp://127.0.0.1:0")
    address = (await process.line()).split()[1]
    clock = ManualClock()
    client = Client(Identity("scheduler", "p0"))
    lost: list[RpcError] = []
    up = asyncio.Event()
    await open_channel(
        client,
        address,
        kind="link",
        deadline=Deadline.after(20.0),
        heartbeat_s=1.0,
        on_lost=lost.append,
        handlers={"DOWN": lambda items: up.set()},
        clock=clock,
    )
    await asyncio.wait_for(up.wait(), GUARD_S)
    process.process.send_signal(signal.SIGSTOP)
    for _ in range(40):
        clock.advance(0.1)
        await settle(2)
    assert lost[0].code is Code.PEER_LOST
    assert "silent" in str(lost[0])
    process.process.send_signal(signal.SIGCONT)
    assert await process.line() == "lost PEER_LOST"
    await client.close()


async def test_a_process_killed_and_restarted_at_its_port_is_a_new_peer(processes):
    process = processes("serve", "tcp://127.0.0.1:0")
    address = Address.parse((await process.line()).split()[1])
    client = Client(Identity("worker", "d0/r1"))
    incarnations: list[str] = []
    restarted = asyncio.Event()

    def new_peer(peer: Identity, num_dropped: int) -> None:
        incarnations.append(peer.incarnation.hex())
        news.channel.publish("ITEM", f"registration-{len(incarnations)}-dropped-{num_dropped}")
        if len(incarnations) == 2:
            restarted.set()

    news = ReconnectingChannel(
        client, address, kind="worker", on_new_peer=new_peer, on_lost=lambda error: None
    )
    news.channel.on("DOWN", lambda items: None)
    await asyncio.wait_for(news.start(Deadline.after(20.0)), GUARD_S)
    assert await process.line() == "got registration-1-dropped-0"
    acknowledged = asyncio.Event()
    news.channel.when_flushed(acknowledged.set)
    await asyncio.wait_for(acknowledged.wait(), GUARD_S)
    detached = asyncio.Event()
    news.channel.on_detached = lambda error: detached.set()
    process.kill()
    await asyncio.wait_for(detached.wait(), GUARD_S)
    for i in range(3):
        news.channel.publish("ITEM", i)
    second = processes("serve", address)
    assert (await second.line()).split() == ["address", str(address)]
    await asyncio.wait_for(restarted.wait(), GUARD_S)
    assert await second.line() == "got registration-2-dropped-3"
    assert incarnations[0] != incarnations[1]
    news.close()
    await client.close()
