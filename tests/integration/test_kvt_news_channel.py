"""The native end of a worker's channel against the real simple_rpc server."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgpack
import pytest

from kvt_bindings import NewsChannel
from simple_rpc import Client, Code, Deadline, Identity, Secret, Server
from simple_rpc.channel import Channel

GUARD_S = 30.0


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


class Scheduler:
    """A server that takes "worker" channels and keeps what they say."""

    def __init__(self, secret: Secret | None = None) -> None:
        self.server = Server(Identity("scheduler", "d0"), secret=secret)
        self.server.on_channel("worker", self.accept, resume_s=30.0)
        self.channels: list[Channel] = []
        self.items: list[Any] = []
        self.batches: list[int] = []

    def accept(self, peer: Identity, channel: Channel) -> None:
        for head in ("LDON", "SDON", "GACK"):
            channel.on(head, self.take)
        self.channels.append(channel)

    def take(self, items: list[Any]) -> None:
        self.items += items
        self.batches.append(len(items))


class Worker:
    """A native channel, connected by Python as a runtime does it."""

    def __init__(self, secret: Secret | None = None, rank: int = 3) -> None:
        self.client = Client(Identity("worker", "d0"), secret=secret)
        self.channel = NewsChannel(
            rank=rank, heartbeat_ms=200, attributes=msgpack.packb({"rank": rank})
        )
        self.events: list[tuple[str, bytes, bool, int, int, str]] = []
        self.inbox = self.channel.inbox(["GRNT", "SUBS"])
        self.channel.start()

    async def attach(self, address: Any) -> None:
        connection = await self.client.connect(address, Deadline.after(5.0))
        self.channel.attach(connection.detach().detach(), connection.peer.incarnation)

    async def event(self) -> tuple[str, bytes, bool, int, int, str]:
        """The next event, waited for through the descriptor."""
        if self.events:
            return self.events.pop(0)
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self.channel.event_fd, readable.set)
        try:
            await asyncio.wait_for(readable.wait(), GUARD_S)
        finally:
            loop.remove_reader(self.channel.event_fd)
        self.events += self.channel.take_events()
        return self.events.pop(0)


async def until(condition: Callable[[], object]) -> None:
    async def turn() -> None:
        while not condition():  # noqa: ASYNC110 - waits for a native thread
            await asyncio.sleep(0.001)

    await asyncio.wait_for(turn(), GUARD_S)


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    it = Scheduler()
    yield it
    await it.server.close()


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    it = Worker()
    yield it
    await asyncio.to_thread(it.channel.stop)
    await it.client.close()


@pytest.mark.parametrize("where", ["tcp://127.0.0.1:0", "unix"])
async def test_news_both_ways_in_order(scheduler, worker, where, tmp_path) -> None:
    address = f"unix://{tmp_path}/s" if where == "unix" else where
    worker.channel.publish(
        "LDON", msgpack.packb([3, key(0), 1, 64, 0, ""])
    )  # before any connection
    await worker.attach(await scheduler.server.listen(address))
    assert (await worker.event())[:4] == (
        "attached",
        scheduler.server.identity.incarnation,
        True,
        0,
    )
    for n in range(1, 2000):
        worker.channel.publish(
            "LDON" if n % 3 else "SDON", msgpack.packb([3, key(n), 1, 64, 0, ""])
        )
    await until(lambda: len(scheduler.items) == 2000)
    assert [item[1] for item in scheduler.items] == [key(n) for n in range(2000)]
    (channel,) = scheduler.channels
    assert channel.attributes == {"rank": 3}
    for n in range(500):
        channel.publish("GRNT", [0, key(n), "p0", key(7), [[1, 2], []], 0, 32, [0], {}])
    got: list[tuple[str, bytes]] = []

    def all_there() -> bool:
        got.extend(worker.inbox.take())
        return len(got) == 500

    await until(all_there)
    assert [msgpack.unpackb(item)[1] for _, item in got] == [key(n) for n in range(500)]
    await until(lambda: channel.sender.num_unacked == 0)
    assert await asyncio.to_thread(worker.channel.flush, 5000)
    stats = worker.channel.stats()
    assert stats["acked"] == 2000
    assert stats["frames_sent"] < 2000  # what completes while a frame is in flight shares the next
    assert stats["items_resent"] == stats["violations"] == 0


async def test_secret_and_wrong_secret(tmp_path) -> None:
    secret = Secret(b"a long enough secret of the test")
    scheduler, worker = Scheduler(secret), Worker(secret)
    try:
        await worker.attach(await scheduler.server.listen(f"unix://{tmp_path}/s"))
        worker.channel.publish("SDON", msgpack.packb([3, key(1), 0, 1, 0, ""]))
        await until(lambda: scheduler.items)
    finally:
        await asyncio.to_thread(worker.channel.stop)
        await worker.client.close()
        await scheduler.server.close()


async def test_connections_come_and_go_and_each_item_arrives_once(scheduler, worker) -> None:
    """New connections replace the old ones at any moment, in the middle of frames both ways."""
    address = await scheduler.server.listen("tcp://127.0.0.1:0")
    await worker.attach(address)
    await worker.event()
    num = 20_000

    def produce() -> None:
        for n in range(num):
            worker.channel.publish("LDON", msgpack.packb([3, key(n), 0, n, 0, ""]))
            if n % 100 == 0:
                threading.Event().wait(0.0005)

    producer = threading.Thread(target=produce)
    producer.start()
    (channel,) = scheduler.channels
    sent = 0
    got: list[tuple[str, bytes]] = []
    for _ in range(25):
        for _ in range(40):
            channel.publish("SUBS", [sent])
            sent += 1
        await worker.attach(address)
        await asyncio.sleep(0.004)
        got += worker.inbox.take()
    await until(lambda: not producer.is_alive() and len(scheduler.items) >= num)
    await until(lambda: got.extend(worker.inbox.take()) or len(got) >= sent)
    producer.join()
    assert scheduler.channels == [channel]  # resumed, never begun anew
    assert [item[1] for item in scheduler.items] == [key(n) for n in range(num)]
    assert [msgpack.unpackb(item)[0] for _, item in got] == list(range(sent))
    assert worker.channel.stats()["violations"] == 0
    assert worker.channel.stats()["attaches"] >= 10


async def test_a_restarted_scheduler_gets_none_of_the_old_news(worker) -> None:
    old, new = Scheduler(), Scheduler()
    try:
        await worker.attach(await old.server.listen("tcp://127.0.0.1:0"))
        await worker.event()
        worker.channel.publish("LDON", msgpack.packb([3, key(1), 0, 1, 0, ""]))
        await until(lambda: old.items)
        assert await asyncio.to_thread(worker.channel.flush, 5000)
        await old.server.close()
        event = await worker.event()
        assert event[0] == "detached"
        worker.channel.publish("LDON", msgpack.packb([3, key(2), 0, 1, 0, ""]))  # meant for the old
        await worker.attach(await new.server.listen("tcp://127.0.0.1:0"))
        event = await worker.event()
        assert event[:4] == ("attached", new.server.identity.incarnation, True, 1)
        worker.channel.publish("LDON", msgpack.packb([3, key(3), 0, 1, 0, ""]))
        await until(lambda: new.items)
        assert [item[1] for item in new.items] == [key(3)]
    finally:
        await old.server.close()
        await new.server.close()


async def test_what_the_scheduler_refuses_is_told(scheduler, worker) -> None:
    await worker.attach(await scheduler.server.listen("tcp://127.0.0.1:0"))
    await worker.event()
    worker.channel.publish("XXXX", msgpack.packb([1]))
    event = await worker.event()
    assert (event[0], event[4]) == ("detached", Code.BAD_REQUEST)
    assert "XXXX" in event[5]


async def test_silence_is_noticed_within_three_heartbeats(worker) -> None:
    """A scheduler that shook hands, answered LINK and then never says anything again."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readexactly(8)
        assert head[:4] == b"LINK"
        timeout_ms, fields = msgpack.unpackb(
            await reader.readexactly(int.from_bytes(head[4:], "little"))
        )
        assert timeout_ms == 3000
        assert fields[0] == "worker"
        assert fields[2:] == [1, 200, {"rank": 3}]
        body = msgpack.packb([key(9), 1, {"fresh": True}])
        writer.write(b"OKAY" + len(body).to_bytes(4, "little") + body)
        await reader.read()  # beats, then FAIL and the end
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    raw = socket.create_connection((host, port))
    raw.setblocking(False)
    worker.channel.attach(raw.detach(), key(1))
    assert (await worker.event())[0] == "attached"
    event = await worker.event()
    assert (event[0], event[4]) == ("detached", Code.PEER_LOST)
    assert "heartbeats" in event[5]
    server.close()
