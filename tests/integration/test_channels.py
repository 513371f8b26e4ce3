"""Channels between a real server and a real client: delivery, ends, heartbeat, limits."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import AsyncIterator, Callable

import pytest

from simple_rpc import Client, Code, Deadline, Identity, Limits, RpcError, Secret, Server
from simple_rpc._errors import BusyError, RemoteError
from simple_rpc.channel import ACK_TIMEOUT_S, Channel, ChannelState
from simple_rpc.link import open_channel
from simple_rpc.metrics import Counters
from simple_rpc.testing import FaultProxy, ManualClock, ScriptedPeer
from simple_rpc.testing.clock import settle
from tests.rpc_kit import LOOPS

GUARD_S = 30.0


@pytest.fixture(params=sorted(LOOPS), scope="module")
def event_loop_policy(request):
    return LOOPS[request.param]()


async def until(
    condition: Callable[[], object], clock: ManualClock | None = None, step_s: float = 0.001
) -> None:
    """Turns the loop until `condition()` holds, moving a manual clock a little at each turn."""

    async def turn() -> None:
        while not condition():
            if clock is not None:
                clock.advance(step_s)
            await asyncio.sleep(0)

    await asyncio.wait_for(turn(), GUARD_S)


class Side:
    """One end's channel, and everything it was told."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.items: list[object] = []
        self.batches: list[int] = []
        self.lost: list[RpcError] = []
        self.detached: list[RpcError] = []
        self.num_resumed = 0

    def take(self, items: list[object]) -> None:
        self.items += items
        self.batches.append(len(items))

    def watch(self, channel: Channel) -> None:
        self.channel = channel
        channel.on("ITEM", self.take)
        channel.on_lost = self.lost.append
        channel.on_detached = self.detached.append
        channel.on_resumed = self.resumed

    def resumed(self) -> None:
        self.num_resumed += 1


class World:
    """A server that accepts "link" and "worker" channels, and a client. One manual clock."""

    def __init__(self, secret: Secret | None = None, **limits: float) -> None:
        self.clock = ManualClock()
        self.metrics = Counters()
        self.limits = Limits(**limits)  # type: ignore[arg-type]
        self.server = Server(
            Identity("scheduler", "d0"),
            secret=secret,
            limits=self.limits,
            clock=self.clock,
            metrics=self.metrics,
        )
        self.client = Client(Identity("scheduler", "p0"), secret=secret, clock=self.clock)
        self.accepted: list[Side] = []
        self.peers: list[Identity] = []
        self.near = Side()
        self.on_accept: Callable[[Channel], None] = lambda channel: None
        self.table = self.server.on_channel("link", self.accept)
        self.worker_table = self.server.on_channel(
            "worker", self.accept, resume_s=10.0, max_channels=3
        )

    def accept(self, peer: Identity, channel: Channel) -> None:
        side = Side()
        side.watch(channel)
        self.peers.append(peer)
        self.accepted.append(side)
        self.on_accept(channel)

    @property
    def far(self) -> Side:
        return self.accepted[-1]

    async def open(self, address=None, kind: str = "link", heartbeat_s: float = 0.0) -> Channel:
        near = self.near
        near.channel = await open_channel(
            self.client,
            address or self.address,
            kind=kind,
            deadline=Deadline.after(3.0, self.clock),
            heartbeat_s=heartbeat_s,
            handlers={"ITEM": near.take},
            on_lost=near.lost.append,
            clock=self.clock,
            attributes={"rank": 3},
        )
        return near.channel

    async def close(self) -> None:
        await self.client.close()
        await self.server.close()
        await settle()


@pytest.fixture(params=["tcp", "unix", "secret"])
async def world(request, tmp_path) -> AsyncIterator[World]:
    world = World(Secret(b"s" * 32) if request.param == "secret" else None)
    where = f"unix://{tmp_path}/s" if request.param == "unix" else "tcp://127.0.0.1:0"
    world.address = await world.server.listen(where)
    yield world
    await world.close()


@pytest.fixture
async def tcp() -> AsyncIterator[World]:
    world = World(idle_s=5.0)
    world.address = await world.server.listen("tcp://127.0.0.1:0")
    yield world
    await world.close()


