"""Two engines' loop threads, a channel between them, and threads that must never wait."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest

from simple_rpc import Client, Deadline, Identity, Server
from simple_rpc.link import open_channel
from simple_rpc.loop_thread import LoopClosedError, LoopThread
from simple_rpc.mailbox import Mailbox

GUARD_S = 60.0


class Engine:
    """A loop thread with a server on it; what arrives goes to a mailbox."""

    def __init__(self) -> None:
        self.fatal = threading.Event()
        self.fatals = []
        self.woken = threading.Event()
        self.box: Mailbox[list] = Mailbox(self.woken.set)
        self.lost = threading.Event()
        self.thread = LoopThread("receiver", on_fatal=self.on_fatal).start()
        self.channel = None
        self.address = self.thread.submit(self._listen).result(GUARD_S)

    def on_fatal(self, fatal) -> None:
        self.fatals.append(fatal)
        self.fatal.set()

    async def _listen(self):
        self.server = Server(Identity("scheduler", "d0"))
        self.server.on_channel("link", self._accept)
        return await self.server.listen("tcp://127.0.0.1:0")

    def _accept(self, _, channel) -> None:
        self.channel = channel
        channel.on("ITEM", self.box.put)
        channel.on_lost = lambda error: self.lost.set()

    def close(self) -> None:
        self.thread.submit(self.server.close).result(GUARD_S)
        self.thread.close()


@pytest.fixture
def receiver():
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture
def sender(receiver):
    thread = LoopThread("sender").start()
    client = Client(Identity("scheduler", "p0"))

    async def connect():
        return await open_channel(
            client, receiver.address, kind="link", deadline=Deadline.after(30.0)
        )

    channel = thread.submit(connect).result(GUARD_S)
    yield thread, channel
    if thread.is_running:
        thread.submit(client.close).result(GUARD_S)
        thread.close()


def test_threads_publish_through_two_loops_into_a_mailbox(receiver, sender):
    thread, channel = sender
    num_each, num_threads = 4000, 4
    start = threading.Barrier(num_threads)

    def publish(who: int) -> None:
        start.wait()
        for i in range(num_each):
            thread.call(channel.publish, "ITEM", [who, i])

    threads = [threading.Thread(target=publish, args=(who,)) for who in range(num_threads)]
    for publisher in threads:
        publisher.start()
    got: list[list[int]] = []
    while len(got) < num_each * num_threads:
        assert receiver.woken.wait(GUARD_S)
        receiver.woken.clear()
        for items in receiver.box.take_all():
            got += items
    for publisher in threads:
        publisher.join()
    for who in range(num_threads):
        assert [i for w, i in got if w == who] == list(range(num_each))
    assert not receiver.fatals


def test_closing_the_senders_thread_under_fire_ends_the_link_and_blocks_nobody(receiver, sender):
    thread, channel = sender
    refused = threading.Event()

    def publish() -> None:
        with contextlib.suppress(LoopClosedError):
            for i in itertools.count():
                if i < 60_000:  # fewer than the channel has slots
                    thread.call(channel.publish, "ITEM", [0, i])
                else:
                    thread.call(int)
        refused.set()

    publisher = threading.Thread(target=publish)
    publisher.start()
    assert receiver.woken.wait(GUARD_S)
    thread.close()
    assert refused.wait(GUARD_S)
    publisher.join()
    assert receiver.lost.wait(GUARD_S)
    assert thread.fatal is None
    seen = [i for items in receiver.box.take_all() for _, i in items]
    assert seen == list(range(len(seen)))


def test_a_channel_callback_that_raises_is_a_failure_of_the_process(receiver, sender):
    thread, channel = sender

    def broken(error) -> None:
        raise KeyError("bug in on_lost")

    receiver.thread.call(lambda: setattr(receiver.channel, "on_lost", broken))
    receiver.thread.submit(_nothing).result(GUARD_S)
    thread.call(channel.close)
    assert receiver.fatal.wait(GUARD_S)
    assert isinstance(receiver.fatals[0].error, KeyError)


async def _nothing() -> None:
    pass
