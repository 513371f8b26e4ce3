"""D asks one P so much at a time; the rest waits its turn at D, longer than a call may take (F17)."""

from __future__ import annotations

import pytest

from pd_control.codes import Code
from pd_control.messages import Topology
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.protocol.settings import Limits, Settings
from pd_control.testing.pair import Pair, content


def make(max_calls: int = 2) -> Pair:
    settings = Settings(limits=Limits(max_calls_per_peer=max_calls))
    topology = Topology(1, num_kv_heads=4)
    return Pair(topology, topology, settings)


def burst(pair: Pair, num: int) -> list[fx.Call]:
    """So many requests with blocks; the calls that leave, undelivered."""
    for i in range(num):
        pair.add_d_request(f"r{i}", content(10))
        pair.allocate(f"r{i}", 10)
    return calls(pair)


def calls(pair: Pair) -> list[fx.Call]:
    """Delivers everything but calls; takes those."""
    found: list[fx.Call] = []
    while pair.outbox:
        found += pair.take(fx.Call)
        if pair.outbox:
            pair.deliver(*pair.outbox.popleft())
    return found


def answer(pair: Pair, call: fx.Call, code: Code = Code.ACCEPTED) -> None:
    pair.to_d(ev.CallResult(call.call_id, code))


def test_answers_let_the_next_ones_go_in_order() -> None:
    pair = make()
    first = burst(pair, 5)
    assert [c.message.info.request_id for c in first] == ["r0", "r1"]
    view = pair.d.inspect("r3", pair.now_s)
    assert view is not None
    assert (view["state"], view["deadline"]["name"]) == ("REQUESTING", "turn to call")
    answer(pair, first[0])
    answer(pair, first[1])
    assert [c.message.info.request_id for c in calls(pair)] == ["r2", "r3"]


def test_waiting_for_a_turn_is_longer_than_a_call_but_ends() -> None:
    pair = make()
    deadlines = pair.settings.deadlines
    (first, _) = burst(pair, 4)
    answer(pair, first)
    pair.take(fx.Call)
    pair.now_s += deadlines.connect_s + 1
    pair.to_d(ev.Tick())
    assert [c.message.info.request_id for c in calls(pair)] == ["r3"], "it did not time out"
    assert {name: o[0].code for name, o in pair.outcomes.items()} == {
        "r1": Code.TIMEOUT,  # their calls were out and not answered
        "r2": Code.TIMEOUT,
    }


def test_whose_turn_never_comes_is_told_busy() -> None:
    pair = make(1)
    burst(pair, 2)
    queue_s = pair.settings.deadlines.queue_s
    # The first one's call never ends (its deadline is moved away).
    pair.now_s += queue_s + 1
    pair.d._requests["r0"].deadline_name = "call"
    pair.d._timers.set("r0", pair.now_s + 100)
    pair.to_d(ev.Tick())
    pair.pump()
    (outcome,) = pair.outcomes["r1"]
    assert (outcome.kind, outcome.code) == ("recompute", Code.BUSY)


@pytest.mark.parametrize("way", ["abort", "link", "refused"])
def test_every_end_gives_its_place_to_the_next(way: str) -> None:
    pair = make(1)
    (first,) = burst(pair, 3)
    if way == "abort":
        pair.to_d(ev.AbortRequested("r0", "gone"))
    elif way == "refused":
        answer(pair, first, Code.BUSY)
    else:
        pair.lose_link()
        assert calls(pair) == [], "nobody is asked over a link that is lost"
        assert {o[0].code for o in pair.outcomes.values()} == {Code.PEER_LOST}
        assert len(pair.outcomes) == 3
        assert all(peer.num_calls == 0 and not peer.unsent for peer in pair.d._peers)
        return
    assert [c.message.info.request_id for c in calls(pair)] == ["r1"]
    pair.to_d(ev.AbortRequested("r2", "gone while it waits"))
    pair.to_d(ev.AbortRequested("r1", "gone"))
    pair.pump()
    assert all(peer.num_calls == 0 and not peer.unsent for peer in pair.d._peers)