# -- delivery ----------------------------------------------------------------------------------------


async def test_news_flows_both_ways_in_order_each_item_once(world):
    near = await world.open()
    far = world.far.channel
    for i in range(5000):
        near.publish("ITEM", ["up", i])
        far.publish("ITEM", ["down", i])
        if i % 97 == 0:
            await asyncio.sleep(0)
    await until(lambda: not near.sender.num_unacked and not far.sender.num_unacked)
    assert world.far.items == [["up", i] for i in range(5000)]
    assert world.near.items == [["down", i] for i in range(5000)]
    assert world.peers[0].instance == "p0"
    assert near.peer.instance == "d0"
    assert dict(far.attributes) == {"rank": 3}


async def test_what_is_published_while_a_frame_is_in_flight_travels_in_the_next(tcp):
    near = await tcp.open()
    for i in range(1000):
        near.publish("ITEM", i)
    assert near.sender.num_in_flight == 1, "the first left at once, alone"
    await until(lambda: not near.sender.num_unacked)
    assert tcp.far.batches == [1, 999]
    assert near.sender.stats.num_frames == 2


async def test_what_the_acceptor_publishes_on_accepting_arrives(tcp):
    tcp.on_accept = lambda channel: [channel.publish("ITEM", i) for i in range(3)]
    await tcp.open()
    await until(lambda: len(tcp.near.items) == 3)
    assert tcp.near.items == [0, 1, 2]


async def test_a_handler_may_publish_and_when_flushed_tells_the_end(tcp):
    near = await tcp.open()
    far = tcp.far
    far.channel._handlers.clear()
    far.channel.on("ITEM", lambda items: [far.channel.publish("ITEM", -i) for i in items])
    for i in range(1, 101):
        near.publish("ITEM", i)
    flushed = asyncio.Event()
    near.when_flushed(flushed.set)
    await asyncio.wait_for(flushed.wait(), GUARD_S)
    assert not near.sender.num_unacked
    await until(lambda: len(tcp.near.items) == 100)
    assert tcp.near.items == [-i for i in range(1, 101)]
    now = asyncio.Event()
    near.when_flushed(now.set)
    assert now.is_set()


async def test_slots_bound_what_waits_and_a_reservation_always_publishes(tcp):
    near = await tcp.open()
    near.sender.max_slots = 4
    slots = near.reserve(2)
    near.publish("ITEM", 0)
    near.publish("ITEM", 1)
    with pytest.raises(BusyError, match="2 reserved, 2 unacknowledged"):
        near.publish("ITEM", 2)
    with pytest.raises(BusyError):
        near.reserve(1)
    slots.publish("ITEM", 3)
    slots.publish("ITEM", 4)
    with pytest.raises(ValueError, match="no slot left"):
        slots.publish("ITEM", 5)
    await until(lambda: not near.sender.num_unacked)
    assert tcp.far.items == [0, 1, 3, 4]
    assert near.sender.num_free == 4


async def test_an_item_that_cannot_travel_is_refused_to_its_author(tcp):
    near = await tcp.open()
    with pytest.raises(TypeError):
        near.publish("ITEM", object())
    with pytest.raises(ValueError, match="at most 2097152 bytes"):
        near.publish("ITEM", b"x" * (2 * 1024 * 1024 + 1))
    with pytest.raises(ValueError, match="four ASCII letters"):
        near.publish("ITEMS", 1)
    near.publish("ITEM", "fine")
    await until(lambda: tcp.far.items)
    assert tcp.far.items == ["fine"]


async def test_the_longest_item_fits(tcp):
    near = await tcp.open()
    longest = b"x" * (2 * 1024 * 1024 - 5)
    near.publish("ITEM", longest)
    near.publish("ITEM", longest)
    await until(lambda: not near.sender.num_unacked)
    assert tcp.far.items == [longest, longest]


# -- refusals and ends -------------------------------------------------------------------------------


async def test_an_unknown_kind_is_not_found_and_leaves_nothing_open(tcp):
    with pytest.raises(RemoteError, match="no channels of kind") as caught:
        await tcp.open(kind="nonsense")
    assert caught.value.code is Code.NOT_FOUND
    await until(lambda: tcp.server.stats().num_connections == 0)


