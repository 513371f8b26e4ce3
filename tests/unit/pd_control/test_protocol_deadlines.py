"""Every deadline of the system, on a clock that is a number: what is owned, when it ends, what follows.

Each test also shows that nothing happens a moment before.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_control.codes import Code
from pd_control.messages import Final, Grant, GrantOp, Renew, Started, TransferKv
from pd_control.protocol import effects as fx
from pd_control.protocol import events as ev
from pd_control.protocol.peers import LinkState
from pd_control.protocol.planner import ScheduledRequest
from pd_control.protocol.settings import Deadlines, Limits, Settings
from pd_control.testing.pair import Pair, content

PROMPT = content(10)
E = 0.001  # a moment


def make(**deadlines: float) -> Pair:
    defaults = Deadlines()
    settings = Settings(deadlines=replace(defaults, **deadlines), on_failure=ev.OnFailure.FAIL)
    return Pair(settings=settings)


def told(pair: Pair, request_id: str = "r") -> list[tuple[str, Code]]:
    return [(o.kind, o.code) for o in pair.outcomes.get(request_id, [])]


def wait(pair: Pair, seconds: float, request_id: str = "r") -> None:
    """Nothing is told before `seconds`; then time has passed."""
    pair.advance(seconds - E)
    assert told(pair, request_id) == []
    pair.advance(2 * E)


def hold_p(pair: Pair, request_id: str = "p-r") -> None:
    pair.add_p_request(request_id, PROMPT)
    pair.plan(ScheduledRequest(request_id, 0, 10, pair.blocks_for(10)))
    pair.finish_step(pair.step)
    pair.finish_p_request(request_id)
    pair.pump()


# --- D -----------------------------------------------------------------------------------------


def test_connect_no_link_is_unreachable() -> None:
    pair = make()
    pair.add_d_request("r", PROMPT)
    pair.allocate("r", 10)
    pair.take(fx.OpenLink)
    wait(pair, 3)
    assert told(pair) == [("failed", Code.UNREACHABLE)]
    pair.assert_clean()
    (peer,) = pair.d._peers
    assert peer.link is LinkState.NONE, "a driver that never reports blocks nobody for ever"
    pair.to_d(ev.LinkUp(pair.p_id, 1, pair.helo("p", 1)))
    assert pair.take(fx.CloseLink), "too late"


def test_connect_no_answer_to_the_call_is_a_timeout_and_p_is_told() -> None:
    pair = make()
    pair.add_d_request("r", PROMPT)
    pair.allocate("r", 10)
    pair.pump_until(fx.Call)
    (call,) = pair.take(fx.Call)
    assert call.deadline_s == pair.now_s + 3
    wait(pair, 3)
    assert told(pair) == [("failed", Code.TIMEOUT)]
    # The message was only slow: P refuses it, its ABORT came first.
    pair.deliver("d", call)
    pair.pump()
    assert not pair.admitted
    pair.advance(100)
    pair.assert_clean()


def test_blocks_no_blocks_is_busy() -> None:
    pair = make()
    pair.add_d_request("r", PROMPT)
    wait(pair, 60)
    assert told(pair) == [("failed", Code.BUSY)]
    pair.allocate("r", 10)  # too late: given back at once
    pair.pump()
    pair.assert_clean()


def test_grant_open_a_silent_worker_is_fatal_and_its_blocks_stay_leased() -> None:
    pair = make()
    pair.mute.add(0)
    pair.add_d_request("r", PROMPT)
    pair.allocate("r", 10)
    wait(pair, 5)
    assert told(pair) == [("failed", Code.INTERNAL)]
    assert [f.rank for f in pair.fatal] == [0]
    pair.advance(1000)
    assert len(pair.leases) == 1, "never a timer"
    view = pair.d.inspect("r", pair.now_s)
    assert view is not None
    assert "lost" in view["why_held"]
    pair.to_d(ev.WorkerDied(0, pair.d_workers[0]))
    pair.pump()
    pair.assert_clean()


def test_grant_close_a_silent_worker_is_fatal_but_the_client_was_told_at_once() -> None:
    pair = make()
    pair.add_d_request("r", PROMPT)
    pair.allocate("r", 10)
    pair.pump()
    pair.mute.add(0)
    pair.to_d(ev.AbortRequested("r"))
    pair.pump()
    assert told(pair) == [("failed", Code.ABORTED)]
    pair.advance(5 - E)
    assert not pair.fatal
    pair.advance(2 * E)
    assert [f.rank for f in pair.fatal] == [0]
    assert len(pair.leases) == 1
    # A late acknowledgement is a proof like any other.
    key = pair.key("r")
    pair.to_d(ev.GrantAcked(0, pair.d_workers[0], key, GrantOp.CLOSE, Code.OK))
    pair.advance(1000)
    pair.assert_clean()


def test_queue_not_started_gives_the_blocks_back_and_is_not_retried() -> None:
    pair = make()
    pair.add_d_request("r", PROMPT, on_failure=ev.OnFailure.RETRY, after_retries=ev.OnFailure.FAIL)
    pair.allocate("r", 10)
    pair.pump()
    wait(pair, 60)
    assert told(pair) == [("failed", Code.TIMEOUT)]
    assert not len(pair.leases)
    pair.advance(1000)
    pair.assert_clean()


def test_queue_a_turn_to_call_that_does_not_come_gives_the_blocks_back() -> None:
    settings = Settings(
        limits=Limits(max_calls_per_peer=1),
        on_failure=ev.OnFailure.RETRY,
        after_retries=ev.OnFailure.FAIL,
        deadlines=replace(Deadlines(), connect_s=100.0),
    )
    pair = Pair(settings=settings)
    for name in ("first", "r"):
        pair.add_d_request(name, PROMPT)
        pair.allocate(name, 10)
        while pair.outbox:
            if not isinstance(pair.outbox[0][1], fx.Call):
                pair.deliver(*pair.outbox.popleft())
            else:
                pair.outbox.popleft()  # P is slow to answer
    wait(pair, 60)
    assert told(pair) == [("failed", Code.BUSY)]
    pair.to_d(ev.AbortRequested("first"))
    pair.advance(200)
    pair.assert_clean()


def test_progress_p_says_all_is_sent_and_data_is_missing() -> None:
    pair = make()
    pair.add_d_request("r", PROMPT)
    pair.allocate("r", 10)
    pair.pump()
    pair.to_d(ev.FinalReceived(pair.p_id, Final(pair.key("r"), Code.OK, 9)))
    wait(pair, 10)
    assert told(pair) == [("failed", Code.TIMEOUT)]
    message = pair.outcomes["r"][0].message
    assert "(0, 0)" in message, "names who is missing"


def test_started_lets_the_workers_clocks_run() -> None:
    pair = make()
    pair.add_d_request("r", PROMPT)
    pair.allocate("r", 10)
    pair.pump()
    pair.to_d(ev.StartedReceived(pair.p_id, Started(pair.key("r"))))
    starts = pair.take(
        fx.WorkerNews, lambda e: isinstance(e.item, Grant) and e.item.op == GrantOp.START
    )
    assert [s.rank for s in starts] == [0]


def test_load_the_whole_load() -> None:
    pair = make()
    pair.add_d_request("r", PROMPT)
    pair.allocate("r", 10)
    pair.pump()
    pair.to_d(ev.StartedReceived(pair.p_id, Started(pair.key("r"))))
    wait(pair, 120)
    assert told(pair) == [("failed", Code.TIMEOUT)]
    assert "load" in pair.outcomes["r"][0].message


# --- P -----------------------------------------------------------------------------------------


def test_park_a_request_that_never_comes_is_not_found() -> None:
    pair = make()
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    pair.allocate("r", 10)
    wait(pair, 10)
    assert told(pair) == [("failed", Code.NOT_FOUND)]
    pair.assert_clean()


def test_park_is_also_how_long_an_early_abort_is_remembered() -> None:
    for late, admitted in ((9.9, 0), (10.1, 1)):
        pair = make(connect_s=1.0)
        pair.add_d_request("r", PROMPT)
        pair.allocate("r", 10)
        pair.pump_until(fx.Call)
        (call,) = pair.take(fx.Call)
        pair.to_d(ev.AbortRequested("r"))
        pair.advance(late)
        pair.deliver("d", call)
        pair.pump()
        assert len(pair.admitted) == admitted


def test_admit_an_engine_that_does_not_answer_an_admission_is_busy() -> None:
    pair = make()
    pair.add_d_request("r", PROMPT)
    pair.allocate("r", 10)
    pair.pump_until(fx.AdmitRequest)
    (admit,) = pair.take(fx.AdmitRequest)
    pair.pump()
    pair.advance(10 - E)
    assert told(pair) == []
    at = pair.p.next_deadline()
    assert at is not None
    pair.now_s = at
    pair.to_p(ev.Tick())
    pair.outbox.appendleft(("p", admit))  # the core thread takes its commands in order
    pair.pump()
    assert told(pair) == [("failed", Code.BUSY)]
    pair.advance(100)
    pair.assert_clean()


def test_hold_ends_without_a_taker() -> None:
    pair = make()
    hold_p(pair)
    pair.advance(30 - E)
    assert pair.p_refs.counts
    pair.advance(2 * E)
    assert not pair.p_refs.counts
    pair.assert_clean()
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    pair.allocate("r", 10)
    pair.pump()
    assert told(pair) == [("failed", Code.GONE)]


def test_hold_is_renewed_by_a_live_d_up_to_hold_max() -> None:
    pair = make()
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")  # D waits for blocks, P holds
    pair.pump()
    hold_p(pair)
    start = pair.now_s
    pair.advance(59)
    assert pair.p_refs.counts, "renewed"
    renewals = [
        e for _, e in pair.delivered if isinstance(e, fx.LinkNews) and isinstance(e.item, Renew)
    ]
    assert len(renewals) >= 5
    pair = make(blocks_s=1000.0)
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    pair.pump()
    hold_p(pair)
    start = pair.now_s
    pair.advance(120 - E)
    assert pair.p_refs.counts
    pair.advance(2 * E)
    assert not pair.p_refs.counts
    assert pair.now_s - start == pytest.approx(120, abs=0.01)


def test_renewals_of_many_requests_travel_in_items_that_p_takes() -> None:
    pair = make(blocks_s=1000.0)
    for n in range(5000):
        pair.add_d_request(f"d{n}", PROMPT, remote_request_id=f"p{n}")
    pair.pump()
    pair.advance(10 + E)
    sizes = [
        len(e.item.request_ids)
        for _, e in pair.delivered
        if isinstance(e, fx.LinkNews) and isinstance(e.item, Renew)
    ]
    assert sum(sizes[-2:]) == 5000
    assert "renew.too_many" not in pair.p.counters


def test_hold_tombstones_answer_gone_only_for_their_time() -> None:
    pair = make(tombstone_s=60.0)
    hold_p(pair)
    pair.advance(30 + 61)
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    pair.allocate("r", 10)
    pair.pump()
    assert told(pair) == [], "parked: P cannot know that this id is an old one"
    pair.advance(11)
    assert told(pair) == [("failed", Code.NOT_FOUND)]


def test_queue_on_p_is_a_backstop_for_a_d_that_never_gives_up() -> None:
    pair = make(queue_s=60.0)
    pair.add_p_request("p-r", PROMPT)
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    pair.allocate("r", 10)
    pair.pump()
    (key,) = pair.p._transfers
    pair.now_s += 119
    pair.to_p(ev.Tick())
    assert key in pair.p._transfers
    pair.now_s += 2
    pair.to_p(ev.Tick())
    finals = pair.take(fx.LinkNews, lambda e: isinstance(e.item, Final))
    assert [f.item.code for f in finals] == [Code.TIMEOUT]  # type: ignore[union-attr]


def test_send_the_whole_send_ends_in_draining() -> None:
    pair = make(hold_max_s=1000.0)
    hold_p(pair)
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    pair.allocate("r", 10)
    pair.pump()
    pair.now_s += 120 - E
    pair.to_p(ev.Tick())
    (transfer,) = pair.p._transfers.values()
    assert transfer.live
    pair.now_s += 2 * E
    pair.to_p(ev.Tick())
    assert not transfer.live
    assert pair.take(fx.WorkerNews), "cancelled"
    finals = pair.take(fx.LinkNews, lambda e: isinstance(e.item, Final))
    assert [f.item.code for f in finals] == [Code.TIMEOUT]  # type: ignore[union-attr]


def test_drain_a_rank_that_does_not_answer_a_cancel_is_fatal_and_the_lease_stays() -> None:
    pair = make()
    hold_p(pair)
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    pair.allocate("r", 10)
    pair.pump()
    pair.to_d(ev.AbortRequested("r"))
    pair.pump_until(fx.WorkerNews)
    while not [e for s, e in pair.outbox if s == "p" and isinstance(e, fx.WorkerNews)]:
        pair.deliver(*pair.outbox.popleft())
    pair.take(fx.WorkerNews, lambda e: not isinstance(e.item, Grant))
    pair.pump()
    pair.advance(5 - E)
    assert not pair.fatal
    pair.advance(2 * E)
    assert [f.rank for f in pair.fatal] == [0]
    pair.advance(1000)
    assert pair.p_refs.counts, "never a timer"
    pair.to_p(ev.WorkerDied(0, pair.p_workers[0]))
    pair.pump()
    pair.advance(100)
    pair.assert_clean()


def test_ack_a_lost_step_report_is_unknown_and_the_step_counts_as_failed() -> None:
    pair = Pair(pair_topology(2), pair_topology(1), Settings(on_failure=ev.OnFailure.FAIL))
    pair.add_p_request("p-r", PROMPT)
    pair.plan(ScheduledRequest("p-r", 0, 10, pair.blocks_for(10)))
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    pair.allocate("r", 10)
    pair.pump()
    pair.to_p(ev.StepFinished(1, 0, Code.OK, 1))
    pair.advance(5 - E)
    assert told(pair) == []
    pair.advance(2 * E)
    assert told(pair) == [("failed", Code.TIMEOUT)]
    pair.planner.step_finished(1)
    pair.to_p(ev.StepFinished(1, 1, Code.OK, 0))  # found after all: not believed any more
    assert pair.p.counters["step_finished.unknown"] == 1
    pair.advance(100)
    pair.assert_clean()


def pair_topology(tp: int):  # type: ignore[no-untyped-def]
    from pd_control.messages import Topology

    return Topology(tp, num_kv_heads=4)


def test_pressure_the_oldest_hold_goes_while_requests_wait_for_blocks() -> None:
    pair = make()
    for name in ("old", "young", "youngest"):
        hold_p(pair, name)
        pair.advance(0.1)
    pair.to_p(ev.BlocksWanted(4))  # each holds 3
    pair.pump()
    assert len(pair.p._requests) == 3, "too young, for a moment"
    pair.advance(1)
    assert list(pair.p._requests) == ["youngest"]
    pair.to_p(ev.BlocksWanted(0))
    pair.advance(5)
    assert list(pair.p._requests) == ["youngest"]


def test_heartbeat_the_loss_of_a_link_ends_what_depends_on_it_on_both_sides() -> None:
    pair = make()
    hold_p(pair)
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    pair.allocate("r", 10)
    pair.pump()
    pair.lose_link()
    pair.pump()
    assert told(pair) == [("failed", Code.PEER_LOST)]
    assert pair.p_refs.counts, "P still holds: another D, or the same over a new link, may come"
    pair.advance(100)
    pair.assert_clean()


def test_every_live_request_has_a_deadline_in_every_state() -> None:
    """R2 as a walk: at each point of a whole life, both sides can say what ends the wait."""
    pair = make()
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")

    def check() -> None:
        view = pair.d.inspect("r", pair.now_s)
        assert view is None or view["deadline"] is not None, view
        for transfer in pair.p._transfers:
            found = pair.p.inspect("p-r", pair.now_s)
            assert found is not None, transfer
            for one in found["transfers"]:
                assert one["deadline"] is not None, one

    check()
    pair.allocate("r", 10)
    for _ in range(200):
        if not pair.outbox:
            break
        pair.deliver(*pair.outbox.popleft())
        check()
    pair.add_p_request("p-r", PROMPT)
    check()
    pair.plan(ScheduledRequest("p-r", 0, 10, pair.blocks_for(10)))
    pair.pump()
    check()
    pair.sent(pair.key("r"), 9)
    check()
    pair.landed(pair.key("r"), 9)
    pair.finish_step(1)
    pair.finish_p_request("p-r")
    pair.pump()
    assert told(pair) == [("loaded", Code.OK)]
    pair.assert_clean()


def test_the_message_to_p_leaves_only_after_every_grant_is_acknowledged() -> None:
    pair = Pair(pair_topology(1), pair_topology(4))
    pair.add_d_request("r", PROMPT, remote_request_id="p-r")
    pair.allocate("r", 10)
    pair.pump_until(fx.WorkerNews)
    opens = pair.take(fx.WorkerNews)
    assert len(opens) == 4
    for number, grant in enumerate(opens):
        assert not [e for _, e in pair.outbox if isinstance(e, fx.Call)], number
        pair.deliver("d", grant)
    (call,) = pair.take(fx.Call)
    assert isinstance(call.message, TransferKv)
