"""The scheduler's words reach the sender natively: SUBS, FRZN and ABRT in, SDON out, through the real
server at the scheduler's end and packed by the control plane's own messages."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from kvt_bindings import DataClient, KvtError, NewsChannel, Sender, code_name
from pd_control import messages as m
from pd_control.runtime import wire
from simple_rpc import Client, Deadline, Identity, Server
from simple_rpc.channel import Channel
from tests.kvt_kit import D_SCHEDULER, P_SCHEDULER, Shape, Target, key_of, make_cache, raw
from tests.kvt_sender_kit import worker_of
from tests.kvt_wire import GO

GUARD_S = 30.0
SHAPE = Shape(layers=2, blocks=8)


class World:
    """A scheduler, its worker's sender, and a receiver that grants blocks by hand."""

    def __init__(self) -> None:
        self.server = Server(Identity("scheduler", "p0", P_SCHEDULER, {}))
        self.server.on_channel("worker", self._accept, resume_s=30.0)
        self.scheduler: Channel | None = None
        self.done: list[list[Any]] = []
        self.client = Client(Identity("worker", "p0", os.urandom(16), {}))
        self.channel = NewsChannel(rank=0, heartbeat_ms=200)
        self.cache = make_cache(SHAPE, seed=1)
        self.data_client = DataClient(self.cache.native, transports=["tcp"])
        self.sender = Sender(self.cache.native, self.channel, self.data_client)
        self.sender.begin_scheduler(P_SCHEDULER)
        self.sender.serve(self.channel)
        self.target = Target(SHAPE)
        self._stop, self._stopped = socket.socketpair()
        self._dialer = threading.Thread(target=self._dial)
        self._dialer.start()

    async def start(self) -> None:
        address = await self.server.listen("tcp://127.0.0.1:0")
        self.channel.start()
        connection = await self.client.connect(address, Deadline.after(5.0))
        self.channel.attach(connection.detach().detach(), connection.peer.incarnation)
        await until(lambda: self.scheduler is not None)

    async def stop(self) -> None:
        await asyncio.to_thread(self.sender.close)
        await asyncio.to_thread(self.channel.stop)
        self._stop.close()
        await asyncio.to_thread(self._dialer.join)
        self._stopped.close()
        await self.client.close()
        await self.server.close()
        await asyncio.to_thread(self.target.close)

    def _accept(self, peer: Identity, channel: Channel) -> None:
        channel.on("SDON", self.done.extend)
        self.scheduler = channel

    def _dial(self) -> None:
        while True:
            ready, _, _ = select.select([self.data_client.dial_fd, self._stopped], [], [])
            if self._stopped in ready:
                return
            for dial_id, *_, address in self.data_client.take_dials():
                sock = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
                assert sock.recv(len(GO), socket.MSG_WAITALL) == GO
                with suppress(KvtError):
                    self.data_client.adopt(dial_id, sock.detach())

    def tell(self, head: str, item: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.publish(head, item)

    def send(self, key: int, blocks: tuple[int, ...] = (3,), end: int = 16) -> m.Send:
        target = m.Target(0, worker_of(0), f"tcp://127.0.0.1:{self.target.port}")
        return m.Send(key_of(key), "d0", D_SCHEDULER, (target,), (blocks,), (blocks,), 0, end, True)

    def run_step(self, step: int) -> int:
        self.sender.start_step(step)
        for layer in range(SHAPE.layers):
            self.sender.record_event(step, layer)
        taken = self.sender.freeze_step(step)
        self.sender.flush_step(step)
        return taken

    async def completion(self, n: int) -> tuple[int, int | None, int, str]:
        await until(lambda: len(self.done) >= n)
        rank, key, target, tokens, code, _, *_stamps = self.done[n - 1]
        assert rank == 0
        return int.from_bytes(key, "big"), target, tokens, code_name(code)


async def until(condition: Callable[[], object]) -> None:
    async def turn() -> None:
        while not condition():  # noqa: ASYNC110 - waits for a native thread
            await asyncio.sleep(0.001)

    await asyncio.wait_for(turn(), GUARD_S)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    it = World()
    await it.start()
    yield it
    await it.stop()


async def test_substeps_and_frozen_sends_come_as_news(world: World) -> None:
    for key in (1, 2, 3):
        world.target.grant(key, [3], 0, 16)
    for substep in (1, 2):  # both early
        item = m.Substep(P_SCHEDULER, 5, substep, (world.send(substep),))
        world.tell(m.Substep.HEAD, wire.SUBSTEP.encode(item))
    await until(lambda: world.sender.snapshot()["num_kept_substeps"] == 2)
    assert world.run_step(5) == 2
    assert {await world.completion(n) for n in (1, 2)} == {(1, 0, 16, "OK"), (2, 0, 16, "OK")}
    world.tell(m.FrozenSends.HEAD, [wire.SEND.encode(world.send(3))])
    assert await world.completion(3) == (3, 0, 16, "OK")
    for mine, theirs in zip(world.target.cache.tensors, world.cache.tensors, strict=True):
        assert np.array_equal(raw(mine)[:, 3], raw(theirs)[:, 3])


async def test_a_late_substep_has_no_completion(world: World) -> None:
    world.run_step(1)
    late = m.Substep(P_SCHEDULER, 1, 1, (world.send(1),))
    world.tell(m.Substep.HEAD, wire.SUBSTEP.encode(late))
    stale = m.Substep(b"x" * 16, 2, 1, (world.send(2),))  # kept: a scheduler yet to speak
    world.tell(m.Substep.HEAD, wire.SUBSTEP.encode(stale))
    await until(lambda: world.sender.snapshot()["num_refused"] == 1)
    world.tell(m.FrozenSends.HEAD, [wire.SEND.encode(world.send(3))])
    key, target, _, code = await world.completion(1)
    assert (key, target) == (3, 0)
    assert code != "OK"  # nobody granted it
    assert len(world.done) == 1


async def test_a_cancel_is_answered_even_if_nothing_is_open(world: World) -> None:
    world.tell(m.CancelSend.HEAD, wire.CANCEL_SEND.encode(m.CancelSend(key_of(1), 6)))
    assert await world.completion(1) == (1, None, 0, "EXPIRED")
    # It holds for a send that comes later.
    world.tell(m.FrozenSends.HEAD, [wire.SEND.encode(world.send(1))])
    assert await world.completion(2) == (1, 0, 0, "EXPIRED")
    # One that is open is answered by its targets.
    world.target.grant(2, [3], 0, 16)
    world.sender.start_step(1)
    open_ = m.Substep(P_SCHEDULER, 1, 1, (world.send(2),))
    world.tell(m.Substep.HEAD, wire.SUBSTEP.encode(open_))
    world.tell(m.CancelSend.HEAD, wire.CANCEL_SEND.encode(m.CancelSend(key_of(2), 5)))
    assert await world.completion(3) == (2, 0, 0, "ABORTED")
    assert world.channel.stats()["published_unreserved"] == 1  # the answer without a target


@pytest.mark.parametrize(
    "item",
    [
        [],
        [b"short", 1, 1, []],
        [P_SCHEDULER, -1, 1, []],
        [P_SCHEDULER, 1, 1, [[key_of(1), "d0"]]],
        [P_SCHEDULER, 1, 1, [[key_of(1), "d", D_SCHEDULER, [[0, "w", "a"]], [], [], 0, 1, True]]],
        [P_SCHEDULER, 1, 1, [[key_of(1), "d", D_SCHEDULER, [], [[-3]], [[1]], 0, 1, True]]],
        [P_SCHEDULER, 1, 1, [[key_of(1), "d", D_SCHEDULER, [], [[1]], [[1]], 9, 1, True]]],
        "text",
    ],
)
async def test_what_is_malformed_ends_the_channel_and_nothing_else(world: World, item: Any) -> None:
    world.tell("SUBS", item)
    await until(lambda: world.channel.stats()["violations"] == 1)
    assert world.sender.snapshot()["num_attached"] == 0
    assert world.run_step(1) == 0


async def test_the_end_of_the_scheduler_ends_its_sends(world: World) -> None:
    world.target.grant(1, [3], 0, 16)
    world.sender.start_step(1)
    item = m.Substep(P_SCHEDULER, 1, 1, (world.send(1),))
    world.tell(m.Substep.HEAD, wire.SUBSTEP.encode(item))
    await until(lambda: world.sender.snapshot()["transfers"])
    await asyncio.to_thread(world.channel.end_peer, "it was killed")
    await until(lambda: not world.sender.snapshot()["transfers"])
    assert world.sender.snapshot()["num_failed"] == 1
    with pytest.raises(KvtError, match="has ended"):
        world.sender.start_step(2, scheduler=P_SCHEDULER)