async def test_the_acceptor_may_refuse(tcp):
    def refuse(channel: Channel) -> None:
        raise RpcError(Code.GONE, "not you")

    tcp.on_accept = refuse
    with pytest.raises(RemoteError, match="not you") as caught:
        await tcp.open()
    assert caught.value.code is Code.GONE
    assert len(tcp.table) == 0
    await until(lambda: tcp.server.stats().num_connections == 0)


async def test_closing_tells_the_peer_why_and_not_oneself(tcp):
    near = await tcp.open()
    near.close(Code.EXPIRED, "enough")
    near.close()
    await until(lambda: tcp.far.lost)
    assert tcp.far.lost[0].code is Code.EXPIRED
    assert "enough" in str(tcp.far.lost[0])
    assert not tcp.near.lost
    assert len(tcp.table) == 0
    near.publish("ITEM", 1)  # after the end: dropped and counted, not raised
    assert near.sender.stats.num_dropped == 1
    assert near.state is ChannelState.LOST


async def test_a_handler_that_raises_ends_the_channel_on_both_sides(tcp, caplog):
    near = await tcp.open()
    tcp.far.channel._handlers.clear()

    def broken(items: list[object]) -> None:
        raise KeyError("bug")

    tcp.far.channel.on("ITEM", broken)
    near.publish("ITEM", 1)
    await until(lambda: tcp.near.lost and tcp.far.lost)
    assert tcp.near.lost[0].code is Code.INTERNAL
    assert tcp.far.lost[0].code is Code.INTERNAL
    assert "KeyError" in str(tcp.near.lost[0])
    assert "the handler of ITEM news raised" in caplog.text


async def test_news_with_an_unknown_head_is_refused_whole(tcp):
    near = await tcp.open()
    near.publish("ITEM", 0)
    near.publish("ITEM", 1)
    near.publish("OTHR", 2)
    await until(lambda: tcp.near.lost and tcp.far.lost)
    assert tcp.near.lost[0].code is Code.BAD_REQUEST
    assert "OTHR" in str(tcp.near.lost[0])
    assert tcp.far.items == [0], "no item of the offending frame was delivered"


@pytest.mark.parametrize("who", ["server", "client"])
async def test_an_orderly_shutdown_ends_the_channel_on_both_sides(tcp, who):
    await tcp.open()
    await (tcp.server if who == "server" else tcp.client).close()
    await until(lambda: tcp.near.lost and tcp.far.lost)
    assert tcp.near.lost[0].code is Code.ABORTED
    assert tcp.far.lost[0].code is Code.ABORTED
    assert len(tcp.near.lost) == len(tcp.far.lost) == 1


async def test_a_cut_connection_is_a_loss_on_both_sides(tcp):
    async with FaultProxy(tcp.address) as proxy:
        near = await tcp.open(proxy.address)
        near.publish("ITEM", 1)
        await until(lambda: tcp.far.items)
        proxy.cut_all()
        await until(lambda: tcp.near.lost and tcp.far.lost)
    assert tcp.near.lost[0].code is Code.PEER_LOST
    assert tcp.far.lost[0].code is Code.PEER_LOST
    assert len(tcp.table) == 0


