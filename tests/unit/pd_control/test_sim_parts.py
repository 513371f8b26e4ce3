"""The simulated world keeps its own rules: what it lets pass or refuses decides what a green run means."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pd_control.testing.sim_blocks import BlockPool
from pd_control.testing.sim_clock import EventQueue
from pd_control.testing.sim_memory import Content, RankMemory, make_tags
from pd_control.testing.sim_net import HEARTBEAT_LOSS_S, Channel, Network, Process
from pd_control.testing.sim_scenario import draw_scenario, head_range
from pd_control.testing.sim_trace import Trace, Violation


class Owner:
    def __init__(self) -> None:
        self.items: list[Any] = []
        self.lost: list[str] = []

    def on_news(self, channel: Channel, side: int, head: str, items: list[Any]) -> None:
        self.items += items

    def on_channel_lost(self, channel: Channel, side: int, reason: str) -> None:
        self.lost.append(reason)


class Net:
    """Two processes on two hosts."""

    def __init__(self, seed: int = 0) -> None:
        self.queue = EventQueue()
        self.net = Network(self.queue, random.Random(seed), Trace())
        self.a, self.b = Process(self.queue, "a", "ha"), Process(self.queue, "b", "hb")
        self.a.start()
        self.b.start()
        self.owners = Owner(), Owner()

    def channel(self) -> Channel:
        return self.net.open_channel(self.a, self.b, self.owners)

    def run(self) -> None:
        while self.queue.run_next():
            pass


# -- clock -------------------------------------------------------------------------------------------


def test_events_run_in_order_of_time_then_of_scheduling() -> None:
    queue, seen = EventQueue(), []
    queue.at(2.0, seen.append, "c")
    queue.at(1.0, seen.append, "a")
    queue.at(1.0, seen.append, "b")
    cancelled = queue.at(1.5, seen.append, "never")
    cancelled.cancel()
    while queue.run_next():
        pass
    assert seen == ["a", "b", "c"]
    assert queue.now_s == 2.0


def test_work_for_a_paused_process_waits_in_order_and_for_a_dead_one_is_dropped() -> None:
    net, seen = Net(), []
    net.a.paused_until_s = 5.0
    net.a.after(1.0, seen.append, 1)
    net.a.after(2.0, seen.append, 2)
    net.run()
    assert (seen, net.queue.now_s) == ([1, 2], 5.0)
    net.a.after(1.0, seen.append, 3)
    net.a.kill()
    net.a.start()
    net.run()
    assert seen == [1, 2]


# -- news ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_news_arrives_once_and_in_order_through_broken_connections(seed: int) -> None:
    net = Net(seed)
    net.net.break_channel_rate = 0.3
    channel = net.channel()
    for i in range(300):
        net.queue.at(i * 0.0003, channel.send, i % 2, "ITEM", i)
    net.run()
    assert net.owners[1].items == list(range(0, 300, 2))
    assert net.owners[0].items == list(range(1, 300, 2))
    assert net.owners[0].lost == net.owners[1].lost == []
    assert net.net.trace.counts["net.channel_breaks"] > 0


def test_a_long_partition_loses_the_channel_on_both_sides_a_short_one_does_not() -> None:
    for duration_s, lost in ((HEARTBEAT_LOSS_S * 2, 1), (HEARTBEAT_LOSS_S / 3, 0)):
        net = Net()
        channel = net.channel()
        net.net.partition("ha", "hb", duration_s)
        channel.send(0, "ITEM", 1)
        net.run()
        assert [len(o.lost) for o in net.owners] == [lost, lost]
        assert net.owners[1].items == ([] if lost else [1])


def test_a_dead_peer_is_noticed_by_the_living_one_only() -> None:
    net = Net()
    channel = net.channel()
    net.b.kill()
    net.net.process_died(net.b)
    channel.send(0, "ITEM", 1)
    net.run()
    assert [len(o.lost) for o in net.owners] == [1, 0]
    assert net.owners[1].items == []


def test_a_stalled_stream_keeps_its_order() -> None:
    net = Net()
    channel = net.channel()
    channel.send(0, "ITEM", 1)
    channel.stall(0, 0.5)
    channel.send(0, "ITEM", 2)
    net.run()
    assert net.owners[1].items == [1, 2]
    assert net.queue.now_s > 0.5


# -- calls ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_a_call_ends_once_whatever_is_lost(seed: int) -> None:
    net = Net(seed)
    net.net.lose_call_rate = 0.4
    net.net.duplicate_call_rate = 0.4
    handled, ends = [], []

    def handle(answer: Any) -> None:
        handled.append(1)
        answer("yes")

    net.net.call(net.a, net.b, handle, ends.append, ends.append, timeout_s=1.0)
    net.run()
    assert len(ends) == 1
    assert ends[0] in ("yes", "TIMEOUT")
    assert ends[0] == "TIMEOUT" or handled


def test_a_call_to_the_dead_or_the_wrong_incarnation() -> None:
    net = Net()
    ends: list[str] = []
    old = net.b.incarnation
    net.b.kill()
    net.net.call(net.a, net.b, lambda answer: answer(1), ends.append, ends.append, 1.0)
    net.run()
    net.b.start()
    net.net.call(net.a, net.b, lambda answer: answer(1), ends.append, ends.append, 1.0, old)
    net.run()
    assert ends == ["UNREACHABLE", "PEER_LOST"]


# -- memory ---------------------------------------------------------------------------------------------


def content(seed: int, length: int = 11, block_size: int = 4) -> Content:
    return Content(make_tags(random.Random(seed), length), length, block_size)


def test_a_copy_between_unequal_ranks_is_right_and_every_kind_of_wrong_is_found() -> None:
    text = content(1)
    sources = [RankMemory(2, 8, 4, *head_range(r, 2, 6)) for r in range(2)]
    target = RankMemory(2, 8, 4, *head_range(0, 1, 6))
    for source in sources:
        for layer in range(2):
            source.write(layer, [3, 1, 2], 0, 11, text)
    assert target.first_wrong([5, 6, 7], 11, text) is not None

    def copy(first: int, end: int, shift: int = 0) -> None:
        for source in sources:
            lo, hi = source.atom_lo, source.atom_hi
            for layer in range(2):
                pieces = source.read(layer, [3, 1, 2], first, end, lo, hi)
                target.place(layer, [5 + shift, 6 + shift, 7 + shift][:3], pieces, lo, hi)

    copy(0, 5)
    copy(5, 11)
    assert target.first_wrong([5, 6, 7], 11, text) is None
    # foreign content, an earlier block in place of a later one, one layer of one head missing
    assert target.first_wrong([5, 6, 7], 11, content(2)) is not None
    assert target.first_wrong([6, 5, 7], 11, text) is not None
    target.layers[1][6] = [-1 if i == 9 else v for i, v in enumerate(target.layers[1][6])]
    token, layer, atom, what = target.first_wrong([5, 6, 7], 11, text) or (0, 0, 0, "")
    assert (token, layer, atom, what) == (4 + 9 % 4, 1, 9 // 4, "never written")


def test_replicated_heads_and_mla() -> None:
    assert [head_range(r, 4, 2) for r in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [head_range(r, 2, 0) for r in range(2)] == [(0, 1), (0, 1)]
    assert [head_range(r, 3, 6) for r in range(3)] == [(0, 2), (2, 4), (4, 6)]


# -- pool ------------------------------------------------------------------------------------------------


def test_the_pool_refuses_what_would_be_a_fault_of_the_lease() -> None:
    pool = BlockPool(4, random.Random(0))
    blocks = pool.allocate(3)
    assert blocks is not None
    assert pool.allocate(2) is None
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 4
    with pytest.raises(Violation, match="twice"):
        pool.release(blocks)
    with pytest.raises(Violation, match="nobody owns"):
        pool.hold(blocks)


def test_the_pool_asks_the_guard_when_a_block_becomes_free() -> None:
    def guard(block: int) -> None:
        if block == 1:
            raise Violation("reuse", "block 1 is still read")

    pool = BlockPool(4, random.Random(0))
    blocks = pool.allocate(4)
    assert blocks is not None
    pool.guard = guard
    pool.release([0])
    with pytest.raises(Violation, match="block 1"):
        pool.release([1])


def test_a_cached_block_is_found_until_it_is_handed_out_again() -> None:
    pool = BlockPool(2, random.Random(0))
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.register(blocks[0], 77)
    pool.release(blocks)
    assert pool.lookup([77, 78]) == [blocks[0]]
    pool.touch([blocks[0]])
    pool.release([blocks[0]])
    assert pool.allocate(2) is not None
    assert pool.lookup([77]) == []


# -- scenarios -------------------------------------------------------------------------------------------


def test_scenarios_cover_what_they_should() -> None:
    drawn = [draw_scenario(seed) for seed in range(600)]
    sizes = [sum(max(1, len(r.takers)) for r in s.requests) for s in drawn]
    assert 15 < sum(sizes) / len(sizes) < 25
    assert max(sizes) >= 200
    assert {s.generation for s in drawn} == {"step", "bypass", "substep"}
    assert {r.mode for s in drawn for r in s.requests} == {"single", "dual"}
    assert {t.policy for s in drawn for r in s.requests for t in r.takers} == {
        "fail",
        "recompute",
        "retry",
    }
    for prefill in (True, False):
        counts = [sum(i.prefill is prefill for i in s.instances) for s in drawn]
        assert set(counts) == {1, 2, 3, 4}
    assert {i.tp for s in drawn for i in s.instances} == {1, 2, 3, 4}
    unequal = [s for s in drawn if len({i.tp for i in s.instances}) > 1]
    assert len(unequal) > len(drawn) / 3
    assert {len(r.takers) for s in drawn for r in s.requests} == {0, 1, 2, 3}
    assert sum(s.is_calm for s in drawn) > 60
    assert 0 in {s.num_kv_heads for s in drawn}


def test_leaving_out_keeps_the_rest() -> None:
    scenario = next(s for s in map(draw_scenario, range(100)) if len(s.faults) > 1)
    small = scenario.without({scenario.requests[0].index}, {0})
    assert small.requests == scenario.requests[1:]
    assert small.faults == scenario.faults[1:]
    assert small.instances == scenario.instances