@pytest.mark.parametrize(
    ("frames", "code", "text"),
    [
        ([("NEWS", [7, [["ITEM", [1]]]])], Code.BAD_REQUEST, "6 items are missing"),
        ([("NEWS", [1, [["ITEM", []]]])], Code.BAD_REQUEST, "non-empty"),
        ([("NEWS", "garbage")], Code.BAD_REQUEST, "NEWS"),
        ([("ACKN", [9])], Code.BAD_REQUEST, "at most 1, got 9"),
        ([("ACKN", [])], Code.BAD_REQUEST, "ACKN"),
        ([("BEAT", 5)], Code.BAD_REQUEST, "BEAT"),
        ([("FAIL", [])], Code.BAD_REQUEST, "FAIL"),
        ([("LINK", [0, []])], Code.CORRUPT, "LINK"),
        ([("PREF", [0, []])], Code.CORRUPT, "PREF"),
    ],
)
async def test_a_peer_that_breaks_the_rules_is_answered_and_counted(tcp, frames, code, text):
    connection = await tcp.client.connect(tcp.address, Deadline.after(3.0, tcp.clock))
    fields = ["link", os.urandom(16), 1, 0, {}]
    await connection.request(
        int.from_bytes(b"LINK", "little"), fields, deadline=Deadline.after(3.0, tcp.clock)
    )
    reader, writer = connection.streams()
    from simple_rpc.testing import ScriptedConnection

    rude = ScriptedConnection(reader, writer)
    for head, body in frames:
        rude.send(head, body)
    answer = await asyncio.wait_for(rude.expect("FAIL"), GUARD_S)
    assert answer[0] == code
    assert text in answer[1]
    await until(lambda: tcp.far.lost)
    assert tcp.far.lost[0].code is code
    assert tcp.metrics.snapshot().counters["channel.violation"] == 1
    assert not tcp.far.items
    writer.close()


# -- heartbeat ---------------------------------------------------------------------------------------


async def test_an_idle_link_lives_for_hours_on_its_heartbeat(tcp):
    """idle_s is 5 s here: a channel is exempt."""
    await tcp.open(heartbeat_s=1.0)
    for _ in range(2 * 3600):
        tcp.clock.advance(0.5)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await settle()
    assert not tcp.near.lost
    assert not tcp.far.lost


async def test_an_idle_channel_without_heartbeat_is_exempt_from_idle_limits_too(tcp):
    near = await tcp.open(heartbeat_s=0.0)
    for _ in range(100):
        tcp.clock.advance(100.0)
        await settle(3)
    near.publish("ITEM", 1)
    await until(lambda: tcp.far.items)


async def test_three_missed_beats_are_a_loss_on_both_sides_and_two_are_not(tcp):
    async with FaultProxy(tcp.address) as proxy:
        await tcp.open(proxy.address, heartbeat_s=1.0)
        await settle(50)
        proxy.hang()  # half-open: the connection stands, nothing comes through
        for _ in range(29):
            tcp.clock.advance(0.1)
            await settle(3)
        assert not tcp.near.lost
        assert not tcp.far.lost
        for _ in range(2):
            tcp.clock.advance(0.1)
            await settle(3)
        assert tcp.near.lost[0].code is Code.PEER_LOST
        assert tcp.far.lost[0].code is Code.PEER_LOST
        assert "silent for 3" in str(tcp.far.lost[0])


async def test_a_process_that_was_stopped_listens_before_it_decides(tcp):
    """After ten seconds in which nobody here looked, the peer's beats may lie unread."""
    await tcp.open(heartbeat_s=1.0)
    tcp.clock.jump(10.0)
    await settle(50)
    assert not tcp.near.lost
    assert not tcp.far.lost
    for _ in range(50):
        tcp.clock.advance(0.1)
        await settle(5)
    assert not tcp.near.lost


async def test_news_that_is_never_acknowledged_is_a_loss_although_the_peer_beats(tcp):
    async def beats_but_never_acknowledges(peer) -> None:
        await peer.expect("HELO")
        me = Identity("scheduler", "d0")
        peer.send("OKAY", [1, me.role, me.instance, me.incarnation, os.urandom(32), False, b"", {}])
        await peer.expect("LINK")
        peer.send("OKAY", [os.urandom(16), 1, {"fresh": True}])
        while True:
            head, _ = await peer.read_frame()
            if head == "BEAT":
                peer.send("BEAT", [])

    async with ScriptedPeer(beats_but_never_acknowledges) as peer:
        near = await tcp.open(peer.address, heartbeat_s=1.0)
        near.publish("ITEM", 1)
        passed_s = 0.0
        while not tcp.near.lost:
            tcp.clock.advance(0.25)
            passed_s += 0.25
            await settle(30)
            assert passed_s < 3 * ACK_TIMEOUT_S
        assert passed_s >= ACK_TIMEOUT_S
    assert "did not acknowledge" in str(tcp.near.lost[0])


# -- the acceptor's table ----------------------------------------------------------------------------


async def test_a_table_full_of_attached_channels_is_busy(tcp):
    for _ in range(3):
        await tcp.open(kind="worker")
    with pytest.raises(RemoteError, match="all 3 channels are in use") as caught:
        await tcp.open(kind="worker")
    assert caught.value.code is Code.BUSY


async def test_the_longest_detached_channel_makes_room(tcp):
    channels = [await tcp.open(kind="worker") for _ in range(3)]
    for channel in channels[:2]:
        channel._attachment.connection.abort(RpcError(Code.PEER_LOST, "test"))
        await until(lambda: len([s for s in tcp.accepted if s.detached]) >= 1)
    await until(lambda: tcp.worker_table.num_detached == 2)
    await tcp.open(kind="worker")
    assert [side.lost[0].code if side.lost else None for side in tcp.accepted] == [
        Code.GONE,
        None,
        None,
        None,
    ]


async def test_a_detached_channel_is_lost_when_its_time_is_over(tcp):
    channel = await tcp.open(kind="worker")
    channel._attachment.connection.abort(RpcError(Code.PEER_LOST, "test"))
    await until(lambda: tcp.far.detached)
    tcp.clock.advance(9.9)
    assert not tcp.far.lost
    assert tcp.far.channel.state is ChannelState.DETACHED
    tcp.clock.advance(0.2)
    assert tcp.far.lost[0].code is Code.PEER_LOST
    assert "has not come back within 10 s" in str(tcp.far.lost[0])
    assert len(tcp.worker_table) == 0


@pytest.mark.parametrize("kind", ["link", "worker"])
async def test_a_new_incarnation_of_an_instance_ends_the_channels_of_the_old(tcp, kind):
    """F08's other half: the acceptor learns of a restart from the first frame of the new process."""
    await tcp.open(kind=kind)
    old = tcp.far
    restarted = Client(Identity("scheduler", "p0"), clock=tcp.clock)
    channel = await open_channel(
        restarted, tcp.address, kind=kind, deadline=Deadline.after(3.0, tcp.clock), clock=tcp.clock
    )
    assert old.lost[0].code is Code.PEER_LOST
    assert "was restarted" in str(old.lost[0])
    assert not tcp.far.lost
    assert channel.error is None
    await until(lambda: tcp.near.lost)
    await restarted.close()


async def test_other_instances_are_left_alone(tcp):
    await tcp.open()
    other = Client(Identity("scheduler", "p1"), clock=tcp.clock)
    await open_channel(
        other, tcp.address, kind="link", deadline=Deadline.after(3.0, tcp.clock), clock=tcp.clock
    )
    assert not tcp.accepted[0].lost
    assert len(tcp.table) == 2
    await other.close()


async def test_hundreds_of_channels_leave_no_task_and_no_descriptor(tcp):
    async def once() -> None:
        channel = await tcp.open()
        channel.publish("ITEM", 1)
        channel.close()
        await until(lambda: tcp.far.lost)

    await once()
    await settle(50)
    descriptors, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    for _ in range(200):
        await once()
    await until(lambda: tcp.server.stats().num_connections == 0)
    await settle(50)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert len(asyncio.all_tasks()) == tasks
    assert len(tcp.table) == 0


@pytest.mark.parametrize("who", ["near", "far"])
async def test_a_channel_that_is_over_is_freed_without_the_collector(tcp, who):
    """Thousands of channels come and go; none of them may wait for a collection."""
    far: list[Channel] = []
    tcp.server.on_channel("plain", lambda peer, channel: far.append(channel))
    near = await open_channel(
        tcp.client,
        tcp.address,
        kind="plain",
        deadline=Deadline.after(3.0, tcp.clock),
        clock=tcp.clock,
    )
    near.publish("ITEM", 1)
    gc.collect()
    gc.disable()
    try:
        (near if who == "near" else far[0]).close()
        await until(lambda: near.error is not None and far[0].error is not None)
        await settle(50)
        refs = [weakref.ref(near), weakref.ref(far.pop())]
        near = None  # type: ignore[assignment]
        await settle(50)
        tcp.clock.advance(100.0)  # nor is it held by a timer
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
